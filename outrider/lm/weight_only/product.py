"""Products of linear layers with weights in bfloat16 or int8; what a model's linear layers are rounded to."""

from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedModel

from outrider.lm.large_pages import LargePages
from outrider.lm.linear import Held, stacked_bias, stacked_weight
from outrider.lm.weight_only.kernel import WeightOnlyKernel
from outrider.lm.weight_only.packing import PackedWeight, WeightDtype, rounded


class WeightOnlyProduct:
    """The stacked weights of layers with one input, kept as panels alone. A `linear.Product`."""

    def __init__(
        self, layers: list[nn.Linear], name: WeightDtype, kernel: WeightOnlyKernel, memory: LargePages
    ) -> None:
        weight = stacked_weight(layers)
        self.out_features, self.in_features = weight.shape
        packed = PackedWeight.of(weight, name, kernel.width)
        self.packed = replace(packed, panels=memory.place(packed.panels))
        """Panels and scales, which compiled passes read too."""
        self.bias = stacked_bias(layers)
        self.held: Held | None = None
        self._kernel = kernel

    def compute(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows`` times the stacked weights, plus the bias."""
        return self._kernel.multiply(rows, self.packed, self.bias)

    def weight(self) -> torch.Tensor:
        """The stacked weights, ``[out, in]``, as floats."""
        return self.packed.dense()


def linear_layers(model: nn.Module) -> list[nn.Linear]:
    """The plain linear layers of a model, which `linear.pack_linears` replaces."""
    return [module for module in model.modules() if type(module) is nn.Linear]


def share_in_linear_layers(model: PreTrainedModel) -> float:
    """Share of a model's weights outside the table of embeddings that linear layers hold."""
    table = model.get_input_embeddings()
    embedded = {id(parameter) for parameter in table.parameters()} if isinstance(table, nn.Module) else set()
    every = {id(one): one.numel() for one in model.parameters() if id(one) not in embedded}
    held = {id(layer.weight) for layer in linear_layers(model)}
    return sum(every[one] for one in held & every.keys()) / max(1, sum(every.values()))


def round_linears(model: nn.Module, name: WeightDtype) -> None:
    """Rounds the weights of linear layers to what the format holds; a table of embeddings keeps its floats.

    What a layer shares with a module of another kind, as a tied output layer does, it no longer shares.
    """
    layers = linear_layers(model)
    own = {id(layer) for layer in layers}
    others = {
        id(parameter)
        for module in model.modules()
        if id(module) not in own
        for parameter in module.parameters(recurse=False)
    }
    for layer in layers:
        values = rounded(layer.weight.detach(), name)
        if id(layer.weight) in others:
            layer.weight = nn.Parameter(values, requires_grad=False)
        else:
            layer.weight.data.copy_(values)
