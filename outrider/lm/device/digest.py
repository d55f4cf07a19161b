"""Digests of rows of logits, computed on the device in operations of fixed shape.

Nothing is read on the host, so a CUDA graph captures the operations with the step. Neither ``argmax`` nor
``topk`` says which of equals it returns; what depends on that is worked out from counts and minima.
"""

import logging

import numpy as np
import torch

from outrider.lm.device.layout import ASK_WORDS, DigestCapacity, DigestLevel
from outrider.lm.device.noise import leads
from speculative.noise import lead_bounds

log = logging.getLogger(__name__)

_SLAB = 2**23
"""Largest number of logits that are digested at once: what an operation keeps in between stays small."""

_WIDENING = 2.0**-21
"""Share by which a score's upper bound is widened: float32's rounding of a factor, a product and a sum."""

_LARGEST = 3e38
"""Bound on the size of scores, so that their margins are finite."""

_STRONGEST = 37.0
"""A bound on the size of any noise."""


class RowDigester:
    """Computes the digests of a pass's wanted rows on one device.

    Args:
        vocabulary_size: width of a row.
        device: device of the logits.
        capacity: number of ids of each kind in a digest.
    """

    def __init__(
        self, vocabulary_size: int, device: torch.device, capacity: DigestCapacity | None = None
    ) -> None:
        self.capacity = (capacity or DigestCapacity()).within(vocabulary_size)
        self._ids = torch.arange(vocabulary_size, device=device)
        self._slab = max(1, _SLAB // vocabulary_size)
        highest = lead_bounds()[1]
        rounded = highest.astype(np.float32)
        rounded = np.where(rounded < highest, np.nextafter(rounded, np.float32(np.inf)), rounded)
        self._noise_bounds = torch.tensor(rounded, device=device)

    def compute(self, logits: torch.Tensor, asks: torch.Tensor, level: DigestLevel) -> torch.Tensor:
        """Digests of the rows: int32 ``[n, capacity.words(level)]`` on the device.

        ``logits`` are ``[n, V]`` in any dtype; ``asks`` are the words of `Asks`, int64 on the device, and
        not read at the plain level.
        """
        parts = [
            self._digest(rows.float(), asked, level)
            for rows, asked in zip(logits.split(self._slab), asks.split(self._slab), strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def try_compute(
        self, logits: torch.Tensor, asks: torch.Tensor, level: DigestLevel
    ) -> torch.Tensor | None:
        """As `compute`; None where the device has memory for the rows but not for their digests."""
        try:
            return self.compute(logits, asks, level)
        except torch.OutOfMemoryError as error:
            log.warning(
                "the device has no memory left to digest %d rows of logits, so their tokens are chosen from "
                "whole rows; give the model less kv_mb: %s",
                len(logits),
                str(error).partition("\n")[0],
            )
            return None

    def _digest(self, rows: torch.Tensor, asks: torch.Tensor, level: DigestLevel) -> torch.Tensor:
        # NaN anywhere makes the maximum NaN.
        top = rows.amax(dim=1, keepdim=True)
        lowest = torch.where(rows == top, self._ids, len(self._ids) - 1).amin(dim=1, keepdim=True)
        weights = rows - top
        if level > DigestLevel.PLAIN:
            weights *= (1 / _temperatures(asks)).float()
        weights = weights.exp_()
        words = [lowest, top, weights.sum(dim=1, keepdim=True, dtype=torch.float64)]
        if level >= DigestLevel.LISTED:
            words += self._listed(rows)
            named = asks.narrow(1, ASK_WORDS, self.capacity.named)
            words.append(rows.gather(1, named.clamp(0, len(self._ids) - 1)))
            words.append(rows.double().sub_(top).exp_().sum(dim=1, keepdim=True))
        if level >= DigestLevel.SAMPLED:
            words += self._candidates(rows, weights, asks)
        return torch.cat([_words(part) for part in words], dim=1)

    def _listed(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """The ids ranked first, their logits, and the number of ids that reach the last of these logits."""
        logits, ids = rows.topk(self.capacity.listed, dim=1)
        reaching = (rows >= logits.narrow(1, -1, 1)).sum(dim=1, keepdim=True)
        return [ids, logits, reaching]

    def _candidates(
        self, rows: torch.Tensor, weights: torch.Tensor, asks: torch.Tensor
    ) -> list[torch.Tensor]:
        """The ids of greatest score, their logits, and a bound on the score of every other id.

        Then, of the first few: how many ids are ranked before each, and the mass of these.
        """
        drawn = leads(asks.select(1, 0), asks.select(1, 1), len(self._ids))
        # A bound of -inf would say that no id is left out, so no score is that low.
        scores = (rows * (1 / _temperatures(asks)).float()).clamp_min(-_LARGEST)
        margin = (scores.abs().clamp_max(_LARGEST) + _STRONGEST) * _WIDENING
        bounds = scores + self._noise_bounds.take(drawn) + margin
        best, ids = bounds.topk(self.capacity.candidates, dim=1)
        logits = rows.gather(1, ids)
        ranks, masses = [], []
        for place in range(self.capacity.ranked):
            token, logit = ids.narrow(1, place, 1), logits.narrow(1, place, 1)
            before = (rows > logit) | ((rows == logit) & (self._ids < token))
            ranks.append(before.sum(dim=1, keepdim=True))
            masses.append((weights * before).sum(dim=1, keepdim=True, dtype=torch.float64))
        return [ids, logits, best.narrow(1, -1, 1), *ranks, *masses]


def digester_for(vocabulary_size: int, device: torch.device) -> RowDigester | None:
    """The digester of rows on this device; None where the host reads the rows in place."""
    return None if device.type == "cpu" else RowDigester(vocabulary_size, device)


def _temperatures(asks: torch.Tensor) -> torch.Tensor:
    """The temperature of each row: float64 ``[n, 1]``."""
    return asks.narrow(1, 2, 1).view(torch.float64)


def _words(part: torch.Tensor) -> torch.Tensor:
    """A part of a digest as int32 words: ids and counts as they are, floats by their bits."""
    if part.dtype is torch.int64:
        return part.to(torch.int32)
    return part.view(torch.int32)
