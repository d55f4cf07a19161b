"""The outcome of a pass on a device: digests came down with the pass, rows stay until the next pass."""

import math
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.lm import transfer
from outrider.lm.device.layout import Asks, DigestCapacity, DigestLevel
from outrider.lm.outcome import HostOutcome, TransferCounts
from speculative.digest import Candidates, Mass, Row, RowAsk, relative_error
from speculative.noise import Ids, PositionNoise


class DeviceOutcome:
    """An Outcome over logits on a device.

    Args:
        logits: ``[n, V]`` on the device, in the model's dtype; they hold until `expire`.
        features: hidden states of the pass's rows, or None.
        digests: int32 ``[n, words]`` in the host's memory; None: the device had no memory to make any.
        asks: what the host asked ahead of each row, and how much the digests hold.
        capacity: number of ids of each kind in a digest.
        counts: counts the bytes and rows that are copied.
    """

    def __init__(
        self,
        logits: torch.Tensor,
        features: torch.Tensor | None,
        digests: NDArray[np.int32] | None,
        asks: Asks,
        capacity: DigestCapacity,
        counts: TransferCounts,
    ) -> None:
        self._logits = logits
        self.features = features
        self._words = digests
        self._asks = asks
        self._capacity = capacity
        self._counts = counts
        self._fetched: dict[int, Row] = {}
        self._expired = False
        if digests is not None:
            counts.planned_bytes += digests.nbytes

    def __len__(self) -> int:
        return len(self._asks.rows)

    def expire(self) -> None:
        """Marks the rows as gone: the next pass overwrites them."""
        self._expired = True
        self.features = None

    def digest(self, index: int) -> "DeviceDigest":
        """What of one wanted row suffices to choose its token."""
        words = None if self._words is None else self._words[index]
        return DeviceDigest(self, index, words, self._asks.rows[index], self._asks.level, self._capacity)

    @property
    def width(self) -> int:
        """Number of logits in a row."""
        return self._logits.shape[1]

    def row(self, index: int) -> Row:
        """Logits of one wanted row, float32[V], fetched from the device once.

        Raises RuntimeError where the next pass has begun.
        """
        found = self._fetched.get(index)
        if found is None:
            (found,) = self._fetch(slice(index, index + 1))
            self._fetched[index] = found
        return found

    def rows(self) -> NDArray[np.float32]:
        """Logits of all wanted rows, float32[n, V], fetched from the device."""
        return self._fetch(slice(0, len(self)))

    def top(self, count: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Ids and logits of the ``count`` likeliest tokens of each wanted row, best first."""
        ids = np.full((len(self), count), -1, np.int32)
        logits = np.full((len(self), count), -np.inf, np.float32)
        for index in range(len(self) if count else 0):
            found = self.digest(index).likeliest(count)
            if found is None:
                row = HostOutcome(torch.from_numpy(self.row(index))[None])
                ids[index : index + 1], logits[index : index + 1] = row.top(count)
                continue
            order = np.lexsort((found.ids, -found.logits))[:count]
            order = order[np.isfinite(found.logits[order])]
            ids[index, : len(order)] = found.ids[order]
            logits[index, : len(order)] = found.logits[order]
        return ids, logits

    def _fetch(self, rows: slice) -> NDArray[np.float32]:
        if self._expired:
            raise RuntimeError("a row was asked for after the next pass had begun, which overwrites it")
        found: NDArray[np.float32] = transfer.download(self._logits[rows].float()).numpy()
        self._counts.fetched_rows += len(found)
        self._counts.fetched_bytes += found.nbytes
        return found


class DeviceDigest:
    """The RowDigest of one row on a device; see `outrider.lm.device.layout` for its words."""

    def __init__(
        self,
        outcome: DeviceOutcome,
        index: int,
        words: NDArray[np.int32] | None,
        ask: RowAsk,
        level: DigestLevel,
        capacity: DigestCapacity,
    ) -> None:
        self._outcome = outcome
        self._index = index
        self._words = words
        self._ask = ask
        self._level = DigestLevel.PLAIN if words is None else level
        self._capacity = capacity

    @property
    def vocabulary_size(self) -> int:
        """Number of ids of the row."""
        return self._outcome.width

    def full(self) -> Row:
        """The whole row, fetched from the device and counted."""
        return self._outcome.row(self._index)

    def highest(self) -> tuple[int, float]:
        """The id ranked first, and its logit; NaN where the row holds NaN."""
        if self._words is None:
            row = self.full()
            token = int(row.argmax())
            return token, float(row[token])
        return int(self._words[0]), float(self._words[1:2].view(np.float32)[0])

    def at(self, ids: Ids) -> Row | None:
        """The logits of `ids`, float32[n]; None where one of them was neither named nor found."""
        known = self._known
        found = [known.get(token) for token in ids.tolist()]
        return None if None in found else np.array(found, dtype=np.float32)

    def likeliest(self, count: int) -> Candidates | None:
        """At least the `count` ids ranked first, or all ids; None where the digest lists fewer."""
        found = self._listed
        if found is None or (len(found.ids) < count and found.bound != -math.inf):
            return None
        return found

    def candidates(
        self, temperature: float, noise: PositionNoise, least: float | None = None, count: int = 1
    ) -> Candidates | None:
        """The ids of greatest score; None for another temperature or noise than the row's ask."""
        ask = self._ask
        same = (ask.temperature, ask.seed, ask.position) == (temperature, noise.seed, noise.position)
        if self._level < DigestLevel.SAMPLED or not same or count > self._capacity.candidates:
            return None
        if noise.drawn is None:
            noise.take_leads(self._best.ids, self._leads)
        return self._best

    def mass(self, temperature: float) -> Mass | None:
        """The sum over all ids; None for another temperature than the row's ask, or 1 where greedy."""
        if self._words is None or temperature != (self._ask.temperature or 1.0):
            return None
        total = float(self._words[2:4].copy().view(np.float64)[0])
        return Mass(total, self._error(total))

    def log_sum(self) -> float | None:
        """The logarithm of the sum of exp(logit - highest logit); None at the plain level."""
        if self._level < DigestLevel.LISTED:
            return None
        assert self._words is not None
        end = self._capacity.words(DigestLevel.LISTED)
        return math.log(float(self._words[end - 2 : end].copy().view(np.float64)[0]))

    def mass_before(self, temperature: float, token: int, logit: float) -> Mass | None:
        """The sum over the ids ranked before `token`; None where the device did not compute it."""
        mass = self.mass(temperature)
        if mass is None:
            return None
        place = self._ranked(token, logit)
        if place is not None:
            at = self._ranks_at + self._capacity.ranked + 2 * place
            assert self._words is not None
            return Mass(float(self._words[at : at + 2].copy().view(np.float64)[0]), mass.error)
        before = self._before(token, logit)
        if before is None:
            return None
        listed = before.astype(np.float64) - self.highest()[1]
        return Mass(float(np.exp(listed / temperature).sum()), mass.error)

    def ranked_before(self, token: int, logit: float) -> int | None:
        """The number of ids ranked before `token`; None where the device did not compute it."""
        place = self._ranked(token, logit)
        if place is not None:
            assert self._words is not None
            return int(self._words[self._ranks_at + place])
        before = self._before(token, logit)
        return None if before is None else len(before)

    def _error(self, total: float) -> float:
        # The device sums in float64, so that what errs is less than in the host's float32 sums.
        return total * relative_error(self.vocabulary_size)

    def _ranked(self, token: int, logit: float) -> int | None:
        """The place of this id among those whose rank the device computed; None: it is not among them."""
        if self._level < DigestLevel.SAMPLED:
            return None
        first = self._capacity.ranked
        places = np.flatnonzero(self._best.ids[:first] == token)
        if len(places) and float(self._best.logits[places[0]]) == logit:
            return int(places[0])
        return None

    def _before(self, token: int, logit: float) -> Row | None:
        """Logits of the listed ids ranked before this one; None where unlisted ids may be as well."""
        listed = self._listed
        if listed is None or not (logit >= listed.bound):
            return None
        before = listed.logits > logit
        before |= (listed.logits == logit) & (listed.ids < token)
        return listed.logits[before]

    @cached_property
    def _known(self) -> dict[int, float]:
        """Logits by id, of all ids that the digest knows."""
        token, logit = self.highest()
        known = {token: logit}
        if self._level >= DigestLevel.LISTED:
            assert self._words is not None
            low = 4 + 2 * self._capacity.listed + 1
            if len(self._ask.named) <= self._capacity.named:
                named = self._floats(low, len(self._ask.named))
                known.update(zip(self._ask.named, named.tolist(), strict=True))
            if self._listed is not None:
                known.update(zip(self._listed.ids.tolist(), self._listed.logits.tolist(), strict=True))
        if self._level >= DigestLevel.SAMPLED:
            known.update(zip(self._best.ids.tolist(), self._best.logits.tolist(), strict=True))
        return known

    @cached_property
    def _listed(self) -> Candidates | None:
        """The ids ranked first; every other id's logit is below the bound."""
        if self._level < DigestLevel.LISTED:
            return None
        assert self._words is not None
        size = self._capacity.listed
        ids, logits = self._words[4 : 4 + size].astype(np.int64), self._floats(4 + size, size)
        if size == self.vocabulary_size:
            return Candidates(ids, logits, -math.inf)
        level = float(logits.min())
        if int(self._words[4 + 2 * size]) == size:
            return Candidates(ids, logits, level)
        # Some ids of this logit are not listed, and nothing says which: none of them counts as listed.
        above = logits > level
        bound = float(np.nextafter(np.float32(level), np.float32(np.inf)))
        return Candidates(ids[above], logits[above], bound)

    @cached_property
    def _best(self) -> Candidates:
        """The ids of greatest score; every other id's score is below the bound."""
        assert self._words is not None
        size = self._capacity.candidates
        low = self._ranks_at - 2 * size - 1
        ids, logits = self._words[low : low + size].astype(np.int64), self._floats(low + size, size)
        if size == self.vocabulary_size:
            return Candidates(ids, logits, -math.inf)
        return Candidates(ids, logits, float(self._floats(low + 2 * size, 1)[0]))

    @property
    def _leads(self) -> NDArray[np.uint16]:
        """The leads of the noise of the ids of greatest score."""
        assert self._words is not None
        size = self._capacity.candidates
        low = self._ranks_at - 3 * size - 1
        return self._words[low : low + size].astype(np.uint16)

    @property
    def _ranks_at(self) -> int:
        return self._capacity.words(DigestLevel.SAMPLED) - 3 * self._capacity.ranked

    def _floats(self, low: int, count: int) -> Row:
        assert self._words is not None
        return self._words[low : low + count].view(np.float32)
