"""What a head takes from its target: the embeddings and the LM head, and the sizes that must agree."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from outrider.lm.load.source import ModelSource
from speculative.errors import ModelRefused


class TargetShape(NamedTuple):
    """Sizes of a target that a head for it shares."""

    width: int
    """Width of the hidden states."""
    vocabulary_size: int
    """Width of the logits."""
    layers: int
    """Number of layers."""

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "TargetShape":
        """Sizes of the model that has this configuration."""
        text = config.get_text_config()
        return cls(text.hidden_size, text.vocab_size, text.num_hidden_layers)

    @classmethod
    def read(cls, model: str) -> "TargetShape":
        """Sizes of a model's folder or id, whose weights are not read.

        Raises InvalidRequest for a missing model, ModelRefused for an unknown kind of model.
        """
        raw = ModelSource.of(model).read_config()
        kind = str(raw.get("model_type", "unknown"))
        if kind not in CONFIG_MAPPING:
            raise ModelRefused(f"{kind} is not served: this transformers does not know it", kind)
        return cls.of(CONFIG_MAPPING[kind].from_dict(raw))


@dataclass(frozen=True, slots=True, eq=False)
class TargetParts:
    """The parts of a target that its heads compute with. Heads never change these parts."""

    shape: TargetShape
    embed: Callable[[torch.Tensor], torch.Tensor]
    """Embeddings of token ids: ``[...]`` to ``[..., width]``."""
    lm_head: Callable[[torch.Tensor], torch.Tensor]
    """Logits of hidden states after the last norm: ``[..., rows, width]`` to ``[..., rows, V]``."""
    device: torch.device
    """Device of the hidden states."""
    dtype: torch.dtype
    """Dtype of the hidden states."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> "TargetParts":
        """The parts of a model that is whole in this process. Raises ModelRefused for one without LM head."""
        kind = model.config.model_type
        embed, lm_head = model.get_input_embeddings(), model.get_output_embeddings()
        if embed is None or lm_head is None:
            raise ModelRefused(f"{kind} has no LM head that a drafting head could use", kind)
        return cls(TargetShape.of(model.config), embed, lm_head, model.device, model.dtype)
