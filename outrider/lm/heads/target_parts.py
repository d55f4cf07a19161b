"""What a head takes from its target: the embeddings and the LM head, and the sizes that must agree."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from transformers import CONFIG_MAPPING, LlamaConfig, PreTrainedConfig, PreTrainedModel

from outrider.lm.load.source import ModelSource
from speculative.errors import ModelRefused

TargetPart = Literal["embed", "lm_head"]
"""A field of `TargetParts` that is a layer of the target."""


class TargetShape(NamedTuple):
    """Sizes of a target that a head for it shares."""

    width: int
    """Width of the hidden states."""
    vocabulary_size: int
    """Width of the logits."""
    layers: int
    """Number of layers."""
    layer: LlamaConfig | None = None
    """Sizes of one of its own layers, where its configuration names them as Llama's does; without scaling of
    rotary positions."""

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "TargetShape":
        """Sizes of the model that has this configuration."""
        text = config.get_text_config()
        return cls(text.hidden_size, text.vocab_size, text.num_hidden_layers, _layer_of(text))

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


def _layer_of(config: PreTrainedConfig) -> LlamaConfig | None:
    """Sizes of one layer of a model, as Llama's configuration names them."""
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        return None
    rope = getattr(config, "rope_parameters", None) or {}
    return LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size),
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        max_position_embeddings=int(getattr(config, "max_position_embeddings", 2048)),
        rms_norm_eps=float(getattr(config, "rms_norm_eps", 1e-6)),
        rope_parameters={"rope_type": "default", "rope_theta": float(rope.get("rope_theta", 10_000.0))},
        bos_token_id=None,
        eos_token_id=None,
    )
