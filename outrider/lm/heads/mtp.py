"""Multi-token prediction (arXiv 2412.19437, 2509.18362): one dense decoder layer, in `speculators` layout.

The layer reads the projection of a normalised embedding and a normalised hidden state, and its normalised
output is both what the target's LM head reads and the next hidden state.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from outrider.lm.features import LAST
from outrider.lm.heads.config import HeadConfig, HeadNeeds
from outrider.lm.heads.layer import HeadLayer, LayerOptions
from outrider.lm.heads.pair_head import PairHead, Pairs
from outrider.lm.heads.parts import HeadParts
from outrider.lm.heads.target_parts import TargetParts, TargetShape


class PredictionModule(PairHead):
    """A module that predicts one more token; embeddings and LM head are the target's.

    Args:
        target: the target whose hidden states the module reads, after the last norm.
        config: sizes of the layer.
        options: parts of the layer, a norm of its input among them.
    """

    kind: ClassVar[str] = "mtp"
    weights_file: ClassVar[str] = "model.safetensors"
    left_out: ClassVar[tuple[str, ...]] = ("embed_tokens.weight", "lm_head.weight")
    reads = (LAST,)

    def __init__(self, target: TargetParts, config: LlamaConfig, options: LayerOptions) -> None:
        super().__init__()
        self._target, self._config = target, config
        width, eps = int(config.hidden_size), config.rms_norm_eps
        self.hidden_layernorm = LlamaRMSNorm(width, eps)
        self.token_layernorm = LlamaRMSNorm(width, eps)
        self.input_proj = nn.Linear(2 * width, width, bias=False)
        self.layer = HeadLayer(config, options._replace(input_norm=True))
        self.final_layernorm = LlamaRMSNorm(width, eps)

    def fuse(self, features: Tensor) -> Tensor:
        """The hidden states of the last norm, unchanged."""
        return features[..., 0, :]

    def pairs(self, tokens: Tensor, hidden: Tensor) -> Pairs:
        """Projected rows of embedding and hidden state."""
        embedded = self.token_layernorm(self._target.embed(tokens))
        fused: Tensor = self.input_proj(torch.cat((embedded, self.hidden_layernorm(hidden)), -1))
        return Pairs(self.layer.input_layernorm(fused), fused)

    def finish(self, pairs: Pairs, attended: Tensor) -> Tensor:
        """The normalised output of the layer."""
        found: Tensor = self.final_layernorm(super().finish(pairs, attended))
        return found

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the target's LM head on expected hidden states."""
        return self._target.lm_head(hidden)

    def parts(self) -> HeadParts:
        """What a compiled pass computes with."""
        return HeadParts(
            self._target.embed,
            self.layer,
            self._target.lm_head,
            token_norm=self.token_layernorm,
            hidden_norm=self.hidden_layernorm,
            projection=self.input_proj,
            input_norm=self.layer.input_layernorm,
            final_norm=self.final_layernorm,
        )

    def config(self) -> dict[str, Any]:
        """Contents of config.json."""
        own = {name: value for name, value in self._config.to_dict().items() if value is not None}
        return {
            "architectures": ["MTPDraftModel"],
            "speculators_model_type": "mtp",
            "num_nextn_predict_layers": 1,
            "transformer_layer_config": own,
        }

    @classmethod
    def recognises(cls, config: HeadConfig) -> bool:
        """Whether a config.json belongs to such a module."""
        return config.raw.get("speculators_model_type") == "mtp"

    @classmethod
    def needs(cls, config: HeadConfig, shape: TargetShape) -> HeadNeeds:
        """What the module needs of its target. Raises OutriderError for a module that does not fit."""
        layer = config.layer()
        config.number("num_nextn_predict_layers", 1, 1, 1)
        config.check_vocabulary(cls.kind, layer, shape)
        config.check_width(cls.kind, layer, shape)
        return HeadNeeds.of_layer(cls.reads, layer)

    @classmethod
    def renames(cls, config: HeadConfig | None) -> tuple[tuple[str, str], ...]:
        """Published prefixes of weights, with the module's prefixes; published weights are all in one
        layer."""
        around = ("hidden_layernorm.", "token_layernorm.", "input_proj.", "final_layernorm.")
        return (*((f"mtp_layers.0.{name}", name) for name in around), ("mtp_layers.0.", "layer."))

    @classmethod
    def of(cls, config: HeadConfig, target: TargetParts, weights: Mapping[str, Tensor]) -> "PredictionModule":
        """The module of a checkpoint, without its weights."""
        return cls(target, config.layer(), LayerOptions.of(weights))
