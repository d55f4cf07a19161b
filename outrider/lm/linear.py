"""Linear layers whose weights are stacked and laid out once; on the CPU in float32.

Layers that read the same input (query, key and value; gate and up) are multiplied as one; watching one row go
through the model shows them. The caller chooses how a product is computed: `autotune.products` by measuring,
`deterministic.linear` so that every row keeps its bits. Knows nothing about the meaning of layers.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Protocol

import torch
from torch import nn

Held = tuple[torch.Tensor, torch.Tensor]
"""Input and result of a product."""


class Product(Protocol):
    """The product of one input with the stacked weights of the layers that read it."""

    out_features: int
    """Width of the stacked output."""
    bias: torch.Tensor | None
    """Stacked bias, or None."""
    held: Held | None
    """The last input and its result, until the last layer has read its part; no longer, or each product of a
    pass would take memory until the next pass."""

    def compute(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows`` times the stacked weights, plus the bias."""
        ...

    def weight(self) -> torch.Tensor:
        """The stacked weights, ``[out, in]``."""
        ...


class PackedLinear(nn.Module):
    """Replaces an ``nn.Linear``, alone or as one of several layers with the same input."""

    def __init__(self, layer: nn.Linear, product: Product, low: int, last: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.product = product
        """The product that the layer is a part of."""
        self._low, self._high = low, low + layer.out_features
        self._alone = layer.out_features == product.out_features
        self._last = last

    @property
    def weight(self) -> torch.Tensor:
        """The layer's own weight, for code that reads it instead of calling the layer."""
        return self.product.weight()[self._low : self._high]

    @property
    def bias(self) -> torch.Tensor | None:
        """The layer's own bias, or None."""
        bias = self.product.bias
        return None if bias is None else bias[self._low : self._high]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The layer's output; the first of several layers with one input computes the output of all."""
        product = self.product
        if self._alone:
            return product.compute(input)
        held = product.held
        if held is None or held[0] is not input:
            held = input, product.compute(input)
        product.held = None if self._last else held
        return held[1][..., self._low : self._high]


def can_pack(model: nn.Module) -> bool:
    """Whether oneDNN's layout exists for the model: float32 on the CPU, not quantised, torch has oneDNN."""
    first = next(model.parameters())
    return (
        first.device.type == "cpu"
        and first.dtype is torch.float32
        and getattr(model, "hf_quantizer", None) is None
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def pack_linears(
    model: nn.Module,
    run_once: Callable[[], object],
    product_of: Callable[[list[nn.Linear]], Product],
) -> int:
    """Replaces every plain ``nn.Linear`` of the model and frees its weights; returns the number replaced.

    ``run_once`` sends one row through the model; ``product_of`` makes the product of layers with one input.
    """
    parents = {
        child: (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    }
    groups = _siblings(parents, run_once)
    for layers in groups:
        product = product_of(layers)
        low = 0
        for layer in layers:
            parent, name = parents[layer]
            setattr(parent, name, PackedLinear(layer, product, low, last=layer is layers[-1]))
            low += layer.out_features
            # Else all weights would lie in memory twice until the last layer is packed.
            layer.register_parameter("weight", None)
    return len(parents)


def _siblings(
    parents: dict[nn.Linear, tuple[nn.Module, str]], run_once: Callable[[], object]
) -> list[list[nn.Linear]]:
    """Groups the layers of one module that read the same input, each group in the order of reading."""
    calls: list[tuple[nn.Linear, object]] = []

    def note(layer: nn.Module, inputs: tuple[object, ...]) -> None:
        assert isinstance(layer, nn.Linear)
        calls.append((layer, inputs[0] if inputs else None))

    with ExitStack() as hooks:
        for layer in parents:
            hooks.callback(layer.register_forward_pre_hook(note).remove)
        run_once()
    groups: dict[tuple[int, int], list[nn.Linear]] = {}
    called = [layer for layer, _ in calls]
    for layer, rows in calls:
        once = called.count(layer) == 1 and rows is not None
        groups.setdefault((id(parents[layer][0]), id(rows) if once else -id(layer)), []).append(layer)
    found = [list(dict.fromkeys(layers)) for layers in groups.values()]
    return found + [[layer] for layer in parents if layer not in set(called)]


def stacked_weight(layers: list[nn.Linear]) -> torch.Tensor:
    """The layers' weights one below another, ``[out, in]``; no copy of a single layer's weight."""
    if len(layers) == 1:
        return layers[0].weight.detach()
    return torch.cat([layer.weight.detach() for layer in layers])


def stacked_bias(layers: list[nn.Linear]) -> torch.Tensor | None:
    """The layers' biases one after another, zero for a layer without a bias; None if no layer has one."""
    if all(layer.bias is None for layer in layers):
        return None
    return torch.cat(
        [
            layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias.detach()
            for layer in layers
        ]
    )
