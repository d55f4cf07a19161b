"""Weights in memory of large pages are the same weights, and the kernel is asked for such pages."""

import gc
import mmap
import re
from pathlib import Path

import pytest
import torch

from outrider.lm.large_pages import PAGE, LargePages


def advised(address: int) -> bool:
    """Whether the kernel knows that the memory at an address should have large pages."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    return False


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shape", [(3, 5), (64, 33, 32), (1,)])
def test_a_placed_tensor_has_the_elements_of_the_given_tensor(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    memory = LargePages()
    given = [(100 * torch.randn(shape)).to(dtype) for _ in range(3)]
    placed = [memory.place(tensor) for tensor in given]
    for one, other in zip(given, placed, strict=True):
        assert other.is_contiguous()
        assert other.dtype is dtype
        assert torch.equal(one, other)
        assert other.data_ptr() != one.data_ptr()
        assert other.data_ptr() % 64 == 0


def test_a_transposed_tensor_is_placed_contiguously() -> None:
    given = torch.randn(7, 5).t()
    placed = LargePages().place(given)
    assert placed.is_contiguous()
    assert torch.equal(placed, given)


def test_tensors_lie_one_behind_another_from_the_beginning_of_a_large_page() -> None:
    memory = LargePages()
    first, second = memory.place(torch.zeros(100)), memory.place(torch.zeros(3))
    assert first.data_ptr() % PAGE == 0
    assert second.data_ptr() - first.data_ptr() == 448


def test_a_tensor_larger_than_what_is_taken_at_once_is_placed_too() -> None:
    memory = LargePages()
    memory.place(torch.zeros(1))
    large = torch.arange(80 * 2**20, dtype=torch.uint8).view(-1)
    assert torch.equal(memory.place(large), large)


def test_a_tensor_without_elements_is_placed() -> None:
    assert LargePages().place(torch.empty(0, 4)).shape == (0, 4)


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this kernel has no transparent large pages")
def test_the_kernel_is_asked_for_large_pages() -> None:
    assert advised(LargePages().place(torch.ones(1000)).data_ptr())


def test_a_tensor_outlives_the_memory_that_placed_it() -> None:
    placed = LargePages().place(torch.ones(1000))
    gc.collect()
    assert placed.sum() == 1000


def test_without_large_pages_the_tensor_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    given = torch.randn(4, 4)
    assert LargePages().place(given) is given


def test_without_addresses_the_tensor_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    given = torch.randn(4, 4)
    assert LargePages().place(given) is given
