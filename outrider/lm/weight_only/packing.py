"""Weights as the kernels read them: panels of few outputs in bfloat16 or int8, and back to float32.

bfloat16 rounds each weight; a weight that was stored in bfloat16 keeps its value. int8 has one scale for each
output, a 127th of the output's largest weight, and rounds to the nearest step.
"""

from dataclasses import dataclass
from typing import Literal

import torch

WeightDtype = Literal["auto", "bfloat16", "int8"]
"""The number format of linear layers' weights; ``auto`` is the format that passes compute in."""

STORED = {"bfloat16": torch.bfloat16, "int8": torch.int8}
"""dtype of panels by the format's name."""

_MOST = 127
"""Largest int8 of a weight; -128 is not used, so that both signs have the same steps."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight ``[out, in]`` as panels of ``width`` outputs; the last panel is filled up with zeros."""

    panels: torch.Tensor
    """``[panels, in, width]`` in bfloat16 or int8. In bfloat16, output i of the left half of a panel lies
    beside output i of its right half."""
    scales: torch.Tensor | None
    """float32 ``[panels * width]``, one for each output; None in bfloat16."""
    out_features: int

    @classmethod
    def of(cls, weight: torch.Tensor, name: WeightDtype, width: int) -> "PackedWeight":
        """Rounds and packs a float32 weight ``[out, in]``."""
        codes, scales = quantise(weight, name)
        out, inputs = weight.shape
        count = -(-out // width)
        filled = codes.new_zeros(count * width, inputs)
        filled[:out] = codes
        panels = filled.view(count, width, inputs).transpose(1, 2)
        if scales is None:
            halves = panels.view(count, inputs, 2, width // 2).transpose(2, 3)
            return cls(halves.reshape(count, inputs, width).contiguous(), None, out)
        whole = scales.new_zeros(count * width)
        whole[:out] = scales
        return cls(panels.contiguous(), whole, out)

    def dense(self) -> torch.Tensor:
        """The rounded weight, float32 ``[out, in]``."""
        count, inputs, width = self.panels.shape
        panels = self.panels.float()
        if self.scales is None:
            panels = panels.view(count, inputs, width // 2, 2).transpose(2, 3).reshape(count, inputs, width)
        codes = panels.transpose(1, 2).reshape(count * width, inputs)
        return (codes if self.scales is None else codes * self.scales[:, None])[: self.out_features]


def quantise(weight: torch.Tensor, name: WeightDtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A float32 weight ``[out, in]`` as codes and scales ``[out]``; bfloat16 has no scales."""
    if name == "bfloat16":
        return weight.to(torch.bfloat16), None
    # An output whose weights are all zero has any scale.
    scales = (weight.abs().amax(dim=1) / _MOST).clamp_min(torch.finfo(torch.float32).tiny)
    codes = (weight / scales[:, None]).round().clamp(-_MOST, _MOST).to(torch.int8)
    return codes, scales


def rounded(weight: torch.Tensor, name: WeightDtype) -> torch.Tensor:
    """The float32 weight ``[out, in]`` with the values that its format can hold."""
    codes, scales = quantise(weight, name)
    return codes.float() if scales is None else codes.float() * scales[:, None]
