"""EAGLE-3's head (arXiv 2503.01840): a decoder layer over hidden states of several layers of the target.

The layer reads normalised embeddings beside normalised hidden states, so attention reads twice the width. The
LM head is the checkpoint's own, over a part of the target's vocabulary.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from outrider.lm.heads.config import HeadConfig, HeadNeeds
from outrider.lm.heads.layer import PLAIN, HeadLayer, LayerOptions
from outrider.lm.heads.pair_head import PairHead, Pairs
from outrider.lm.heads.parts import HeadParts
from outrider.lm.heads.target_parts import TargetParts, TargetShape


class Eagle3Options(NamedTuple):
    """Options in which EAGLE-3 heads of one size differ."""

    bias: bool = False
    """Whether the fusion of the hidden states has a bias."""
    own_embeddings: bool = False
    """Whether the checkpoint has embeddings of its own; without them the head takes the target's."""
    norm_before_fusion: bool = False
    """Whether the target's hidden states are normalised together before they are fused."""
    norm_before_residual: bool = False
    """Whether the layer adds to the normalised hidden states instead of the hidden states as they are."""
    layer: LayerOptions = PLAIN


USUAL = Eagle3Options()
"""The options of the paper's checkpoints."""


class Eagle3Head(PairHead):
    """h = W [hidden states of the layers], then one layer over [norm(embedding); norm(h)].

    Args:
        target: the target whose hidden states the head reads.
        config: sizes of the layer.
        reads: layers whose hidden states the head reads.
        draft_vocabulary_size: number of ids that the head may draft.
        reduced: whether the head drafts only the part of the vocabulary that `d2t` lists.
        options: further options, as the checkpoint shows them.
    """

    kind: ClassVar[str] = "eagle3"
    weights_file: ClassVar[str] = "model.safetensors"
    left_out: ClassVar[tuple[str, ...]] = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")

    def __init__(
        self,
        target: TargetParts,
        config: LlamaConfig,
        reads: tuple[int, ...],
        draft_vocabulary_size: int,
        reduced: bool,
        options: Eagle3Options = USUAL,
    ) -> None:
        super().__init__()
        self.reads = reads
        self._target, self._config, self._options = target, config, options
        width, fused = int(config.hidden_size), len(reads) * target.shape.width
        eps = config.rms_norm_eps
        self.fc = nn.Linear(fused, width, bias=options.bias)
        self.layer = HeadLayer(config, options.layer, 2 * width)
        self.input_layernorm = LlamaRMSNorm(width, eps)
        self.hidden_norm = LlamaRMSNorm(width, eps)
        self.norm = LlamaRMSNorm(width, eps)
        self.lm_head = nn.Linear(width, draft_vocabulary_size, bias=False)
        if options.own_embeddings:
            self.embed_tokens = nn.Embedding(target.shape.vocabulary_size, width)
        if options.norm_before_fusion:
            self.input_norm = LlamaRMSNorm(fused, eps)
        self._reduced = reduced
        if reduced:
            self.register_buffer("d2t", torch.zeros(draft_vocabulary_size, dtype=torch.int64))

    @property
    def drafted_ids(self) -> Tensor | None:
        """Ids that the head may draft, int64, in the order of its own logits; None: all ids."""
        return _drafted_ids(self.get_buffer("d2t")) if self._reduced else None

    def fuse(self, features: Tensor) -> Tensor:
        """One hidden state of those of all layers that the head reads."""
        rows = features.flatten(-2)
        fused: Tensor = self.fc(self.input_norm(rows) if self._options.norm_before_fusion else rows)
        return fused

    def pairs(self, tokens: Tensor, hidden: Tensor) -> Pairs:
        """Rows of embedding and hidden state side by side."""
        own = self._options.own_embeddings
        embedded = self.input_layernorm(self.embed_tokens(tokens) if own else self._target.embed(tokens))
        normed = self.hidden_norm(hidden)
        residual = normed if self._options.norm_before_residual else hidden
        return Pairs(torch.cat((embedded, normed), -1), residual)

    def logits(self, hidden: Tensor) -> Tensor:
        """The head's own logits at their places in the target's vocabulary; -inf at the other places."""
        found: Tensor = self.lm_head(self.norm(hidden))
        ids = self.drafted_ids
        if ids is None:
            return found
        whole = found.new_full((*found.shape[:-1], self._target.shape.vocabulary_size), float("-inf"))
        return whole.index_copy(-1, ids, found)

    def parts(self) -> HeadParts:
        """What a compiled pass computes with."""
        options = self._options
        return HeadParts(
            self.embed_tokens if options.own_embeddings else self._target.embed,
            self.layer,
            self.lm_head,
            fusion_norm=self.input_norm if options.norm_before_fusion else None,
            fusion=self.fc,
            token_norm=self.input_layernorm,
            hidden_norm=self.hidden_norm,
            adds_normed=options.norm_before_residual,
            logits_norm=self.norm,
            drafted_ids=self.drafted_ids,
        )

    def config(self) -> dict[str, Any]:
        """Contents of config.json."""
        own = {name: value for name, value in self._config.to_dict().items() if value is not None}
        return own | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "num_hidden_layers": 1,
            "draft_vocab_size": self.lm_head.out_features,
            "target_hidden_size": self._target.shape.width,
            "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in self.reads],
            "norm_before_residual": self._options.norm_before_residual,
        }

    @classmethod
    def recognises(cls, config: HeadConfig) -> bool:
        """Whether a config.json belongs to such a head."""
        raw = config.raw
        if "speculators_model_type" in raw:
            return bool(raw["speculators_model_type"] == "eagle3")
        return any("eagle3" in str(name).lower() for name in raw.get("architectures") or ())

    @classmethod
    def needs(cls, config: HeadConfig, shape: TargetShape) -> HeadNeeds:
        """What the head needs of its target. Raises OutriderError for a head that does not fit."""
        layer = config.layer()
        config.check_layer(cls.kind, layer, shape)
        width = config.number("target_hidden_size", 1, 1 << 20, int(layer.hidden_size))
        if width != shape.width:
            raise config.refusal(
                cls.kind, f"it is for targets of width {width}, the target's is {shape.width}"
            )
        _draft_vocabulary_size(config, shape)
        return HeadNeeds.of_layer(_reads(config, shape), layer, ("embed",))

    @classmethod
    def renames(cls, config: HeadConfig | None) -> tuple[tuple[str, str], ...]:
        """Published prefixes of weights, with the module's prefixes; the layer is `midlayer` or
        `layers.0`."""
        published = config is not None and "speculators_model_type" in config.raw
        prefix = "layers.0." if published else "midlayer."
        return (
            (f"{prefix}hidden_norm.", "hidden_norm."),
            (f"{prefix}input_layernorm.", "input_layernorm."),
            (prefix, "layer."),
        )

    @classmethod
    def of(cls, config: HeadConfig, target: TargetParts, weights: Mapping[str, Tensor]) -> "Eagle3Head":
        """The head of a checkpoint, without its weights."""
        layer, own = config.layer(), "embed_tokens.weight" in weights
        if layer.hidden_size != target.shape.width and not own:
            raise config.refusal(
                cls.kind, f"it lacks embed_tokens.weight, and the target's are not {layer.hidden_size} wide"
            )
        if "d2t" in weights:
            _check_ids(config, weights["d2t"], target.shape)
        options = Eagle3Options(
            bias="fc.bias" in weights,
            own_embeddings=own,
            norm_before_fusion="input_norm.weight" in weights,
            norm_before_residual=bool(config.raw.get("norm_before_residual", False)),
            layer=LayerOptions.of(weights),
        )
        drafted = _draft_vocabulary_size(config, target.shape)
        reduced = "d2t" in weights or drafted < target.shape.vocabulary_size
        return cls(target, layer, _reads(config, target.shape), drafted, reduced, options)


