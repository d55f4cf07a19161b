"""The target as training sees it: hidden states, embeddings and LM head, none of them trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from outrider.lm.features import LAST
from outrider.lm.heads.target_parts import TargetParts
from outrider.lm.load.model import load_model
from outrider.lm.load.part import layer_stack
from speculative.errors import ModelRefused

Ids = npt.NDArray[np.uint32]

_TRIAL_TOKENS = 16
_TOLERANCE = 1e-2


class HiddenStates(NamedTuple):
    """The target's hidden states of rows of text, float32."""

    last: torch.Tensor
    """After the last norm, [rows, length, width]; the LM head reads these."""
    read: torch.Tensor
    """What a head reads: `last` itself, or the outputs of several layers, [rows, length, layers, width]."""


class FrozenTarget:
    """A target whose features are the output of its last norm.

    The model computes in its own number format, while heads are trained and measured in float32. So all
    hidden states, embeddings and logits given here are float32, those of `parts` included, and hidden states
    taken here are converted to the model's format.

    Args:
        model: a causal LM in evaluation mode, without gradients.

    Raises ModelRefused if the LM head on these features does not give the model's logits.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.parts = _in_float32(TargetParts.of(model))
        self.device = model.device
        self._check()

    @classmethod
    def load(cls, source: str, device: str, dtype: str = "auto") -> FrozenTarget:
        """Loads a folder or id; `auto` is float32 on a CPU, and the checkpoint's number format elsewhere."""
        model = load_model(source, device=device, dtype=dtype)
        model.set_attn_implementation("sdpa")  # several times faster over long rows than plain attention
        return cls(model)

    @property
    def eos(self) -> int:
        """The id that ends a text; the last id if the model names no such id."""
        named = self.model.generation_config.eos_token_id if self.model.generation_config else None
        first = named[0] if isinstance(named, list) else named
        return self.parts.shape.vocabulary_size - 1 if first is None else int(first)

    @torch.inference_mode()
    def features(self, ids: torch.Tensor) -> torch.Tensor:
        """Hidden states after the last norm: ids int64 [rows, length] to [rows, length, width]."""
        hidden: torch.Tensor = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return hidden.float()

    def hidden(self, embedded: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states after the last norm of rows that are embedded already, [rows, length, width].

        Gradients flow through the model to the embeddings.

        Args:
            embedded: [rows, length, width].
            mask: whether a place sees another one, bool [rows, 1, length, length].
            positions: int64 [rows, length].
        """
        found: torch.Tensor = self.model.base_model(
            inputs_embeds=embedded.to(self.model.dtype),
            attention_mask=mask,
            position_ids=positions,
            use_cache=False,
        ).last_hidden_state
        return found.float()

    @torch.inference_mode()
    def states(self, ids: torch.Tensor, reads: Sequence[int]) -> HiddenStates:
        """Hidden states of ids, int64 [rows, length], for a head that reads the outputs of these layers.

        Raises ModelRefused where the model's layers are not to be found.
        """
        if tuple(reads) == (LAST,):
            last = self.features(ids)
            return HiddenStates(last, last)
        stack = layer_stack(self.model)
        if stack is None:
            kind = self.model.config.model_type
            raise ModelRefused(f"no head can read several layers of {kind}: it has no list of layers", kind)
        kept: dict[int, torch.Tensor] = {}
        hooks = [stack[layer].register_forward_hook(_keeper(kept, layer)) for layer in reads]
        try:
            last = self.features(ids)
        finally:
            for hook in hooks:
                hook.remove()
        return HiddenStates(last, torch.stack([kept[layer] for layer in reads], dim=2).float())

    @property
    def output_weights(self) -> torch.Tensor:
        """The LM head's matrix, [vocabulary, width], in the model's number format."""
        found = self.model.get_output_embeddings()
        assert isinstance(found, torch.nn.Module), "a causal LM has an LM head"
        weights = found.weight
        assert isinstance(weights, torch.Tensor)
        return weights

    @torch.inference_mode()
    def _check(self) -> None:
        ids = torch.arange(_TRIAL_TOKENS, device=self.device)[None] % self.parts.shape.vocabulary_size
        own = self.model(input_ids=ids, use_cache=False).logits.float()
        ours = self.parts.lm_head(self.features(ids))
        difference = float((own - ours).abs().max())
        if difference > _TOLERANCE * max(1.0, float(own.abs().max())):
            raise ModelRefused(
                f"a head cannot be trained for {self.model.config.model_type}: its logits differ by "
                f"{difference:.3g} from its LM head's, applied to its last hidden state",
                self.model.config.model_type,
            )


def _in_float32(own: TargetParts) -> TargetParts:
    """A target's parts for heads in float32."""
    return replace(
        own,
        embed=lambda ids: own.embed(ids).float(),
        lm_head=lambda hidden: own.lm_head(hidden.to(own.dtype)).float(),
        dtype=torch.float32,
    )


def _keeper(kept: dict[int, torch.Tensor], layer: int) -> Any:
    """A hook that keeps a layer's output."""

    def keep(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        kept[layer] = output if isinstance(output, torch.Tensor) else output[0]

    return keep
