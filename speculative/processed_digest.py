"""The digest of a row after processing: bias, penalties and masks change the scores of ids that can be named.

All other ids keep the score logit / temperature. So what a digest says of the row holds for them, and the
named ids' own scores, computed as `process_logits` computes them, come on top. A grammar that allows few ids
names these, and drops all others.

Ids are ranked by (score descending, id ascending). Methods return None where the digest does not suffice.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from speculative.digest import Mass, RowDigest
from speculative.history import History
from speculative.noise import Floats, Ids, PositionNoise
from speculative.params import SamplingParams
from speculative.sampling import Mask, adjust, changed_ids, holds_back, id_array, masked

_FEW_ALLOWED = 1024
_FEW_DENIED = 4096
_FIRST_SEARCH = 16
_MOST = float(np.finfo(np.float32).max)
_NO_IDS: Ids = np.empty(0, np.int64)
_FAR_ABOVE = 200.0
_ROUNDING = 1e-9


class Scored(NamedTuple):
    """Some ids with their processed scores, and a number that is above the score of all others."""

    ids: Ids
    scores: Floats
    """Processed scores over the temperature, none of them -inf: float64[n]."""
    bound: float
    """Bound on the others' score, or score plus noise; -inf: all others are dropped."""


class Named(NamedTuple):
    """Ids that processing changes."""

    ids: Ids
    """Ascending: int64[n]."""
    before: Floats
    """Logits over the temperature: float64[n]."""
    scores: Floats
    """Processed scores over the temperature, -inf where dropped: float64[n]."""

    @classmethod
    def of(
        cls,
        digest: RowDigest,
        params: SamplingParams,
        history: History,
        temperature: float,
        more: Sequence[Ids] = (),
        mask: Mask | None = None,
    ) -> "Named | None":
        """The ids of a row that `params` change, and `more`; None where the digest lacks one of their logits.

        `mask` drops ids, and has taken what `min_tokens` holds back into account.
        """
        names, held = [*changed_ids(params, history), *more], mask is None and holds_back(params, history)
        if held:
            names.append(id_array(params.stop_ids))
        ids = np.unique(np.concatenate(names)) if names else _NO_IDS
        logits = digest.at(ids)
        if logits is None:
            return None
        scores = logits.astype(np.float64)
        adjust(scores, params, history, ids)
        if mask is not None:
            scores[~mask[ids]] = -np.inf
        elif held:
            scores[ids.searchsorted(id_array(params.stop_ids))] = -np.inf
        scores /= temperature
        return cls(ids, np.divide(logits, temperature, dtype=np.float64), scores)


