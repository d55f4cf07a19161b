"""Random heads for the tiny models of `families`."""

from typing import Any

import torch
from transformers import LlamaConfig

from outrider.lm.heads.target_parts import TargetParts
from tests.lm.families import VOCABULARY, model_of

MODEL = model_of("llama", max_position_embeddings=128)
TARGET = TargetParts.of(MODEL)
WIDTH = TARGET.shape.width
LAYER = LlamaConfig(
    hidden_size=WIDTH,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_hidden_layers=1,
    vocab_size=VOCABULARY,
    max_position_embeddings=128,
)


def shaken(module: Any, seed: int = 0) -> Any:
    """The module with random weights of a size that shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    return module
