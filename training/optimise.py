"""Optimisers and the shape of the learning rate over a run."""

from __future__ import annotations

import torch

WARMUP = 40
"""Steps over which the learning rate rises."""

DECAY_FROM = 0.45
"""Share of the budget after which the learning rate falls, linearly, to nearly nothing."""


def optimisers(model: torch.nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embeddings and norms.

    On a corpus of a few million tokens Muon gets further per token than AdamW, for a few percent of a step.
    """
    named = list(model.named_parameters())
    inner = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    outer = [p for name, p in named if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(inner, lr=rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(outer, lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def factor(step: int, progress: float) -> float:
    """What to multiply the peak learning rate by, given the step and the share of the budget spent."""
    rising = min(1.0, (step + 1) / WARMUP)
    falling = min(1.0, (1.0 - progress) / (1.0 - DECAY_FROM))
    return min(rising, max(0.02, falling))
