"""Shapes of the embedded target and drafter, and models built from shapes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM


@dataclass(frozen=True)
class LlamaShape:
    """Shape of a Llama model: `layers` of width `hidden`, grouped-query attention, tied embeddings."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int = 4096
    context: int = 2048


# Deep and narrow: at batch 1 on a CPU a layer costs mostly its fixed overhead, so depth makes a token
# expensive while further nodes of a tree stay cheap.
TARGET = LlamaShape(layers=12, hidden=224, heads=4, kv_heads=2, head_dim=64, inner=576)
# Two layers, because copying from the context needs two.
DRAFTER = LlamaShape(layers=2, hidden=192, heads=3, kv_heads=3, head_dim=64, inner=512)


def build(shape: LlamaShape, eos: int, seed: int) -> LlamaForCausalLM:
    """A freshly initialised float32 model of a shape."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(config(shape, eos))


def config(shape: LlamaShape, eos: int) -> LlamaConfig:
    """The Hugging Face configuration of a shape, without bos; the id `eos` ends a text."""
    return LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.inner,
        max_position_embeddings=shape.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=None,
    )
