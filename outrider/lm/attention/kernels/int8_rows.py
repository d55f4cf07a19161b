"""Writes rows of keys or values to slots in int8, in one Triton launch where torch's operations take ten.

Codes and scales of finite rows are to the bit those of `outrider.lm.kv.int8_plane.quantise`. Needs triton.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from outrider.lm.kv.int8_plane import LEAST_SCALE, MOST_CODE, Int8Plane


def write_rows(plane: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Writes ``rows``, ``[heads, rows, width]``, to these slots of a plane of int8 or of floats.

    Never waits for the host, so a CUDA graph can capture it.
    """
    found: Any = plane
    if not isinstance(found, Int8Plane):
        plane.index_copy_(1, slots, rows)
        return
    codes, scales = found.codes, found.scales
    heads, count, width = rows.shape
    _write_row[(count, heads)](
        rows, codes, scales, slots,
        rows.stride(0), rows.stride(1), rows.stride(2), codes.stride(0), codes.stride(1), scales.stride(0),
        WIDTH=width, PADDED=triton.next_power_of_2(width), MOST=MOST_CODE, LEAST=LEAST_SCALE, num_warps=1,
    )  # fmt: skip


@triton.jit
def _write_row(
    rows, codes, scales, slots,
    row_head, row_row, row_column, code_head, code_slot, scale_head,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, MOST: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """Quantises one head's part of a row."""
    row, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    there = rows + head * row_head + row.to(tl.int64) * row_row + column * row_column
    found = tl.load(there, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(found), 0), MOST), LEAST)
    # A maximum ignores NaN, and a slot must not. So NaN is added through a sum.
    scale += tl.sum(found * 0.0, 0)
    code = tl.div_rn(found, scale)
    # Adding 1.5 * 2**23 leaves no room for a fraction: halves go to the even number, as torch rounds them.
    code = (code + 12582912.0) - 12582912.0
    code = tl.minimum(tl.maximum(code, -MOST), MOST)
    slot = tl.load(slots + row).to(tl.int64)
    tl.store(codes + head * code_head + slot * code_slot + column, code.to(tl.int8), mask=inside)
    tl.store(scales + head * scale_head + slot, scale)
