"""The decoder layer of a head: attention with rotary positions, and a gated MLP.

The layer gives keys and values on their own, since a session keeps nothing else of a committed token.
"""

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding


class LayerOptions(NamedTuple):
    """Options in which layers of one size differ; the names of a checkpoint's weights show them."""

    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    query_norm: bool = False
    """Whether queries and keys are normalised, as Qwen3 does."""
    input_norm: bool = False
    """Whether the layer normalises its input; EAGLE's does not."""

    @classmethod
    def of(cls, names: Collection[str]) -> "LayerOptions":
        """The options of a layer whose weights have these names."""
        return cls(
            "layer.self_attn.q_proj.bias" in names,
            "layer.self_attn.o_proj.bias" in names,
            "layer.mlp.gate_proj.bias" in names,
            "layer.self_attn.q_norm.weight" in names,
            "layer.input_layernorm.weight" in names,
        )


PLAIN = LayerOptions()
"""A layer without biases and without norms of its own input."""


class HeadAttention(nn.Module):
    """Projections of attention; keys come rotated, as a cache keeps them.

    Args:
        config: sizes.
        width: width of the input rows.
        options: the optional parts that the checkpoint has.
    """

    def __init__(self, config: LlamaConfig, width: int, options: LayerOptions) -> None:
        super().__init__()
        self.head_dim = int(config.head_dim or config.hidden_size // config.num_attention_heads)
        bias = options.attention_bias
        heads = int(config.num_attention_heads)
        kv_heads = int(config.num_key_value_heads or heads)
        self.q_proj = nn.Linear(width, heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * self.head_dim, config.hidden_size, bias=options.output_bias)
        if options.query_norm:
            self.q_norm = LlamaRMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = LlamaRMSNorm(self.head_dim, config.rms_norm_eps)
        self.is_normed = options.query_norm
        """Whether queries and keys are normalised."""
        with torch.device("cpu"):
            rotary = LlamaRotaryEmbedding(config)
        self.frequencies: Tensor = rotary.inv_freq.float()
        """Angles of two neighbouring positions, ``[head_dim / 2]``."""
        self.rotary_scale = float(rotary.attention_scaling)

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions, ``[rows]``, each ``[rows, head_dim]``."""
        if self.frequencies.device != positions.device:
            self.frequencies = self.frequencies.to(positions.device)
        angles = positions.float()[:, None] * self.frequencies
        angles = torch.cat((angles, angles), -1)
        dtype = self.q_proj.weight.dtype
        return (angles.cos() * self.rotary_scale).to(dtype), (angles.sin() * self.rotary_scale).to(dtype)

    def queries(self, rows: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Rotated queries, ``[..., heads, rows, head_dim]``, of ``[..., rows, width]``."""
        found = self._by_head(self.q_proj(rows))
        return _rotated(self.q_norm(found) if self.is_normed else found, rotation)

    def keys_values(self, rows: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Rotated keys, and values, ``[..., kv_heads, rows, head_dim]``, of ``[..., rows, width]``."""
        found = self._by_head(self.k_proj(rows))
        keys = _rotated(self.k_norm(found) if self.is_normed else found, rotation)
        return keys, self._by_head(self.v_proj(rows))

    def _by_head(self, rows: Tensor) -> Tensor:
        found: Tensor = rows.unflatten(-1, (-1, self.head_dim))
        return found.transpose(-3, -2)


class GatedMLP(nn.Module):
    """The MLP of Llama's layers."""

    def __init__(self, config: LlamaConfig, bias: bool) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(width, inner, bias=bias)
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)
        self.activation = str(config.hidden_act)
        self._activate = ACT2FN[config.hidden_act]

    def forward(self, rows: Tensor) -> Tensor:
        """Rows of the same width."""
        found: Tensor = self.down_proj(self._activate(self.gate_proj(rows)) * self.up_proj(rows))
        return found


class HeadLayer(nn.Module):
    """One decoder layer.

    Args:
        config: sizes.
        width: width of the rows that attention reads; None: the width of the hidden states.
        options: the optional parts that the checkpoint has.
    """

    def __init__(self, config: LlamaConfig, options: LayerOptions, width: int | None = None) -> None:
        super().__init__()
        self.self_attn = HeadAttention(config, width or config.hidden_size, options)
        self.mlp = GatedMLP(config, options.mlp_bias)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        if options.input_norm:
            self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """The layer's output, ``[..., rows, hidden]``.

        ``attended`` is what attention gave, ``[..., heads, rows, head_dim]``.
        """
        rows = residual + self.self_attn.o_proj(attended.transpose(-3, -2).flatten(-2))
        found: Tensor = rows + self.mlp(self.post_attention_layernorm(rows))
        return found


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """Attention of ``[batch, heads, rows, head_dim]`` over ``[batch, kv_heads, seen, head_dim]``.

    ``mask`` is True where a row sees a key, ``[rows, seen]``.
    """
    return nn.functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, is_causal=causal, enable_gqa=True
    )


def _rotated(rows: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cosines, sines = rotation
    low, high = rows.chunk(2, -1)
    return rows * cosines + torch.cat((-high, low), -1) * sines
