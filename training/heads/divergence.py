"""Divergences of a drafter's distribution from the target's (DistillSpec, Zhou et al., 2024).

Each takes logits [..., vocabulary] of target and drafter and returns one value per position, [...], in nats;
the total variation distance has no unit. It is 1 less the acceptance of the ratio rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import log

import torch

Divergence = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def forward_kl(target: torch.Tensor, drafter: torch.Tensor) -> torch.Tensor:
    """Sum of p log(p / q): the drafter covers all that the target may say."""
    p, q = target.log_softmax(-1), drafter.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def reverse_kl(target: torch.Tensor, drafter: torch.Tensor) -> torch.Tensor:
    """Sum of q log(q / p): the drafter says only what the target may say."""
    return forward_kl(drafter, target)


def jensen_shannon(target: torch.Tensor, drafter: torch.Tensor) -> torch.Tensor:
    """Mean of the two divergences from the mean distribution; between 0 and log 2."""
    p, q = target.log_softmax(-1), drafter.log_softmax(-1)
    mean = torch.logaddexp(p, q) - log(2.0)
    return 0.5 * (p.exp() * (p - mean) + q.exp() * (q - mean)).sum(-1)


def total_variation(target: torch.Tensor, drafter: torch.Tensor) -> torch.Tensor:
    """Half the sum of |p - q|."""
    return 0.5 * (target.softmax(-1) - drafter.softmax(-1)).abs().sum(-1)


DIVERGENCES: Mapping[str, Divergence] = {
    "forward-kl": forward_kl,
    "reverse-kl": reverse_kl,
    "jsd": jensen_shannon,
    "tvd": total_variation,
}
"""Divergences by the name that `outrider distil --divergence` takes."""
