"""The compiled index finds what the Python one finds, whatever was added, dropped or asked."""

import random
import shutil
import subprocess
import sys
import time
from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.compiling import library as compiling
from outrider.compiling.store import CompileFailed
from outrider.compiling.toolchain import find_compiler
from retrieval_service.loading import load
from retrieval_service.past.compiled_index import (
    CompiledIndex,
    IndexLibrary,
    check_library,
    find_library,
)
from retrieval_service.past.outputs import Limits, PastOutputs
from retrieval_service.past.python_index import READ, PythonIndex
from retrieval_service.past.text import PastText
from retrieval_service.settings import RetrievalSettings

SOURCE = Path(__file__).parents[3] / "retrieval_service/past/past_index.cpp"
DELETIONS = """
import sys
from pathlib import Path
from retrieval_service.past.compiled_index import CompiledIndex, IndexLibrary

library = IndexLibrary(Path(sys.argv[1]))
library.delete = lambda index: print("deleted")
short, long = CompiledIndex(library), CompiledIndex(library)
del short
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> IndexLibrary:
    if find_compiler() is None:
        pytest.skip("there is no C++ compiler here")
    found = find_library(tmp_path_factory.mktemp("cache"), lambda: False, compiles=True)
    assert found is not None
    return found


class Both:
    """The same text twice: once indexed in Python, once in C++ from `compile` on."""

    def __init__(self, library: IndexLibrary, token_limit: int) -> None:
        self._library = library
        self.python, self.compiled = PastText(token_limit), PastText(token_limit)

    def compile(self) -> None:
        self.compiled.use(self._library)

    def extend(self, session: str, ids: Sequence[int]) -> None:
        assert self.python.extend(session, ids) == self.compiled.extend(session, ids)

    def finish(self, session: str) -> None:
        self.python.finish(session)
        self.compiled.finish(session)

    def forget(self, session: str) -> None:
        assert self.python.forget(session) == self.compiled.forget(session)

    def tidy(self, steps: int) -> None:
        assert self.python.tidy(steps) == self.compiled.tidy(steps)

    def agree_on(self, ids: Sequence[int], depth: int) -> None:
        assert self.python.read(ids, depth) == self.compiled.read(ids, depth)


def live_through(both: Both, choose: random.Random, steps: int, ids: int, compiled_from: int) -> None:
    """Random sessions grow, end, are forgotten and evicted, and are looked up at every step."""
    spoken: list[int] = [0]
    for step in range(steps):
        if step == compiled_from:
            both.compile()
        session = choose.choice("abcdef")
        what = choose.random()
        if what < 0.7:
            count = choose.randrange(1, 400 if what < 0.05 else 12)
            start = choose.randrange(len(spoken))
            new = [*spoken[start : start + count // 2], *choose.choices(range(ids), k=count)]
            spoken = (spoken + new)[-2000:]
            both.extend(session, new)
        elif what < 0.78:
            both.finish(session)
        elif what < 0.82:
            both.forget(session)
        else:
            both.tidy(choose.randrange(1, 200))
        start = choose.randrange(len(spoken))
        both.agree_on(spoken[start : start + choose.randrange(1, 40)], choose.randrange(1, 20))
        both.agree_on(choose.choices(range(ids), k=3), 5)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    token_limit=st.sampled_from([100, 1_000, 30_000]),
    ids=st.sampled_from([1, 2, 5, 60]),
    compiled_from=st.integers(0, 150),
)
def test_it_finds_the_same_whenever_it_takes_over(
    library: IndexLibrary, seed: int, token_limit: int, ids: int, compiled_from: int
) -> None:
    live_through(Both(library, token_limit), random.Random(seed), 200, ids, compiled_from)


@pytest.mark.parametrize("compiled_from", [0, 700])
def test_it_reads_the_same_of_many_occurrences(library: IndexLibrary, compiled_from: int) -> None:
    both = Both(library, 1_000_000)
    choose = random.Random(1)
    for step in range(1_000):
        if step == compiled_from:
            both.compile()
        both.extend(f"{step % 7}", choose.choices(range(2), k=60))
    for ids in ([0], [1], [0, 1], [1, 1, 0], choose.choices(range(2), k=12)):
        both.agree_on(ids, 9)
    assert len(both.compiled.read([0], 9)[1]) == READ, "far more blocks than are read"


def test_files_of_either_are_read_by_the_other(library: IndexLibrary, tmp_path: Path) -> None:
    limits = Limits(tenant_tokens=3_000, total_tokens=100_000)
    choose = random.Random(5)
    told = [choose.choices(range(4), k=choose.randrange(1, 90)) for _ in range(120)]
    folders = [tmp_path / "python", tmp_path / "compiled"]
    for folder in folders:
        outputs = PastOutputs(folder, limits)
        if folder.name == "compiled":
            outputs.use(library)
        for number, ids in enumerate(told):
            outputs.extend("acme", f"{number % 50}", ids)
            outputs.extend("late", f"{number}", ids[:5])
        outputs.close()
    opened = [PastOutputs(folder, limits) for folder in folders]
    opened[0].use(library)
    assert opened[0].outputs("acme") == opened[1].outputs("acme") != []
    for tenant in ("acme", "late"):
        ours, theirs = [outputs.memory(tenant) for outputs in opened]
        for ids in told:
            asked = {"node_limit": 20, "depth": 8}
            assert ours.lookup(ids[:30], **asked) == theirs.lookup(ids[:30], **asked)
    for outputs in opened:
        outputs.close()


def test_a_new_tenant_gets_the_library_too(library: IndexLibrary) -> None:
    outputs = PastOutputs(None)
    outputs.use(library)
    outputs.extend("new", "s", [1, 2, 3])
    assert isinstance(outputs._tenants["new"].text._index, CompiledIndex)


def test_a_worker_has_it_compiled_once_and_its_next_start_finds_it(
    library: IndexLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = RetrievalSettings(folder=str(tmp_path / "memory"), cache_dir=tmp_path / "cache")

    def uses_it(past: PastOutputs) -> bool:
        return isinstance(past._tenants["acme"].text._index, CompiledIndex)

    first = load(settings)
    assert first.past is not None
    first.past.extend("acme", "s", [1, 2, 3, 4])
    until_s = time.monotonic() + 60
    while not uses_it(first.past) and time.monotonic() < until_s:
        time.sleep(0.01)
    assert uses_it(first.past)
    first.close()
    monkeypatch.setattr(compiling, "compile_command", None)
    second = load(settings)
    assert second.past is not None
    assert uses_it(second.past)
    assert second.past.memory("acme").lookup([1, 2], node_limit=4, depth=2) is not None
    second.close()


def test_calls_that_no_caller_should_make_are_refused(library: IndexLibrary) -> None:
    index = CompiledIndex(library)
    ids = array("I", [1, 2, 3])
    handle = index.open(ids)
    index.extend(handle, ids)
    for wrong in (-1, handle + 1, 2**40):
        with pytest.raises(RuntimeError):
            index.extend(wrong, ids)
        with pytest.raises(RuntimeError):
            index.remove(wrong, 3)
        with pytest.raises(RuntimeError):
            index.close(wrong)
    with pytest.raises(RuntimeError):
        index.extend(handle, array("I", [2**31]))
    with pytest.raises(RuntimeError):
        index.close(handle)  # its positions are still there
    assert index.remove(handle, 100) == 2
    index.close(handle)
    assert index.read(array("I", [1])) == (0, [])


def test_it_goes_with_its_last_user_and_stays_while_the_process_ends(library: IndexLibrary) -> None:
    """A daemon thread may look up after the first exit functions have run."""
    told = subprocess.run(
        [sys.executable, "-c", DELETIONS, library.path], capture_output=True, text=True, timeout=60
    )
    assert (told.stdout, told.returncode) == ("deleted\n", 0), told.stderr


def test_one_that_finds_other_text_is_refused(library: IndexLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompiledIndex, "read", lambda self, suffix: (0, []))
    with pytest.raises(CompileFailed, match="other text"):
        check_library(library)


def test_without_a_compiler_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "find_compiler", lambda: None)
    with pytest.raises(CompileFailed, match="no C\\+\\+ compiler"):
        find_library(tmp_path, lambda: False, compiles=True)


def test_damage_that_another_index_hands_over_is_refused(library: IndexLibrary) -> None:
    other = PythonIndex()
    ids = array("I", [1, 2, 3, 1, 2])
    other.extend(other.open(ids), ids)
    (block,) = other.order.blocks
    for wrong in (0, 2**31 + 4, 2**31 + 256, 2**32 - 1, block[1]):
        right, block[0] = block[0], wrong
        with pytest.raises(RuntimeError):
            CompiledIndex.of(library, other)
        block[0] = right
    assert CompiledIndex.of(library, other)[0].read(array("I", [2, 1]))[0] == 2


@pytest.mark.slow
def test_no_call_reads_or_writes_outside_of_it(tmp_path: Path) -> None:
    """Random calls with random arguments, under the compiler's own checks of addresses and arithmetic."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no C++ compiler here")
    program = tmp_path / "fuzz"
    flags = ["-std=c++17", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    sources = [str(Path(__file__).with_name("fuzz_past_index.cpp")), str(SOURCE)]
    made = subprocess.run([compiler, *flags, *sources, "-o", str(program)], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no sanitizers here: {made.stderr[-200:]}")
    ended = subprocess.run([program, "300"], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "300 lives" in ended.stdout
