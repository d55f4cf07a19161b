"""A model's pass as one graph: exported with our operators in place of linear layers and attention.

The numbers of rows, wanted rows and sessions are inputs of the graph, so one package serves every pass.
This module runs in the process that compiles; it reads the shapes of weights and never the weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from outrider.lm.attention.interface import AttentionParams, PackedCache
from outrider.lm.compiled import operators  # defines the operators that are called below
from outrider.lm.compiled.panels import (
    MODEL,
    WEIGHTS,
    bias_name,
    own_constants,
    panel_name,
    products_of,
    scales_name,
)
from outrider.lm.linear import Held, pack_linears, stacked_bias
from outrider.lm.load.part import ModelPart
from outrider.lm.outcome import OutcomeWants
from outrider.lm.runner import PackedLM
from outrider.lm.weight_only.packing import STORED, WeightDtype

_MOST = 2**20
"""Largest number of rows of one pass."""

_COMPILED = ("aten", "outrider", "prims")
"""Namespaces of the operators that have compiled code."""

INDUCTOR = {
    "aot_inductor.custom_ops_to_c_shims": operators.C_SHIMS,
    "aot_inductor.package_constants_in_so": False,
    # A header is compiled ahead in the time in which it is read, and takes 300 MB of disk.
    "aot_inductor.precompile_headers": False,
    # Optimising the calls between kernels takes longer than all kernels and gains nothing.
    "aot_inductor.compile_wrapper_opt_level": "O0",
}
"""Inductor's settings: products and attention are direct calls, weights stay outside the package."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How a package's weights of linear layers are laid out."""

    width: int
    """Number of outputs of a panel."""
    name: WeightDtype = "auto"


class PanelProduct:
    """The product of layers with one input over panels of weights. A Product.

    It reads its panels from a module that is part of the exported one, which makes them constants by name.
    """

    def __init__(self, layers: list[nn.Linear], weights: nn.Module, format_: WeightFormat) -> None:
        self.out_features = sum(layer.out_features for layer in layers)
        self.in_features = layers[0].in_features
        self.bias = stacked_bias(layers)
        self.held: Held | None = None
        self._weights = weights
        self._format = format_
        self._index: int | None = None

    def name(self, index: int) -> None:
        """Registers panels and bias under the names of product ``index``."""
        self._index = index
        width, name = self._format.width, self._format.name
        count = -(-self.out_features // width)
        empty = torch.empty(count, self.in_features, width, dtype=STORED.get(name, torch.float32))
        self._weights.register_buffer(panel_name(index), empty)
        if name == "int8":
            self._weights.register_buffer(scales_name(index), torch.empty(count * width))
        if self.bias is not None:
            self._weights.register_buffer(bias_name(index), self.bias)

    def compute(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows`` times the stacked weights, plus the bias."""
        if self._index is None:
            return rows.new_zeros(*rows.shape[:-1], self.out_features)
        panels = getattr(self._weights, panel_name(self._index))
        bias = None if self.bias is None else getattr(self._weights, bias_name(self._index))
        scales = getattr(self._weights, scales_name(self._index), None)
        product: torch.Tensor = torch.ops.outrider.panel_linear(
            rows.contiguous(), panels, bias, scales, self.out_features
        )
        return product

    def weight(self) -> torch.Tensor:
        """Raises NotImplementedError: nothing outside this product may read the weights while exporting."""
        raise NotImplementedError("a layer's weight is read outside its product")


class GraphCache(PackedCache):
    """The KV cache that a model sees while it is exported: attention is one operator over the step block."""

    def __init__(self, model_type: str, block: torch.Tensor) -> None:
        super().__init__(model_type)
        self._block = block

    def compute(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        params: AttentionParams,
        layer: int,
    ) -> torch.Tensor:
        """The operator that writes the new keys and values and lets the rows attend over the slots."""
        scale = query.shape[3] ** -0.5 if params.scaling is None else params.scaling
        output: torch.Tensor = torch.ops.outrider.attend_slots(
            query, keys, values, self._block, params.sinks, layer, scale, params.window or 0,
            params.softcap or 0.0,
        )  # fmt: skip
        return output


class WholePass(nn.Module):
    """Ids and positions ``[1, rows]``, indices of wanted rows and a step block, to logits and features."""

    def __init__(self, lm: PackedLM, weights: nn.Module, layers: int) -> None:
        super().__init__()
        self.model = lm.model
        self.weights = weights
        self._layers = layers
        # Not an attribute that torch looks into: a PackedLM is no module.
        self._lm = lm

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor, block: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Logits ``[wanted, V]``; with features, also the hidden states ``[layers, rows, width]``."""
        cache = GraphCache(self._lm.model_type, block)
        logits = self._lm.run_on_device(cache, ids, positions, wanted)
        cache.finish(self._layers)
        features = self._lm.taps.take()
        return (logits,) if features is None else (logits, features)


def hollow_model(config: PreTrainedConfig) -> PreTrainedModel:
    """A model of this config whose weights hold nothing: memory that is never written takes none."""
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    model = cast(PreTrainedModel, made.to_empty(device="cpu"))
    model.eval().requires_grad_(False)
    return model


def export_pass(
    config: PreTrainedConfig,
    features: tuple[int, ...],
    weight_format: WeightFormat,
    inlined: Mapping[str, Sequence[float]],
    added_ids: int,
    part: ModelPart,
) -> torch.export.ExportedProgram:
    """The exported pass of a model.

    Raises ValueError where its forward makes constants of its own, or calls operators that Inductor cannot
    compile.

    ``inlined`` are the values of small constants by name, ``added_ids`` the number of ids behind the
    vocabulary that have embeddings, ``part`` what is kept of the model that ``config`` describes.
    """
    model = hollow_model(config)
    part.cut(model)
    lm = PackedLM(model, kv_mb=1)
    if added_ids:
        lm.add_embeddings(torch.empty(added_ids, config.get_text_config().hidden_size))
    weights = nn.Module()
    pack_linears(lm.model, lm.find_layout, lambda layers: PanelProduct(layers, weights, weight_format))
    for index, product in enumerate(products_of(lm.model)):
        cast(PanelProduct, product).name(index)
    lm.wants = OutcomeWants(features=features)
    step = WholePass(lm, weights, lm.pool.layout.layers)
    own = own_constants(lm.model)
    for name, values in inlined.items():
        own[name].copy_(torch.tensor(values).view(own[name].shape))
    rows = torch.export.Dim("rows", min=1, max=_MOST)
    wanted = torch.export.Dim("wanted", min=1, max=_MOST)
    words = torch.export.Dim("words", min=1, max=2**31)
    shapes = ((1, 5), (1, 5), (3,), (99,))
    inputs = tuple(torch.zeros(shape, dtype=torch.int64) for shape in shapes)
    with torch.no_grad():
        program = torch.export.export(
            step, inputs, dynamic_shapes=({1: rows}, {1: rows}, {0: wanted}, {0: words}), strict=False
        )
    if others := [name for name in program.constants if not name.startswith((MODEL, WEIGHTS))]:
        raise ValueError(f"its forward makes constants of its own, such as {others[0]}")
    if called := _foreign_operators(program):
        raise ValueError(f"its passes call {called[0]}, which is not compiled with them")
    return program


def _foreign_operators(program: torch.export.ExportedProgram) -> list[str]:
    """Operators that neither torch nor we define, as those of transformers' mixtures of experts.

    They are written in Python. To find them here saves the minute after which `child.unpack_library` would.
    """
    targets = [node.target for node in program.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    return [str(target) for target in targets if target.namespace not in _COMPILED]
