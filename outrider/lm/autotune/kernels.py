"""The kernels of linear layers in torch: a weight laid out, and the call that multiplies by it."""

from collections.abc import Callable

import torch
from torch.nn.functional import linear, pad

from outrider.lm.autotune.choice import LinearKernel, WeightLayout

PAD_ROWS = 4
"""Number of rows to which fewer rows are padded: oneDNN has its fastest loops from four rows on."""

Multiply = Callable[[torch.Tensor], torch.Tensor]
"""Multiplies rows ``[..., rows, in]`` by a weight and adds its bias; returns ``[..., rows, out]``."""


def lay_out(weight: torch.Tensor, layout: WeightLayout) -> torch.Tensor:
    """The weight ``[out, in]`` in this layout; a row-major weight is not copied."""
    if layout is WeightLayout.BLOCKED:
        blocked: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        return blocked
    return weight.t().contiguous().t() if layout is WeightLayout.COLUMN else weight.contiguous()


def dense(laid_out: torch.Tensor, layout: WeightLayout) -> torch.Tensor:
    """The weight ``[out, in]`` of a laid-out one, for code that reads its elements."""
    return laid_out.to_dense() if layout is WeightLayout.BLOCKED else laid_out


def multiply_by(kernel: LinearKernel, laid_out: torch.Tensor, bias: torch.Tensor | None) -> Multiply:
    """The function that multiplies by a weight in the kernel's layout."""
    if kernel.layout is not WeightLayout.BLOCKED:
        return lambda rows: linear(rows, laid_out, bias)
    pointwise = torch.ops.mkldnn._linear_pointwise.default

    def blocked(rows: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = pointwise(rows, laid_out, bias, "none", (), "")
        return product

    def padded(rows: torch.Tensor) -> torch.Tensor:
        count = rows.shape[-2]
        if count >= PAD_ROWS:
            return blocked(rows)
        return blocked(pad(rows, (0, 0, 0, PAD_ROWS - count)))[..., :count, :]

    return padded if kernel is LinearKernel.PADDED else blocked
