"""Beside eager passes the kernel of chosen tokens comes from the cache, or from a thread that compiles it."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from outrider.compiling import library
from outrider.compiling.library import LibrarySource
from outrider.compiling.toolchain import find_compiler
from outrider.lm.compiled.kernel_builder import KernelBuilder
from outrider.lm.compiled.row_kernel import use_row_kernel
from outrider.lm.runner import PackedLM
from speculative.sampling_kernel import current_kernel, use_kernel

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the kernel."""
    if find_compiler() is None:
        pytest.skip("there is no C++ compiler here")
    folder = tmp_path_factory.mktemp("cache")
    before = use_kernel(None)
    use_row_kernel(folder, lambda: False)
    use_kernel(before)
    return folder


@pytest.fixture(autouse=True)
def numpy_at_first() -> Iterator[None]:
    used = use_kernel(None)
    yield
    use_kernel(used)


def nothing_is_compiled(source: LibrarySource, compiler: str, folder: Path) -> list[str]:
    raise AssertionError("the kernel is in the cache")


def test_eager_passes_use_the_kernel_of_the_cache_at_once(
    cache: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "compile_command", nothing_is_compiled)
    lm = PackedLM.load(tiny_llama, check=False)
    lm.compile_passes("eager", cache)
    assert current_kernel() is not None
    assert lm.passes == "eager"
    lm.close()


def test_a_kernel_that_the_cache_lacks_is_compiled_beside_serving(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy_from_the_cache(source: LibrarySource, compiler: str, folder: Path) -> list[str]:
        (library,) = cache.glob("**/*.so")
        return ["cp", str(library), str(folder)]

    monkeypatch.setattr(library, "compile_command", copy_from_the_cache)
    builder = KernelBuilder.beside(CPU, tmp_path)
    assert builder is not None
    until_s = time.monotonic() + 60
    while current_kernel() is None and time.monotonic() < until_s:
        time.sleep(0.01)
    assert current_kernel() is not None
    builder.close()
    assert list(tmp_path.glob("**/*.so")), "the cache keeps the kernel for the next process"


def test_closing_ends_the_compiler_and_leaves_the_work_to_numpy(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = threading.Event()

    def never_ends(source: LibrarySource, compiler: str, folder: Path) -> list[str]:
        started.set()
        return ["sleep", "1000"]

    monkeypatch.setattr(library, "compile_command", never_ends)
    builder = KernelBuilder.beside(CPU, tmp_path)
    assert builder is not None
    assert started.wait(60)
    builder.close()
    assert current_kernel() is None
    assert not list(tmp_path.glob("kernels/building-*")), "nothing is left of the compilation"


def test_a_kernel_for_this_process_alone_leaves_no_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(library, "find_compiler", lambda: None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    builder = KernelBuilder.beside(CPU, None)
    assert builder is not None
    builder.close()
    assert not list(tmp_path.iterdir())


def test_where_a_device_makes_digests_no_kernel_is_built() -> None:
    assert KernelBuilder.beside(torch.device("meta"), None) is None
