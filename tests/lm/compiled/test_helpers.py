"""Threads that help with a pass: they change no bit, and a thread that computes never depends on them."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from outrider.compiling.toolchain import find_compiler
from outrider.lm.compiled.child import compile_operators
from outrider.lm.compiled.panels import panels_of
from tests.lm.compiled.test_operators import Operators

pytestmark = pytest.mark.slow

INPUTS = 96


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("there is no C++ compiler here")
    return compile_operators(compiler, tmp_path_factory.mktemp("operators"))


@pytest.fixture(scope="module")
def operators(library: Path) -> Operators:
    return Operators(library)


@pytest.fixture(autouse=True)
def threads_as_before(operators: Operators) -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    operators.use_threads(0)
    torch.set_num_threads(before)


def product(operators: Operators, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    panels = panels_of(weight, operators.width)
    return operators.panel_linear(rows[None], panels, None, len(weight))


def helpers() -> list[int]:
    """The ids of this process's helper threads."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        try:
            name = (task / "comm").read_text()
        except OSError:
            continue  # the thread has ended
        if name.strip() == "outrider-helper":
            found.append(int(task.name))
    return found


def test_helpers_change_no_bit(operators: Operators) -> None:
    # Few panels, some, and so many that chunks have several.
    weights = [torch.randn(outputs, INPUTS) for outputs in (200, 900, 5000)]
    given = [(rows, weight) for rows in torch.randn(20, 11, INPUTS) for weight in weights]
    torch.set_num_threads(1)
    alone = [product(operators, rows, weight) for rows, weight in given]
    for threads in (2, 5, 3):
        torch.set_num_threads(threads)
        for _ in range(5):
            for (rows, weight), expected in zip(given, alone, strict=True):
                assert torch.equal(product(operators, rows, weight), expected)


def test_several_threads_compute_at_once_each_with_its_own_result(operators: Operators) -> None:
    weight = torch.randn(5000, INPUTS)
    given = list(torch.randn(8, 11, INPUTS))
    torch.set_num_threads(1)
    alone = [product(operators, rows, weight) for rows in given]
    torch.set_num_threads(2)

    def compute(which: int) -> bool:
        found = (product(operators, given[which], weight) for _ in range(50))
        return all(torch.equal(one, alone[which]) for one in found)

    with ThreadPoolExecutor(len(given)) as pool:
        assert all(pool.map(compute, range(len(given))))


def test_helpers_run_only_where_a_core_is_idle(operators: Operators) -> None:
    torch.set_num_threads(3)
    product(operators, torch.randn(1, INPUTS), torch.randn(5000, INPUTS))
    deadline = time.monotonic() + 30
    while len(found := helpers()) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)  # a helper that has yet to begin has no name, and waits for an idle core
    assert len(found) >= 2
    assert {os.sched_getscheduler(thread) for thread in found} == {os.SCHED_IDLE}


def test_the_number_of_threads_of_a_pass_comes_before_torchs(library: Path) -> None:
    program = f"""
import time, torch
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tests.lm.compiled.test_helpers import helpers, product
from tests.lm.compiled.test_operators import Operators
operators = Operators(Path({str(library)!r}))
rows, weight = torch.randn(11, 96), torch.randn(5000, 96)
def started(torchs, used, expected):
    torch.set_num_threads(torchs)
    operators.use_threads(used)
    product(operators, rows, weight)
    deadline = time.monotonic() + 30  # a helper that has yet to begin has no name, and waits for an idle core
    while len(helpers()) < expected and time.monotonic() < deadline:
        time.sleep(0.01)
    return len(helpers())
assert started(1, 0, 0) == started(3, 1, 0) == 0
assert started(1, 2, 1) == 1
assert started(3, 0, 2) == 2
operators.use_threads(8)  # of this thread alone
with ThreadPoolExecutor(1) as pool:
    assert pool.submit(started, 1, 0, 2).result() == 2
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_helpers_that_a_work_does_not_want_sleep(library: Path) -> None:
    program = f"""
import time, torch
from pathlib import Path
from tests.lm.compiled.test_helpers import helpers, product
from tests.lm.compiled.test_operators import Operators
operators = Operators(Path({str(library)!r}))
rows, weight = torch.randn(11, 96), torch.randn(5000, 96)
def switches():
    kinds = (Path(f"/proc/self/task/{{each}}/status").read_text() for each in helpers())
    return sorted(int(text.split("nonvoluntary_ctxt_switches")[0].split()[-1]) for text in kinds)
operators.use_threads(5)
product(operators, rows, weight)
deadline = time.monotonic() + 30
while len(helpers()) < 4 and time.monotonic() < deadline:
    time.sleep(0.01)
operators.use_threads(2)
product(operators, rows, weight)
time.sleep(0.5)
before = switches()
for _ in range(50):
    product(operators, rows, weight)
    time.sleep(0.002)  # helpers go to sleep in between
grown = [after - earlier for earlier, after in zip(before, switches())]
assert sum(each > 5 for each in grown) <= 1, grown
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_products_beside_busy_processes_are_those_of_one_thread(operators: Operators) -> None:
    rows, weight = torch.randn(11, INPUTS), torch.randn(5000, INPUTS)
    torch.set_num_threads(1)
    expected = product(operators, rows, weight)
    torch.set_num_threads(5)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
    try:
        assert all(torch.equal(product(operators, rows, weight), expected) for _ in range(500))
    finally:
        for process in busy:
            process.kill()
            process.wait()


def test_a_forked_process_computes_without_the_threads_of_its_parent(library: Path) -> None:
    program = f"""
import os, signal, torch
from pathlib import Path
from tests.lm.compiled.test_operators import Operators
operators = Operators(Path({str(library)!r}))
torch.set_num_threads(2)
rows, panels = torch.ones(1, 11, 96), torch.ones(200, 96, operators.width)
expected = operators.panel_linear(rows, panels, None, 200 * operators.width).numpy()
if (child := os.fork()) == 0:
    signal.alarm(20)
    made = [operators.panel_linear(rows, panels, None, 200 * operators.width).numpy() for _ in range(100)]
    has_helper = len(os.listdir("/proc/self/task")) == 2
    os._exit(0 if has_helper and all((one == expected).all() for one in made) else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
