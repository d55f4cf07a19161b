"""A small Triton kernel that may begin before the kernel before it ends: programmatic dependent launch."""

import torch
import triton
import triton.language as tl


@triton.jit
def _add_one(numbers, count, EARLY: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    there = tl.load(numbers + at, mask=at < count)
    tl.store(numbers + at, there + 1, mask=at < count)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()


def add_one(numbers: torch.Tensor, early: bool) -> None:
    """Adds one to every number; ``early``: the launch does not wait for the end of the kernel before."""
    extra = {"launch_pdl": True} if early else {}
    block = 1024
    _add_one[(triton.cdiv(len(numbers), block),)](numbers, len(numbers), EARLY=early, BLOCK=block, **extra)
