"""A child that fails, hangs or fills the disk ends in an error that says so, and leaves nothing."""

import json
import sys
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from outrider.compiling.building import BuildLimits
from outrider.compiling.library import LibrarySource, texts_of
from outrider.compiling.store import CompileFailed, PackageStore
from outrider.lm.compiled.building import build
from outrider.lm.compiled.child import PACKAGE, unpack_library
from outrider.lm.compiled.order import CompileOrder

LIMITS = BuildLimits()
ORDER = CompileOrder("{}", (), "g++", {})


def built(folder: Path, script: str, limits: BuildLimits = LIMITS, stopped: bool = False) -> Path:
    store = PackageStore(folder)
    return build(ORDER, store, lambda: stopped, limits, (sys.executable, "-c", script))


@pytest.mark.parametrize(
    ("script", "limits", "why"),
    [
        ("raise SystemExit('no such header')", LIMITS, "no such header"),
        ("import os; os.abort()", LIMITS, "ended with signal 6"),
        ("import time; time.sleep(60)", BuildLimits(seconds=0.3), "longer than 0.3 s"),
        (
            "import sys, time; open(sys.argv[1] + '/big', 'wb').write(bytes(4 << 20)); time.sleep(60)",
            BuildLimits(megabytes=2),
            "more than 2 MiB",
        ),
    ],
    ids=["says why", "crashes", "hangs", "fills the disk"],
)
def test_a_compiler_that_fails_is_named_and_leaves_nothing(
    tmp_path: Path, script: str, limits: BuildLimits, why: str
) -> None:
    began = time.monotonic()
    with pytest.raises(CompileFailed, match=why):
        built(tmp_path, script, limits)
    assert time.monotonic() - began < 50
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_a_compiler_s_first_error_is_named_not_its_last_words(tmp_path: Path) -> None:
    source = tmp_path / "kernel.cpp"
    source.write_text("#include <torch/no_such_header.h>\n")
    library = LibrarySource(source, ("-shared",), "kernel.so")
    with pytest.raises(CompileFailed, match=r"torch/no_such_header\.h"):
        library.find(tmp_path / "cache", lambda: False, compiles=True)


def test_a_build_that_is_stopped_ends_its_child(tmp_path: Path) -> None:
    with pytest.raises(CompileFailed, match="stopped"):
        built(tmp_path, "import time; time.sleep(60)", stopped=True)


def test_a_cache_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CompileFailed, match="cache folder cannot be written"):
        built(tmp_path / "file", "")


def test_a_package_that_another_process_has_compiled_meanwhile_is_taken(tmp_path: Path) -> None:
    script = (
        "import pathlib, sys; folder = pathlib.Path(sys.argv[1])\n"
        "for name in ('operators.so', 'pass.so', 'panels.json'): (folder / name).write_text(name)"
    )
    first = built(tmp_path, script)
    assert built(tmp_path, "raise SystemExit('compiled twice')") == first


def test_every_part_of_an_order_is_part_of_its_key() -> None:
    others = [
        CompileOrder("{} ", (), "g++", {}),
        CompileOrder("{}", (-1,), "g++", {}),
        CompileOrder("{}", (), "c++", {}),
        CompileOrder("{}", (), "g++", {}, first=1),
        CompileOrder("{}", (), "g++", {"model.scale": [0.5]}, skip=("1.mlp",)),
        CompileOrder("{}", (), "g++", {"model.scale": [0.5]}),
    ]
    assert len({ORDER.key, *(order.key for order in others)}) == 7
    assert CompileOrder.from_json(others[-2].to_json()) == others[-2]
    assert CompileOrder.from_json(others[-1].to_json()) == others[-1]


def test_the_key_follows_the_versions_and_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    import outrider.lm.compiled.order as order

    before = ORDER.key
    with monkeypatch.context() as patch:
        patch.setattr("torch.__version__", "2.99")
        assert ORDER.key != before
    with monkeypatch.context() as patch:
        patch.setattr(order, "processor_flags", lambda: "avx2")
        assert ORDER.key != before
    assert ORDER.key == before


def archive_of(folder: Path, operators: Sequence[str]) -> Path:
    """An Inductor package whose model calls these operators through torch's own loader."""
    archive = folder / "pass.pt2"
    nodes = [{"name": f"buf{at}", "node": {"target": name}} for at, name in enumerate(operators)]
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr("pass/data/aotinductor/model/x.wrapper.so", b"library")
        packed.writestr("pass/data/aotinductor/model/x.wrapper.json", json.dumps({"nodes": nodes}))
        packed.writestr("pass/extra.json", "[]")
    return archive


def test_the_models_library_is_taken_out_of_its_archive(tmp_path: Path) -> None:
    unpack_library(archive_of(tmp_path, ()), tmp_path / PACKAGE)
    assert (tmp_path / PACKAGE).read_bytes() == b"library"


def test_a_model_that_calls_operators_of_torchs_loader_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"its passes call torch\.ops\.aten\.nonzero\.default, which is"):
        unpack_library(archive_of(tmp_path, ("torch.ops.aten.nonzero.default",)), tmp_path / PACKAGE)


def test_a_library_s_texts_are_its_source_and_every_header_beside_it(tmp_path: Path) -> None:
    (tmp_path / "a.cpp").write_text('#include <vector>\n#include "b.hpp"\nint a;\n')
    (tmp_path / "b.hpp").write_text('#pragma once\n#include "c.hpp"\n#include "b.hpp"\n')
    (tmp_path / "c.hpp").write_text("int c;\n")
    (tmp_path / "other.hpp").write_text("int other;\n")

    texts = texts_of(tmp_path / "a.cpp")
    assert [text.splitlines()[-1] for text in texts] == ["int a;", '#include "b.hpp"', "int c;"]
