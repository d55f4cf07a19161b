"""Hydra's heads (arXiv 2402.05109): Medusa's, where head k also reads the tokens drafted before its own.

Those of Hydra++ read hidden states that a decoder layer of their own has seen, the prefix layer.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from outrider.lm.features import LAST
from outrider.lm.heads.config import HeadConfig, HeadNeeds
from outrider.lm.heads.layer import HeadLayer, LayerOptions
from outrider.lm.heads.target_parts import TargetParts, TargetShape

_MLP, _PREFIX = "mlp", "prefix-mlp"
"""Architectures of heads that are served, as config.json names them."""


class HydraSizes(NamedTuple):
    """Options in which Hydra's heads of one width differ."""

    heads: int
    """Number of heads."""
    blocks: int = 1
    """Residual blocks of each head."""
    grounded: bool = True
    """Whether heads read drafted tokens; heads that read none are Medusa's."""
    bias: bool = True
    """Whether the output layers have biases."""
    spaced: bool = True
    """Whether a place for dropout precedes each block and output layer, which shifts the names of weights."""
    prefix: bool = False
    """Whether the heads have a prefix layer."""


class GroundedBlock(nn.Module):
    """A residual block over rows of `parts` times the width; several parts have a linear residual."""

    def __init__(self, width: int, parts: int) -> None:
        super().__init__()
        self.linear = nn.Linear(parts * width, width)
        self.res_connection = nn.Linear(parts * width, width) if parts > 1 else nn.Identity()

    def forward(self, rows: Tensor) -> Tensor:
        """Rows of one width."""
        found: Tensor = self.res_connection(rows) + nn.functional.silu(self.linear(rows))
        return found


