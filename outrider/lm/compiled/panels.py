"""Weights as a compiled pass multiplies by them: panels of few outputs, each read once from end to end.

A stacked weight ``[out, in]`` becomes ``[panels, in, width]``; the last panel is filled up with zeros. The
names given here are those of a package's constants, so the process that compiles and the process that serves
agree on them.
"""

from collections.abc import Mapping

import torch
from torch import nn

from outrider.lm.large_pages import LargePages
from outrider.lm.linear import PackedLinear, Product
from outrider.lm.weight_only.packing import PackedWeight
from outrider.lm.weight_only.product import WeightOnlyProduct

MODEL = "model."
"""Beginning of the names of constants that are the model's own parameters and buffers."""

WEIGHTS = "weights."
"""Beginning of the names of panels and of stacked biases."""

_INLINED = 8
"""Largest number of elements of a tensor that Inductor may write into the code."""


def panels_of(weight: torch.Tensor, width: int) -> torch.Tensor:
    """The weight ``[out, in]`` as panels of ``width`` outputs, ``[panels, in, width]``, contiguous."""
    out, inputs = weight.shape
    count = -(-out // width)
    filled = weight.new_zeros(count * width, inputs)
    filled[:out] = weight
    return filled.view(count, width, inputs).transpose(1, 2).contiguous()


def smallest_panels(weight: torch.Tensor, width: int) -> torch.Tensor:
    """The panels of a float32 weight ``[out, in]``, in bfloat16 if that changes no number.

    Most checkpoints are stored in bfloat16. The products are the same bits from half the memory.
    """
    if torch.equal(weight.bfloat16().float(), weight):
        return PackedWeight.of(weight, "bfloat16", width).panels
    return panels_of(weight, width)


def panel_name(index: int) -> str:
    """Name of the panels of a model's product ``index``."""
    return f"panels_{index}"


def scales_name(index: int) -> str:
    """Name of the scales of a model's product ``index``."""
    return f"scales_{index}"


def bias_name(index: int) -> str:
    """Name of the stacked bias of a model's product ``index``."""
    return f"bias_{index}"


def products_of(model: nn.Module) -> list[Product]:
    """The products of a model's packed layers, each once, in order of modules."""
    layers = (module for module in model.modules() if isinstance(module, PackedLinear))
    return list({id(layer.product): layer.product for layer in layers}.values())


def constants_of(model: nn.Module, width: int) -> dict[str, torch.Tensor]:
    """Everything that a package may name as a constant: the model's own tensors, panels and stacked biases.

    The model's own tensors are shared, not copied. Panels are a second copy of the weights of linear layers,
    unless eager passes read panels too (`WeightOnlyProduct`).
    """
    found, memory = own_constants(model), LargePages()
    for index, product in enumerate(products_of(model)):
        if isinstance(product, WeightOnlyProduct):
            found[WEIGHTS + panel_name(index)] = product.packed.panels
            if product.packed.scales is not None:
                found[WEIGHTS + scales_name(index)] = product.packed.scales
        else:
            found[WEIGHTS + panel_name(index)] = memory.place(smallest_panels(product.weight(), width))
    return found


def own_constants(model: nn.Module) -> dict[str, torch.Tensor]:
    """The constants that the model holds already: its parameters, buffers and stacked biases, by name."""
    named = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    found = {MODEL + name: tensor.detach() for name, tensor in named}
    for index, product in enumerate(products_of(model)):
        if product.bias is not None:
            found[WEIGHTS + bias_name(index)] = product.bias
    return found


def inlined(constants: Mapping[str, torch.Tensor]) -> dict[str, list[float]]:
    """Values of the constants that are so small that Inductor writes them into the code, by name."""
    return {
        name: tensor.flatten().tolist()
        for name, tensor in sorted(constants.items())
        if tensor.numel() <= _INLINED
    }
