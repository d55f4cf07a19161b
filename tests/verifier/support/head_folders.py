"""Checkpoints of random heads, one for each kind of head that drafts beside its target."""

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from outrider.lm.heads.eagle import EagleHead
from outrider.lm.heads.eagle3 import Eagle3Head
from outrider.lm.heads.hydra import HydraHeads, HydraSizes
from outrider.lm.heads.layer import PLAIN
from outrider.lm.heads.medusa import MedusaHeads
from outrider.lm.heads.mtp import PredictionModule
from outrider.lm.heads.published import write_head
from outrider.lm.heads.target_parts import TargetParts
from tests.lm.random_heads import shaken

HEADS = ("medusa", "blockwise", "hydra", "prefixed", "eagle", "eagle3", "mtp")
"""Names of the sources."""


def write_heads(model: Any, folder: Path) -> str:
    """Writes the heads for a model whose vocabulary is even; returns the setting `heads` that names them."""
    target = TargetParts.of(model)
    layer = LlamaConfig(
        hidden_size=target.shape.width,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_hidden_layers=1,
        vocab_size=target.shape.vocabulary_size,
        max_position_embeddings=model.config.max_position_embeddings,
    )
    half = target.shape.vocabulary_size // 2
    heads = {
        "medusa": MedusaHeads(target, 3),
        "blockwise": MedusaHeads(target, 3, shared=True),
        "hydra": HydraHeads(target, HydraSizes(3)),
        "prefixed": HydraHeads(target, HydraSizes(3, prefix=True)),
        "eagle": EagleHead(target, layer),
        "eagle3": Eagle3Head(target, layer, (1, 1, 0), half, reduced=True),
        "mtp": PredictionModule(target, layer, PLAIN),
    }
    assert tuple(heads) == HEADS
    for name, head in heads.items():
        made = shaken(head)
        if name == "eagle3":
            made.d2t = torch.arange(half)  # every other id
        write_head(made, folder / name, torch.float32)
    return ",".join(f"{name}={folder / name}" for name in HEADS)
