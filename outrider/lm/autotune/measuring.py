"""Measures how long each kernel takes for few rows of one weight, within a bound of time.

Between two calls as much memory is read as a core's own caches hold: in a pass, a layer's weight comes from
farther away too, because all other layers were read since.
"""

import time
from collections.abc import Callable

import torch

from outrider.lm.autotune.choice import MEASURED_ROWS, KernelTimes, LinearKernel, WeightLayout
from outrider.lm.autotune.kernels import PAD_ROWS, lay_out, multiply_by

_SWEPT_BYTES = 2 * 2**20
"""Bytes read between two calls: more than the caches that belong to one core."""

_MEASURED_ELEMENTS = 2**23
"""Elements of a weight that are measured: larger weights are cut to their first rows, which bounds time and
memory. Kernels compare alike on a larger weight."""

_MOST_ROUNDS = 10
"""Times that each product is measured; the smallest counts."""


@torch.inference_mode()
def measure_kernels(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    limit_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> KernelTimes:
    """Seconds of one product with the weight ``[out, in]``, by kernel and number of rows.

    Kernels take turns, each round in another order. After ``limit_s`` seconds the measurement ends with the
    number of rows at hand, so times of the largest numbers can be missing; those of one row never are.
    """
    end = clock() + limit_s
    out = max(1, min(weight.shape[0], _MEASURED_ELEMENTS // weight.shape[1]))
    weight, bias = weight[:out], None if bias is None else bias[:out]
    laid_out = {layout: lay_out(weight, layout) for layout in WeightLayout}
    calls = {kernel: multiply_by(kernel, laid_out[kernel.layout], bias) for kernel in LinearKernel}
    swept = torch.ones(_SWEPT_BYTES // 4)  # zeros would be one page of the system, mapped many times
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, count, weight.shape[1], generator=generator) for count in MEASURED_ROWS]
    kernels = list(calls)
    times: dict[LinearKernel, dict[int, float]] = {kernel: {} for kernel in LinearKernel}
    for rounds in range(_MOST_ROUNDS):
        for count, rows in zip(MEASURED_ROWS, inputs, strict=True):
            if clock() > end and (rounds or count > 1):
                return times
            for turn in range(len(calls)):
                kernel = kernels[(turn + rounds) % len(kernels)]
                if kernel is LinearKernel.PADDED and count >= PAD_ROWS:
                    continue  # the same call as BLOCKED
                swept.sum()
                started = clock()
                calls[kernel](rows)
                spent = clock() - started
                times[kernel][count] = min(spent, times[kernel].get(count, spent))
            if count >= PAD_ROWS:
                times[LinearKernel.PADDED][count] = times[LinearKernel.BLOCKED][count]
    return times
