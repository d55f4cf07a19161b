"""Hidden states of named layers, kept as a pass goes through the model.

Hooks see the whole output of a layer, so every row of the pass is kept, those of prompts included, and a
captured step keeps its rows as it replays. Rank 0 of several has whole hidden states: layers end in a sum
over the ranks.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from outrider.lm.load.part import layer_stack
from speculative.errors import ModelRefused

LAST = -1
"""Names the output of the last norm, which the output layer reads."""


class FeatureTaps:
    """Keeps the outputs of some of a model's layers during each pass."""

    def __init__(self) -> None:
        self._layers: tuple[int, ...] = ()
        self._kept: dict[int, torch.Tensor] = {}
        self._hooks: list[Any] = []

    def tap(self, model: PreTrainedModel, layers: Sequence[int]) -> None:
        """Keeps the outputs of these layers from now on: 0 is the first layer, LAST the last norm.

        Raises ModelRefused for a layer that the model lacks, or where its layers are not to be found.
        """
        body = model.base_model
        stack = layer_stack(model)
        for layer in layers:
            if layer != LAST and (stack is None or not 0 <= layer < len(stack)):
                kind = model.config.model_type
                has = "no list of layers" if stack is None else f"layers 0 to {len(stack) - 1}"
                raise ModelRefused(f"hidden states of layer {layer} cannot be kept: {kind} has {has}", kind)
        for hook in self._hooks:
            hook.remove()
        self._layers = tuple(layers)
        self._hooks = [
            (body if layer == LAST or stack is None else stack[layer]).register_forward_hook(
                self._keeper(layer)
            )
            for layer in self._layers
        ]

    def take(self) -> torch.Tensor | None:
        """Hidden states of the pass that just ran, ``[layers, rows, width]``; None where none are kept."""
        if not self._layers:
            return None
        kept, self._kept = self._kept, {}
        return torch.stack([kept[layer] for layer in self._layers])

    def _keeper(self, layer: int) -> Callable[[nn.Module, Any, Any], None]:
        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            found = output if isinstance(output, torch.Tensor) else output[0]
            self._kept[layer] = found[0]

        return keep