class PrefixLayer(nn.Module):
    """A decoder layer of the target's sizes over the target's hidden states, and a norm behind it.

    Keys and values of position i depend on the hidden state of position i alone.

    Args:
        config: sizes of the layer.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList([HeadLayer(config, LayerOptions(input_norm=True))])
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    @property
    def layer(self) -> HeadLayer:
        """The decoder layer."""
        (layer,) = self.layers
        assert isinstance(layer, HeadLayer)
        return layer

    def keys_values(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of hidden states ``[rows, width]`` at positions: ``[kv_heads, rows, head_dim]``."""
        attention = self.layer.self_attn
        return attention.keys_values(self.layer.input_layernorm(hidden), attention.rotation(positions))

    def queries(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """Queries of hidden states ``[rows, width]`` at positions: ``[heads, rows, head_dim]``."""
        attention = self.layer.self_attn
        return attention.queries(self.layer.input_layernorm(hidden), attention.rotation(positions))

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """What the heads read, ``[rows, width]``, from what attention gave, ``[heads, rows, head_dim]``."""
        found: Tensor = self.norm(self.layer.finish(hidden, attended))
        return found


class HydraHeads(nn.Module):
    """Heads 0 to K - 1; head k reads a hidden state, the token that follows, and k drafted tokens.

    Args:
        target: the target whose hidden states and embeddings the heads read.
        sizes: number and sizes of the heads.
    """

    kind: ClassVar[str] = "hydra"
    weights_file: ClassVar[str] = "hydra_lm_head.safetensors"
    left_out: ClassVar[tuple[str, ...]] = (
        "prefix_embeding_layer.embed_tokens.weight",
        "prefix_embeding_layer.layers.0.self_attn.rotary_emb.inv_freq",
    )
    reads: tuple[int, ...] = (LAST,)
    """Layers of the target whose hidden states the heads read."""

    def __init__(self, target: TargetParts, sizes: HydraSizes) -> None:
        super().__init__()
        self._target, self._sizes = target, sizes
        width, vocabulary_size = target.shape.width, target.shape.vocabulary_size
        self.prefix_embeding_layer: PrefixLayer | None = None  # so the checkpoints spell it
        if sizes.prefix:
            assert target.shape.layer is not None, "`needs` has checked it"
            self.prefix_embeding_layer = PrefixLayer(target.shape.layer)
        self.hydra_mlp = nn.ModuleList()
        self.hydra_lm_head = nn.ModuleList()
        gap = [nn.Identity()] if sizes.spaced else []
        for index in range(sizes.heads):
            parts = [index + 2 if sizes.grounded else 1] + [1] * (sizes.blocks - 1)
            blocks = [module for count in parts for module in (*gap, GroundedBlock(width, count))]
            self.hydra_mlp.append(nn.Sequential(*blocks))
            output = nn.Linear(width, vocabulary_size, bias=sizes.bias)
            self.hydra_lm_head.append(nn.Sequential(*gap, output) if sizes.spaced else output)

    def __len__(self) -> int:
        return self._sizes.heads

    def logits(self, index: int, hidden: Tensor, path: Tensor) -> Tensor:
        """Logits of one head, counted from 0, ``[rows, V]``.

        Args:
            index: number of the head.
            hidden: hidden states after the last norm, ``[rows, width]``.
            path: ids int64 ``[rows, index + 1]``: the token that follows the hidden state, then drafted ones.
        """
        if self._sizes.grounded:
            hidden = torch.cat((hidden, self._target.embed(path).flatten(-2)), -1)
        found: Tensor = self.hydra_lm_head[index](self.hydra_mlp[index](hidden))
        return found

    def config(self) -> dict[str, Any]:
        """Contents of config.json."""
        return {
            "hydra_num_heads": self._sizes.heads,
            "hydra_num_layers": self._sizes.blocks,
            "hydra_head_arch": _PREFIX if self._sizes.prefix else _MLP,
            "grounded_heads": self._sizes.grounded,
            "hidden_state_offset": 0,
        }

    @classmethod
    def recognises(cls, config: HeadConfig) -> bool:
        """Whether a config.json belongs to such heads."""
        return "hydra_num_heads" in config.raw

    @classmethod
    def needs(cls, config: HeadConfig, shape: TargetShape) -> HeadNeeds:
        """What the heads need of their target. Raises OutriderError for heads that are not served."""
        _numbers(config)
        arch = config.raw.get("hydra_head_arch", _MLP)
        if arch not in (_MLP, _PREFIX):
            raise config.refusal(
                cls.kind, f"its hydra_head_arch is {arch!r}; {_MLP!r} and {_PREFIX!r} are served"
            )
        if config.raw.get("hidden_state_offset", 0) != 0:
            raise config.refusal(cls.kind, "its hidden_state_offset is not 0; only 0 is served")
        if arch == _MLP:
            return HeadNeeds(cls.reads, parts=("embed",))
        if shape.layer is None:
            raise config.refusal(
                cls.kind, "its prefix layer is one of the target's, which names no such sizes"
            )
        return HeadNeeds.of_layer(cls.reads, shape.layer, ("embed",))

    @classmethod
    def renames(cls, config: HeadConfig | None) -> tuple[tuple[str, str], ...]:
        """None: the module uses the published names."""
        return ()

    @classmethod
    def of(cls, config: HeadConfig, target: TargetParts, weights: Mapping[str, Tensor]) -> "HydraHeads":
        """The heads of a checkpoint, without its weights."""
        count, blocks = _numbers(config)
        grounded = config.raw.get("grounded_heads", False) is True
        spaced = "hydra_lm_head.0.1.weight" in weights
        bias = f"hydra_lm_head.0.{'1.' if spaced else ''}bias" in weights
        prefix = config.raw.get("hydra_head_arch") == _PREFIX
        return cls(target, HydraSizes(count, blocks, grounded, bias, spaced, prefix))


def _numbers(config: HeadConfig) -> tuple[int, int]:
    return config.number("hydra_num_heads", 1, 16), config.number("hydra_num_layers", 1, 8, 1)
