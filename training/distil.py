"""Distillation: the drafter learns the target's distribution at every position, not only the next token."""

from __future__ import annotations

import torch
from transformers import LlamaForCausalLM

from training.loop import LossOf
from training.target import LONG_FROM, logits_of
from training.taught import Lesson, Taught

_LEAST = 1e-6


def loss_of(drafter: LlamaForCausalLM, short: Taught, long: Taught) -> LossOf:
    """Divergence from the teacher on `short` rows; towards the end every fourth batch is of `long` rows.

    The long ones are there so that the drafter knows late positions.
    """

    def loss(step: int, share: float) -> torch.Tensor:
        taught = long if share >= LONG_FROM and step % 4 == 3 else short
        return divergence(drafter, taught.at(step))

    return loss


def divergence(drafter: LlamaForCausalLM, lesson: Lesson) -> torch.Tensor:
    """Mean KL(teacher || drafter) in nats per position, tokens beyond the kept ones taken as one."""
    logits = logits_of(drafter, lesson.ids)
    given = logits.gather(-1, lesson.tokens) - logits.logsumexp(-1, keepdim=True)
    kept = _relative(lesson.wanted, given).sum(-1)
    rest = (1.0 - lesson.wanted.sum(-1)).clamp(min=_LEAST)
    given_rest = (1.0 - given.exp().sum(-1)).clamp(min=_LEAST).log()
    return (kept + _relative(rest, given_rest)).mean()


def _relative(wanted: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """p log(p / q) from the probability p and the logarithm of q."""
    return wanted * (wanted.clamp(min=_LEAST).log() - given)
