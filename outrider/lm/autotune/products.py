"""Products of linear layers with kernels chosen by measuring; each shape of weights is measured once."""

import time

import torch
from torch import nn

from outrider.lm.autotune.choice import UNMEASURED, KernelChoice, WeightLayout, choose_kernels
from outrider.lm.autotune.kernels import dense, lay_out, multiply_by
from outrider.lm.autotune.measuring import measure_kernels
from outrider.lm.autotune.times_file import Shape, TimesFile
from outrider.lm.linear import Held, stacked_bias, stacked_weight

_TWICE_ELEMENTS = 2**21
"""Largest weight, in elements, that may be kept in two layouts; a larger weight is kept once."""

_SHAPE_S = 0.3
"""Longest time in which one shape is measured, in seconds."""

_MODEL_S = 2.0
"""Longest time in which all shapes of one model are measured, in seconds."""


class TunedProduct:
    """The stacked weights of layers with one input, multiplied by chosen kernels. A `linear.Product`."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, choice: KernelChoice) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.choice = choice
        """The kernel for each number of rows."""
        self.laid_out = {layout: lay_out(weight, layout) for layout in choice.layouts}
        """The weight in each layout that the kernels read."""
        self.held: Held | None = None
        calls = {
            kernel: multiply_by(kernel, self.laid_out[kernel.layout], bias)
            for kernel in dict.fromkeys(choice.kernels)
        }
        self._by_rows = [calls[kernel] for kernel in (choice.kernels[0], *choice.kernels)]
        self._last = len(choice.kernels)

    def compute(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows`` times the stacked weights, plus the bias."""
        count = rows.shape[-2]
        return self._by_rows[count if count < self._last else self._last](rows)

    def weight(self) -> torch.Tensor:
        """The stacked weights, ``[out, in]``, laid out anew where only oneDNN's layout is kept."""
        layout = next(layout for layout in WeightLayout if layout in self.laid_out)
        return dense(self.laid_out[layout], layout)


class TunedProducts:
    """Makes the products of one model; shapes that were measured before are not measured again."""

    def __init__(self, times: TimesFile) -> None:
        self._times = times
        self._end = time.monotonic() + _MODEL_S

    def __call__(self, layers: list[nn.Linear]) -> TunedProduct:
        """Makes the product of layers that read one input."""
        weight, bias = stacked_weight(layers), stacked_bias(layers)
        shape = Shape(weight.shape[0], weight.shape[1], bias is not None)
        times = self._times.get(shape)
        if times is None:
            limit_s = min(_SHAPE_S, self._end - time.monotonic())
            if limit_s <= 0:
                return TunedProduct(weight, bias, UNMEASURED)
            times = measure_kernels(weight, bias, limit_s)
            self._times.add(shape, times)
        return TunedProduct(
            weight, bias, choose_kernels(times, 2 if weight.numel() <= _TWICE_ELEMENTS else 1)
        )
