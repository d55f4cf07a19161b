"""Distillation: the drafter learns the target's distribution at every position, not only the next token.

The teacher works its distributions out once; every later epoch reads them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers import LlamaForCausalLM

from training.batches import shuffled
from training.loop import LossOf
from training.target import LONG_FROM, logits_of

_LEAST = 1e-6

WIDTH = 64
"""Number of the teacher's likeliest tokens kept for each position; all tokens would take gigabytes."""


class Lesson(NamedTuple):
    """A batch of rows with the teacher's likeliest next tokens after each position."""

    ids: torch.Tensor
    """Token ids: int64, shape (rows, window)."""
    tokens: torch.Tensor
    """The teacher's likeliest next tokens: int64, shape (rows, window, WIDTH)."""
    wanted: torch.Tensor
    """The teacher's probabilities of `tokens`: float32, the same shape."""


class Taught:
    """Batches of `batch` whole rows of `ids` (uint16, (rows, window)), shuffled anew every epoch."""

    def __init__(self, teacher: LlamaForCausalLM, ids: npt.NDArray[np.uint16], batch: int, seed: int) -> None:
        self._teacher = teacher
        self._ids = ids
        self._batch = batch
        self._seed = seed
        self._width = min(WIDTH, teacher.config.vocab_size)
        self._tokens = np.zeros((*ids.shape, self._width), dtype=np.uint16)
        self._wanted = np.zeros((*ids.shape, self._width), dtype=np.float16)
        self._known = np.zeros(len(ids), dtype=np.bool_)

    def at(self, step: int) -> Lesson:
        """The batch of `step`; runs the teacher over rows that have no distribution yet."""
        rows = shuffled(len(self._ids), self._batch, self._seed, step)
        if not self._known[rows].all():
            self._ask(rows)
        return Lesson(
            torch.from_numpy(self._ids[rows].astype(np.int64)),
            torch.from_numpy(self._tokens[rows].astype(np.int64)),
            torch.from_numpy(self._wanted[rows].astype(np.float32)),
        )

    @torch.inference_mode()
    def _ask(self, rows: npt.NDArray[np.int64]) -> None:
        ids = torch.from_numpy(self._ids[rows].astype(np.int64))
        logits = self._teacher(input_ids=ids, use_cache=False).logits.float()
        kept = logits.topk(self._width, dim=-1)
        wanted = (kept.values - logits.logsumexp(-1, keepdim=True)).exp()
        self._tokens[rows] = kept.indices.numpy()
        self._wanted[rows] = wanted.numpy()
        self._known[rows] = True


def loss_of(drafter: LlamaForCausalLM, short: Taught, long: Taught) -> LossOf:
    """Loss of the drafter: its divergence from the teacher on `short` rows.

    Later in the run every fourth batch is of `long` rows, which teach the drafter late positions.
    """

    def loss(step: int, share: float) -> torch.Tensor:
        taught = long if share >= LONG_FROM and step % 4 == 3 else short
        return divergence(drafter, taught.at(step))

    return loss


def divergence(drafter: LlamaForCausalLM, lesson: Lesson) -> torch.Tensor:
    """Mean KL(teacher || drafter) in nats per position; tokens that were not kept count as one token."""
    return divergence_at(logits_of(drafter, lesson.ids), lesson.tokens, lesson.wanted).mean()


def divergence_at(logits: torch.Tensor, tokens: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """KL(teacher || drafter) in nats at each position; tokens that were not kept count as one token.

    Args:
        logits: the drafter's, float32 [..., vocabulary].
        tokens: the teacher's likeliest tokens, int64 [..., kept].
        wanted: the teacher's probabilities of these, float32 [..., kept].
    """
    given = logits.gather(-1, tokens) - logits.logsumexp(-1, keepdim=True)
    kept = _relative(wanted, given).sum(-1)
    rest = (1.0 - wanted.sum(-1)).clamp(min=_LEAST)
    given_rest = (1.0 - given.exp().sum(-1)).clamp(min=_LEAST).log()
    return kept + _relative(rest, given_rest)


def _relative(wanted: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """p log(p / q) from the probability p and the logarithm of q."""
    return wanted * (wanted.clamp(min=_LEAST).log() - given)
