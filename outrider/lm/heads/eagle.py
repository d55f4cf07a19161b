"""EAGLE's head (arXiv 2401.15077, 2406.16858): a decoder layer that continues the target's hidden states."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from outrider.lm.features import LAST
from outrider.lm.heads.config import HeadConfig, HeadNeeds
from outrider.lm.heads.layer import PLAIN, HeadLayer, LayerOptions
from outrider.lm.heads.pair_head import PairHead, Pairs
from outrider.lm.heads.parts import HeadParts
from outrider.lm.heads.target_parts import TargetParts, TargetShape


class EagleHead(PairHead):
    """g = W [embedding; hidden state] + b, and one layer over g; embeddings and LM head are the target's.

    Args:
        target: the target whose hidden states the head continues.
        config: sizes of the layer.
        bias: whether W has a bias.
        normed: whether embeddings, and outputs before the LM head, are normalised (`layernorms` of
            `speculators`).
        options: parts of the layer.
    """

    kind: ClassVar[str] = "eagle"
    weights_file: ClassVar[str] = "model.safetensors"
    left_out: ClassVar[tuple[str, ...]] = ("embed_tokens.weight", "lm_head.weight")
    reads = (LAST,)

    def __init__(
        self,
        target: TargetParts,
        config: LlamaConfig,
        *,
        bias: bool = True,
        normed: bool = False,
        options: LayerOptions = PLAIN,
    ) -> None:
        super().__init__()
        self._target, self._config, self._bias = target, config, bias
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=bias)
        self.layer = HeadLayer(config, options)
        self._normed, self._options = normed, options
        if normed:
            self.embedding_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
            self.pre_lm_head_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def fuse(self, features: Tensor) -> Tensor:
        """The hidden states of the last norm, unchanged."""
        return features[..., 0, :]

    def pairs(self, tokens: Tensor, hidden: Tensor) -> Pairs:
        """Fused rows of embedding and hidden state."""
        embedded = self._target.embed(tokens)
        if self._normed:
            embedded = self.embedding_layernorm(embedded)
        fused: Tensor = self.fc(torch.cat((embedded, hidden), -1))
        return Pairs(self.layer.input_layernorm(fused) if self._options.input_norm else fused, fused)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the target's LM head on expected hidden states."""
        return self._target.lm_head(self.pre_lm_head_layernorm(hidden) if self._normed else hidden)

    def parts(self) -> HeadParts:
        """What a compiled pass computes with."""
        return HeadParts(
            self._target.embed,
            self.layer,
            self._target.lm_head,
            token_norm=self.embedding_layernorm if self._normed else None,
            projection=self.fc,
            input_norm=self.layer.input_layernorm if self._options.input_norm else None,
            logits_norm=self.pre_lm_head_layernorm if self._normed else None,
        )

    def config(self) -> dict[str, Any]:
        """Contents of config.json."""
        own = {name: value for name, value in self._config.to_dict().items() if value is not None}
        return own | {"architectures": ["EagleModel"], "num_hidden_layers": 1, "bias": self._bias}

    @classmethod
    def recognises(cls, config: HeadConfig) -> bool:
        """Whether a config.json is that of such a head: EAGLE's own config is a Llama config of one layer."""
        raw = config.raw
        if "speculators_model_type" in raw:
            return bool(raw["speculators_model_type"] == "eagle")
        named = any("eagle" in str(name).lower() for name in raw.get("architectures") or ())
        return named or (raw.get("num_hidden_layers") == 1 and "hidden_size" in raw)

    @classmethod
    def needs(cls, config: HeadConfig, shape: TargetShape) -> HeadNeeds:
        """What the head needs of its target. Raises OutriderError for a head that does not fit."""
        layer = config.layer()
        config.check_layer(cls.kind, layer, shape)
        config.check_width(cls.kind, layer, shape)
        return HeadNeeds.of_layer(cls.reads, layer)

    @classmethod
    def renames(cls, config: HeadConfig | None) -> tuple[tuple[str, str], ...]:
        """Published prefixes of weights, with the module's prefixes."""
        if config is not None and "speculators_model_type" in config.raw:
            return (("fusion_fc.", "fc."), ("transformer.", "layer."))
        return (("layers.0.", "layer."),)

    @classmethod
    def of(cls, config: HeadConfig, target: TargetParts, weights: Mapping[str, Tensor]) -> "EagleHead":
        """The head of a checkpoint, without its weights."""
        return cls(
            target,
            config.layer(),
            bias="fc.bias" in weights,
            normed="embedding_layernorm.weight" in weights,
            options=LayerOptions.of(weights),
        )
