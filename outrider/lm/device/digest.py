"""Digests of rows of logits, computed on the device in operations of fixed shape.

Nothing is read on the host, so a CUDA graph captures the operations with the step. Neither ``argmax`` nor
``topk`` says which of equals it returns; what depends on that is worked out from counts and minima.
"""

import logging
from importlib.util import find_spec
from typing import Protocol

import numpy as np
import torch

from outrider.lm import transfer
from outrider.lm.device.layout import ASK_WORDS, Asks, DigestCapacity, DigestLevel
from outrider.lm.device.noise import leads, leads_of
from speculative.implementations import load_implementation
from speculative.noise import lead_bounds

log = logging.getLogger(__name__)

REDUCTIONS = {
    "torch": "outrider.lm.device.digest:TorchReductions",
    "triton": "outrider.lm.device.digest_kernels:KernelReductions",
}
"""What computes over whole rows, by name, for `speculative.implementations.load_implementation`."""

WIDENING = 2.0**-21
"""Share by which a score's upper bound is widened: float32's rounding of a factor, a product and a sum."""

LARGEST = 3e38
"""Bound on the size of scores, so that their margins are finite."""

STRONGEST = 37.0
"""A bound on the size of any noise."""


class RowReductions(Protocol):
    """What a digest takes from whole rows of logits, ``[n, V]``."""

    slab: int
    """Largest number of logits that are digested at once: what an operation keeps in between stays small."""

    def rows(self, logits: torch.Tensor) -> torch.Tensor:
        """The rows as the other methods take them."""
        ...

    def highest(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The lowest id that has the row's maximum, int64 ``[n, 1]``, and the maximum, float32.

        NaN anywhere makes the maximum NaN.
        """
        ...

    def mass(self, rows: torch.Tensor, top: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
        """The sum of exp((logit - top) * factor) over each row, float64 ``[n, 1]``; no factors: of 1."""
        ...

    def bounds(
        self, rows: torch.Tensor, asks: torch.Tensor, factors: torch.Tensor, noise_bounds: torch.Tensor
    ) -> torch.Tensor:
        """Upper bounds of the scores of all ids, float32 ``[n, V]``, none of them -inf.

        ``noise_bounds``, float32 ``[65536]``, are the most that noise of each lead can be.
        """
        ...

    def leads(self, asks: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The leads of the noise of ``ids``, int64 ``[n, k]``."""
        ...

    def reaching(self, rows: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
        """The number of ids whose logit is at least ``least``, ``[n, 1]``, int64."""
        ...

    def before(
        self,
        rows: torch.Tensor,
        ids: torch.Tensor,
        logits: torch.Tensor,
        top: torch.Tensor,
        factors: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The number of ids ranked before each of ``ids``, int64 ``[n, k]``, and their mass, float64."""
        ...


class TorchReductions:
    """The RowReductions in torch's operations, for devices without Triton."""

    slab = 2**23

    def rows(self, logits: torch.Tensor) -> torch.Tensor:
        """The rows in float32."""
        return logits.float()

    def highest(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See RowReductions."""
        top = rows.amax(dim=1, keepdim=True)
        lowest = torch.where(rows == top, self._ids(rows), rows.shape[1] - 1).amin(dim=1, keepdim=True)
        return lowest, top

    def mass(self, rows: torch.Tensor, top: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
        """See RowReductions."""
        return _weights(rows, top, factors).sum(dim=1, keepdim=True)

    def bounds(
        self, rows: torch.Tensor, asks: torch.Tensor, factors: torch.Tensor, noise_bounds: torch.Tensor
    ) -> torch.Tensor:
        """See RowReductions."""
        drawn = leads(asks.select(1, 0), asks.select(1, 1), rows.shape[1])
        # A bound of -inf would say that no id is left out, so no score is that low.
        scores = (rows * factors).clamp_min(-LARGEST)
        margin = (scores.abs().clamp_max(LARGEST) + STRONGEST) * WIDENING
        return scores + noise_bounds.take(drawn) + margin

    def leads(self, asks: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """See RowReductions."""
        return leads_of(asks.select(1, 0), asks.select(1, 1), ids)

    def reaching(self, rows: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
        """See RowReductions."""
        return (rows >= least).sum(dim=1, keepdim=True)

    def before(
        self,
        rows: torch.Tensor,
        ids: torch.Tensor,
        logits: torch.Tensor,
        top: torch.Tensor,
        factors: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See RowReductions."""
        weights, ranks, masses = _weights(rows, top, factors), [], []
        for place in range(ids.shape[1]):
            token, logit = ids.narrow(1, place, 1), logits.narrow(1, place, 1)
            before = (rows > logit) | ((rows == logit) & (self._ids(rows) < token))
            ranks.append(before.sum(dim=1, keepdim=True))
            masses.append((weights * before).sum(dim=1, keepdim=True))
        return torch.cat(ranks, dim=1), torch.cat(masses, dim=1)

    def _ids(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.arange(rows.shape[1], device=rows.device)


class RowDigester:
    """Computes the digests of a pass's wanted rows on one device.

    Args:
        vocabulary_size: width of a row.
        device: device of the logits.
        capacity: number of ids of each kind in a digest.
        reductions: computes over whole rows.
    """

    def __init__(
        self,
        vocabulary_size: int,
        device: torch.device,
        capacity: DigestCapacity | None = None,
        reductions: RowReductions | None = None,
    ) -> None:
        self.capacity = (capacity or DigestCapacity()).within(vocabulary_size)
        highest = lead_bounds()[1]
        rounded = highest.astype(np.float32)
        rounded = np.where(rounded < highest, np.nextafter(rounded, np.float32(np.inf)), rounded)
        self._noise_bounds = torch.tensor(rounded, device=device)
        self._over: RowReductions = reductions or TorchReductions()
        self._slab = max(1, self._over.slab // vocabulary_size)

    def compute(self, logits: torch.Tensor, asks: torch.Tensor, level: DigestLevel) -> torch.Tensor:
        """Digests of the rows: int32 ``[n, capacity.words(level)]`` on the device.

        ``logits`` are ``[n, V]`` in any dtype; ``asks`` are the words of `Asks`, int64 on the device, and
        not read at the plain level.
        """
        parts = [
            self._digest(self._over.rows(rows), asked, level)
            for rows, asked in zip(logits.split(self._slab), asks.split(self._slab), strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def answer(self, logits: torch.Tensor, asks: Asks) -> torch.Tensor | None:
        """As `try_compute`, for asks that are in the host's memory."""
        words = np.zeros((len(logits), 0), np.int64) if asks.words is None else asks.words
        return self.try_compute(logits, transfer.sent(torch.from_numpy(words), logits.device), asks.level)

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
        lowest, top = self._over.highest(rows)
        factors = None if level is DigestLevel.PLAIN else (1 / _temperatures(asks)).float()
        words = [lowest, top, self._over.mass(rows, top, factors)]
        if level >= DigestLevel.LISTED:
            words += self._listed(rows)
            named = asks.narrow(1, ASK_WORDS, self.capacity.named)
            words.append(rows.gather(1, named.clamp(0, rows.shape[1] - 1)).float())
            words.append(self._over.mass(rows, top, None))
        if factors is not None and level >= DigestLevel.SAMPLED:
            words += self._candidates(rows, top, factors, asks)
        return torch.cat([_words(part) for part in words], dim=1)

    def _listed(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """The ids ranked first, their logits, and the number of ids that reach the last of these logits."""
        logits, ids = rows.topk(self.capacity.listed, dim=1)
        return [ids, logits.float(), self._over.reaching(rows, logits.narrow(1, -1, 1))]

    def _candidates(
        self, rows: torch.Tensor, top: torch.Tensor, factors: torch.Tensor, asks: torch.Tensor
    ) -> list[torch.Tensor]:
        """The ids of greatest score, with leads before and logits behind, and a bound on all other scores.

        Then, of the first few: how many ids are ranked before each, and the mass of these.
        """
        bounds = self._over.bounds(rows, asks, factors, self._noise_bounds)
        best, ids = bounds.topk(self.capacity.candidates, dim=1)
        logits = rows.gather(1, ids).float()
        first = ids.narrow(1, 0, self.capacity.ranked), logits.narrow(1, 0, self.capacity.ranked)
        found = self._over.leads(asks, ids), ids, logits, best.narrow(1, -1, 1)
        return [*found, *self._over.before(rows, *first, top, factors)]


def digester_for(vocabulary_size: int, device: torch.device) -> RowDigester | None:
    """The digester of rows on this device; None where the host reads the rows in place."""
    if device.type == "cpu":
        return None
    if find_spec("triton"):
        try:
            return _with_kernels(vocabulary_size, device)
        except Exception as error:
            # Errors of compilers and drivers have no common class.
            log.warning("digests are made without kernels, which is slow: %s", str(error)[:300])
    return RowDigester(vocabulary_size, device)


def _with_kernels(vocabulary_size: int, device: torch.device) -> RowDigester:
    """The digester by kernels, which have made one digest. Raises what compilers and drivers raise."""
    digester = RowDigester(vocabulary_size, device, reductions=load_implementation(REDUCTIONS, "triton")())
    asks = torch.ones(1, ASK_WORDS + digester.capacity.named, dtype=torch.int64, device=device)
    asks[:, 2] = 0x3FF0000000000000  # the bits of 1.0, the temperature
    digester.compute(torch.zeros(1, vocabulary_size, device=device), asks, DigestLevel.SAMPLED).cpu()
    return digester


def _temperatures(asks: torch.Tensor) -> torch.Tensor:
    """The temperature of each row: float64 ``[n, 1]``."""
    return asks.narrow(1, 2, 1).view(torch.float64)


def _weights(rows: torch.Tensor, top: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
    """exp((logit - top) * factor) of each id, float64 ``[n, V]``."""
    shifted = rows.double().sub_(top)
    return (shifted if factors is None else shifted.mul_(factors)).exp_()


def _words(part: torch.Tensor) -> torch.Tensor:
    """A part of a digest as int32 words: ids and counts as they are, floats by their bits."""
    if part.dtype is torch.int64:
        return part.to(torch.int32)
    return part.view(torch.int32)