class ProcessedDigest:
    """What a digest says of a row under one request's parameters.

    Args:
        digest: the row; its highest logit is finite.
        temperature: divisor of scores; 1 when greedy.
        named: the ids that processing changes; None: there are none.
        alone: whether all ids but `named` are dropped.
        allowed: mask of ids, bool[V], that holds for ids that are not named.

    Attributes:
        reference: the score that masses are relative to.
    """

    __slots__ = ("_allowed", "_alone", "_digest", "_live", "_named", "reference", "temperature")

    def __init__(
        self,
        digest: RowDigest,
        temperature: float,
        named: Named | None = None,
        *,
        alone: bool = False,
        allowed: Mask | None = None,
    ) -> None:
        self.temperature = temperature
        self._digest = digest
        self._named = named
        self._alone = alone
        self._allowed = allowed
        if named is not None:
            live = named.scores > -math.inf
            self._live = Scored(named.ids[live], named.scores[live], -math.inf)
        self.reference = digest.highest()[1] / temperature

    @classmethod
    def of(
        cls,
        digest: RowDigest,
        params: SamplingParams,
        history: History,
        allowed: Mask | None,
        temperature: float,
    ) -> "ProcessedDigest | None":
        """The row under `params`, with scores divided by `temperature`; arguments as for `process_logits`."""
        more: list[Ids] = []
        mask, alone = None, False
        if allowed is not None:
            mask = masked(allowed, params, holds_back(params, history))
            count = int(np.count_nonzero(mask))
            if count <= _FEW_ALLOWED:
                alone = True
                more.append(np.flatnonzero(mask))
            elif params.has_cuts and len(mask) - count <= _FEW_DENIED:
                more.append(np.flatnonzero(~mask))
        named = Named.of(digest, params, history, temperature, more, mask)
        if named is None:
            return None
        return cls(digest, temperature, named, alone=alone, allowed=mask)

    @property
    def vocabulary_size(self) -> int:
        """Number of ids of the row."""
        return self._digest.vocabulary_size

    @property
    def changed(self) -> Ids:
        """The ids that processing changes, ascending: int64[n]."""
        return _NO_IDS if self._named is None else self._named.ids

    @property
    def live(self) -> Scored | None:
        """The ids that processing changes and does not drop; None where processing changes none."""
        return None if self._named is None else self._live

    def highest(self) -> tuple[int, float] | None:
        """The id ranked first and its score, -inf where every id is dropped."""
        best = self._best(self._live) if self._named is not None else None
        if self._alone:
            return best or (0, -math.inf)
        top, highest = self._digest.highest()
        others = self._unnamed(np.array([top]), np.array([highest], dtype=np.float32))
        bound, count = math.nextafter(self.reference, math.inf), _FIRST_SEARCH
        while True:
            other = self._best(others)
            if other is not None and (other[1] >= bound or other[0] == top):
                return other if best is None or _before(other, best) else best
            if bound == -math.inf or (best is not None and best[1] >= bound):
                return best or (0, -math.inf)
            listed = self._digest.likeliest(count)
            if listed is None:
                return None
            others, bound = self._unnamed(listed.ids, listed.logits), listed.bound / self.temperature
            count *= 4

    def candidates(self, noise: PositionNoise, least: float | None, count: int) -> Scored | None:
        """Ids whose score + noise could be greatest, with a bound on that of others; see `RowDigest`."""
        if self._alone:
            return self._live
        listed = self._digest.candidates(self.temperature, noise, least, count)
        return None if listed is None else self._with_named(listed.ids, listed.logits, listed.bound)

    def likeliest(self, count: int) -> Scored | None:
        """The `count` ids ranked first, or all that are left, and others; no other reaches the bound."""
        if self._alone:
            return self._live
        wanted = count if self._named is None else count + len(self._named.ids)
        while True:
            listed = self._digest.likeliest(wanted)
            if listed is None:
                return None
            found = self._with_named(listed.ids, listed.logits, listed.bound / self.temperature)
            if found.bound == -math.inf or int(np.count_nonzero(found.scores >= found.bound)) >= count:
                return found
            wanted *= 4

    def others(self, ids: Ids) -> Scored | None:
        """Those of `ids` that are neither named nor dropped."""
        logits = self._digest.at(ids)
        return None if logits is None else self._unnamed(ids, logits)

    def mass(self) -> Mass | None:
        """The sum of exp(score) over all ids, relative to `reference`."""
        return self._sum(self._digest.mass(self.temperature) if self._sums else None, None)

    def mass_before(self, token: int, score: float) -> Mass | None:
        """The sum over the ids ranked before `token`, whose score is `score`."""
        if not self._sums:
            return None
        logit, equal = self._logit(score)
        raw = self._digest.mass_before(self.temperature, token if equal else 0, logit)
        return self._sum(raw, (token, score))

    def ranked_before(self, token: int, score: float) -> int | None:
        """The number of ids ranked before `token`, whose score is `score`."""
        if not self._sums:
            return None
        logit, equal = self._logit(score)
        raw = self._digest.ranked_before(token if equal else 0, logit)
        if raw is None or self._named is None:
            return raw
        gone, come = (_ranked_before(self._named.ids, of, token, score) for of in self._named[1:])
        return raw - int(np.count_nonzero(gone)) + int(np.count_nonzero(come))

    @property
    def _sums(self) -> bool:
        """Whether sums over the row tell those over what processing left."""
        return self._allowed is None and not self._alone

    def _sum(self, raw: Mass | None, before: tuple[int, float] | None) -> Mass | None:
        """A sum over the row, with the named ids' own terms in place of those that their logits have."""
        if raw is None or self._named is None:
            return raw
        ids, logits, scores = self._named
        if len(ids) and float(scores.max()) > self.reference + _FAR_ABOVE:
            return None
        gone, come = np.exp(logits - self.reference), np.exp(scores - self.reference)
        if before is not None:
            gone *= _ranked_before(ids, logits, *before)
            come *= _ranked_before(ids, scores, *before)
        out, back = float(gone.sum()), float(come.sum())
        return Mass(raw.total - out + back, raw.error + _ROUNDING * (out + back))

    def _logit(self, score: float) -> tuple[float, bool]:
        """The greatest float32 logit whose score is at most `score`, and whether its score is `score`."""
        logit = np.float32(min(max(score * self.temperature, -_MOST), _MOST))
        while float(logit) / self.temperature > score:
            logit = np.nextafter(logit, np.float32(-np.inf))
        while (
            logit < _MOST
            and float(above := np.nextafter(logit, np.float32(np.inf))) / self.temperature <= score
        ):
            logit = above
        return float(logit), float(logit) / self.temperature == score

    def _unnamed(self, ids: Ids, logits: NDArray[np.float32]) -> Scored:
        """Those of `ids` that are not named and not dropped, with their scores."""
        scores = np.divide(logits, self.temperature, dtype=np.float64)
        left = None
        if self._named is not None and len(self._named.ids):
            places = self._named.ids.searchsorted(ids)
            places[places == len(self._named.ids)] = 0
            left = self._named.ids[places] != ids
        if self._allowed is not None:
            left = self._allowed[ids] if left is None else left & self._allowed[ids]
        if left is not None:
            ids, scores = ids[left], scores[left]
        return Scored(ids, scores, -math.inf)

    def _with_named(self, ids: Ids, logits: NDArray[np.float32], bound: float) -> Scored:
        """The named ids and those of `ids` that are not."""
        others = self._unnamed(ids, logits)
        if self._named is None:
            return Scored(others.ids, others.scores, bound)
        return Scored(
            np.concatenate((others.ids, self._live.ids)),
            np.concatenate((others.scores, self._live.scores)),
            bound,
        )

    @staticmethod
    def _best(scored: Scored) -> tuple[int, float] | None:
        """The id ranked first and its score; None of none."""
        if not len(scored.ids):
            return None
        level = float(scored.scores.max())
        return int(scored.ids[scored.scores == level].min()), level


def _before(one: tuple[int, float], other: tuple[int, float]) -> bool:
    """Whether one (id, score) is ranked before the other."""
    return (-one[1], one[0]) < (-other[1], other[0])


def _ranked_before(ids: Ids, scores: Floats, token: int, score: float) -> NDArray[np.bool_]:
    """Which of `ids` are ranked before `token`: bool[n]."""
    ranked: NDArray[np.bool_] = (scores > score) | ((scores == score) & (ids < token))
    return ranked
