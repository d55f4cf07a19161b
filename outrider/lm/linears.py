"""Linear layers with their weights laid out once for the rows that decoding has, on the CPU in float32.

The library's own product lays the weight out anew in every call, which a step of 2 to 64 rows pays in full: eight rows of a
4096 x 4096 layer take three times as long as one. With oneDNN's layout, made once, they take about as long as one, so a tree
costs little more than plain decoding. The products also no longer depend on how many rows share a pass: every row count gives
the same bits.
"""

import torch
from torch import nn
from torch.nn.functional import pad

_PAD_ROWS = 4
"""oneDNN multiplies one to three rows more slowly than four."""

_PAD_ELEMENTS = 2**19
"""Weights smaller than this do not repay the padding."""


class PackedLinear(nn.Module):
    """Stands in for an ``nn.Linear`` on the CPU in float32; ``weight`` is in oneDNN's own layout."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self.bias = linear.bias
        self._pads = linear.weight.numel() >= _PAD_ELEMENTS
        self._multiply = torch.ops.mkldnn._linear_pointwise.default

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows`` times the transposed weight, plus the bias."""
        count = rows.shape[-2]
        if count < _PAD_ROWS and self._pads:
            padded = pad(rows, (0, 0, 0, _PAD_ROWS - count))
            product: torch.Tensor = self._multiply(padded, self.weight, self.bias, "none", (), "")
            return product[..., :count, :]
        product = self._multiply(rows, self.weight, self.bias, "none", (), "")
        return product


def can_pack(model: nn.Module) -> bool:
    """Whether the packed layout exists here: a float32 model on the CPU, in a torch with oneDNN."""
    first = next(model.parameters())
    return first.device.type == "cpu" and first.dtype is torch.float32 and torch.backends.mkldnn.is_available()


@torch.inference_mode(False)
def pack_linears(model: nn.Module) -> int:
    """Replaces every plain ``nn.Linear`` of the model; returns how many. The dense weights are let go."""
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    ]
    for parent, name, linear in found:
        setattr(parent, name, PackedLinear(linear))
    return len(found)