def _drafted_ids(d2t: Tensor) -> Tensor:
    """Ids of the target's vocabulary that a head may draft, int64, in the order of its logits."""
    return d2t + torch.arange(len(d2t), device=d2t.device)


def _check_ids(config: HeadConfig, d2t: Tensor, shape: TargetShape) -> None:
    """Raises ModelRefused if `d2t` names ids that the target lacks, or an id twice."""
    ids = _drafted_ids(d2t.flatten())
    low, high = int(ids.min()), int(ids.max())
    if d2t.is_floating_point() or low < 0 or high >= shape.vocabulary_size or len(ids.unique()) < len(ids):
        raise config.refusal(
            Eagle3Head.kind,
            f"d2t names the ids {low} to {high}, each of them at most once; the target has ids 0 to "
            f"{shape.vocabulary_size - 1}",
        )


def _draft_vocabulary_size(config: HeadConfig, shape: TargetShape) -> int:
    return config.number("draft_vocab_size", 1, shape.vocabulary_size, shape.vocabulary_size)


def _reads(config: HeadConfig, shape: TargetShape) -> tuple[int, ...]:
    """Layers whose outputs the head reads.

    At the top level, `eagle_aux_hidden_state_layer_ids` counts as in vLLM: i is the input of layer i. Inside
    `eagle_config` it counts as in SGLang: i is the output of layer i. A head without such a list reads the
    layers of the paper's code.
    """
    before = config.raw.get("eagle_aux_hidden_state_layer_ids")
    group = config.raw.get("eagle_config")
    behind = group.get("eagle_aux_hidden_state_layer_ids") if isinstance(group, dict) else None
    layers = shape.layers
    wanted = before or [layer + 1 for layer in behind or ()] or [2, layers // 2, layers - 3]
    found = [layer - 1 if isinstance(layer, int) else -1 for layer in wanted]
    if not all(0 <= layer < layers for layer in found) or len(found) > 8:
        raise config.refusal(
            Eagle3Head.kind,
            f"it reads hidden states before layers {wanted}; the target has {layers} layers",
        )
    return tuple(found)
