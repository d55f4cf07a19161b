"""The attention and the MLP of a layer as steps that run alone, for layers that are no more than these two.

A layer of the plain pre-norm form adds its attention of the normed input to the input, then the MLP of the
normed sum to the sum. Whether a family's layers have this form is not guessed: the two steps in succession
have to give the layer's own output, to the bit.
"""

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from outrider.skip_set import KINDS, Kind

_ROWS = 5
"""Number of ids that are sent through a model to see what its layers compute."""


class AttentionStep(nn.Module):
    """Adds a layer's attention to the hidden states. Holds the layer's own modules, not copies."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = layer.get_submodule("input_layernorm")
        self.self_attn = layer.get_submodule("self_attn")

    def forward(self, hidden_states: torch.Tensor, **named: Any) -> torch.Tensor:
        """Hidden states ``[1, rows, width]``; ``named`` is what the model gives its layers."""
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **named)
        added: torch.Tensor = hidden_states + attended
        return added


class MlpStep(nn.Module):
    """Adds a layer's MLP to the hidden states. Holds the layer's own modules, not copies."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.post_attention_layernorm = layer.get_submodule("post_attention_layernorm")
        self.mlp = layer.get_submodule("mlp")

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        """Hidden states ``[1, rows, width]``."""
        added: torch.Tensor = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return added


class Steps(nn.Module):
    """Sublayers one after the other, in the place of a layer. None at all: the input is the output.

    Args:
        parts: each step's layer, and which of its sublayers the step is.
    """

    def __init__(self, parts: Sequence[tuple[nn.Module, Kind]]) -> None:
        super().__init__()
        kinds = {"attention": AttentionStep, "mlp": MlpStep}
        self.steps = nn.ModuleList(kinds[kind](layer) for layer, kind in parts)

    def forward(self, hidden_states: torch.Tensor, **named: Any) -> torch.Tensor:
        """Hidden states ``[1, rows, width]``; ``named`` is what the model gives its layers."""
        for step in self.steps:
            hidden_states = step(hidden_states, **named)
        return hidden_states


def whole_only(model: PreTrainedModel, layers: Collection[nn.Module]) -> str:
    """Why these layers of a model cannot be skipped in part; empty where they can.

    Args:
        model: a model that was just loaded, with its weights and its own attention.
        layers: some of its layers.
    """
    kind = model.config.model_type
    why = (
        f"no sublayer of {kind} can be skipped: its layers are not attention and then an MLP, each behind a "
        "norm and added to its own input; skip whole layers"
    )
    differs = []

    def compare(layer: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        try:
            steps = Steps([(layer, kind) for kind in KINDS])(*inputs, **named)
        except (AttributeError, TypeError, ValueError):  # modules of other names, or with other results
            differs.append(layer)
            return
        if not isinstance(output, torch.Tensor) or not torch.equal(steps, output):
            differs.append(layer)

    ids = torch.arange(_ROWS, device=model.device)[None] % model.config.get_text_config().vocab_size
    with ExitStack() as hooks, torch.inference_mode():
        for layer in layers:
            hooks.callback(layer.register_forward_hook(compare, with_kwargs=True).remove)
        model(input_ids=ids, use_cache=False)
    return why if differs else ""
