"""Sampled tokens of many rows at once: the tokens that `choose_token` gives, for a fraction of the time.

The reasoning is that of `HostDigest.candidates`: an id wins only for strong noise, or for a logit close to
the row's highest. A NumPy call costs more than its work on one row of a small vocabulary, so every step of
that reasoning is taken for all rows together. What is left, mostly one id a row, is looked at row by row.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from speculative.choice import Cuts, best_of
from speculative.digest import HostDigest, Row, weak_floors
from speculative.history import History
from speculative.noise import LEADS, LEAST_STRONG, Floats, Ids, PositionNoise, lead_bounds
from speculative.params import SamplingParams
from speculative.processed_digest import ProcessedDigest
from speculative.sampling import Mask
from speculative.sampling_kernel import current_kernel

_STACKED = 16_384
"""Largest width of rows that are sampled together: copying wider rows side by side takes too long."""
_FEWEST = 3
"""Least number of rows for which sampling together is quicker in NumPy than row by row."""


class RowChoice(NamedTuple):
    """A token to be chosen from a row in memory; fields as for `choose_token`."""

    digest: HostDigest
    params: SamplingParams
    history: History
    noise: PositionNoise | None
    """Noise of the token's position; None where greedy."""
    allowed: Mask | None = None


class _Contenders(NamedTuple):
    """Ids that could have the highest score + noise of their rows."""

    owners: Ids
    """Row of each id: int64[n]."""
    ids: Ids
    scores: Floats
    """Processed score of each id over the temperature: float64[n]."""
    low: Floats
    """Lower bound of each score + noise: float64[n]."""
    high: Floats

    def kept(self, which: NDArray[np.bool_] | Ids) -> "_Contenders":
        """The contenders at some indices."""
        return _Contenders(
            self.owners[which], self.ids[which], self.scores[which], self.low[which], self.high[which]
        )

    def beside(self, others: "_Contenders") -> "_Contenders":
        """These contenders, followed by others."""
        joined: list[Any] = [np.concatenate(both) for both in zip(self, others, strict=True)]
        return _Contenders(*joined)


def sample_rows(choices: Sequence[RowChoice]) -> list[int | None]:
    """The token of each choice; None where `choose_token` has to decide.

    A kernel takes rows of any width. NumPy leaves greedy rows, rows under a grammar, wide rows, rows with
    few others of their width beside them, and rows that a cut may change. Both leave rows without a finite
    highest logit.
    """
    kernel = current_kernel()
    if kernel is not None:
        return kernel.tokens(choices)
    tokens: list[int | None] = [None] * len(choices)
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for place, choice in enumerate(choices):
        narrow = choice.digest.vocabulary_size <= _STACKED
        if narrow and choice.noise is not None and choice.allowed is None:
            groups[choice.digest.vocabulary_size].append(place)
    # Logits that are not finite leave their rows to `choose_token`.
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for places in groups.values():
            if len(places) < _FEWEST:
                continue
            rows = _Rows([choices[place] for place in places])
            for place, token in zip(places, rows.tokens(), strict=True):
                tokens[place] = token
    return tokens


def fewest() -> int:
    """Least number of rows for which sampling together is quicker than row by row."""
    return _FEWEST if current_kernel() is None else 1


class _Rows:
    """Rows of one width that are sampled together, none of them greedy."""

    def __init__(self, choices: Sequence[RowChoice]) -> None:
        self._choices = choices
        self._noise = [choice.noise for choice in choices if choice.noise is not None]
        self._drawn = np.stack([noise.leads for noise in self._noise])
        self._logits: Row = np.stack([choice.digest.full() for choice in choices])
        self._temperatures = np.array([choice.params.temperature for choice in choices])
        self._processed: dict[int, ProcessedDigest] = {}
        """Rows with a bias, penalties or ids held back; `_logits` leaves out the ids that these change."""
        for at, choice in enumerate(choices):
            if not choice.params.plain_logits:
                self._process(at, choice)
        every = np.arange(len(choices))
        tops = self._logits.argmax(axis=1)
        self._highest = self._logits[every, tops]
        self._least: Floats = np.divide(self._highest, self._temperatures, dtype=np.float64)
        """For each row, a score + noise that at least one id reaches."""
        self._least += lead_bounds()[0][self._drawn[every, tops]]

    def tokens(self) -> list[int | None]:
        """The token of each row; None if `choose_token` must decide."""
        close = self._close(self._strong())
        if (weak := self._weak()) is not None:
            close = self._close(close.beside(weak))
        order = close.owners.argsort(kind="stable")
        begins = close.owners[order].searchsorted(np.arange(len(self._choices) + 1)).tolist()
        ids, scores = close.ids[order], close.scores[order]
        return [
            self._winner(at, ids[begins[at] : begins[at + 1]], scores[begins[at] : begins[at + 1]])
            for at in range(len(self._choices))
        ]

    def _process(self, at: int, choice: RowChoice) -> None:
        row = ProcessedDigest.of(
            choice.digest, choice.params, choice.history, None, choice.params.temperature
        )
        assert row is not None, "a row in memory knows all logits"
        self._processed[at] = row
        self._logits[at, row.changed] = -np.inf

    def _strong(self) -> _Contenders:
        """The ids of strong noise, and those that processing changes."""
        strong = np.flatnonzero(self._drawn >= LEAST_STRONG)
        found = self._contenders(*np.divmod(strong, self._logits.shape[1]))
        for at, row in self._processed.items():
            if row.live is not None:
                owners = np.full(len(row.live.ids), at)
                found = found.beside(self._bounded(owners, row.live.ids, row.live.scores))
        return found

    def _weak(self) -> _Contenders | None:
        """Ids without strong noise whose logits suffice; None where no row has such an id."""
        floors = weak_floors(self._least, self._temperatures, float(lead_bounds()[1][LEAST_STRONG - 1]))
        rows = np.flatnonzero(floors <= self._highest)
        if not len(rows):
            return None
        whole = len(rows) == len(self._choices)
        reach = (self._logits if whole else self._logits[rows]) >= floors[rows, None]
        owners, ids = np.divmod(np.flatnonzero(reach), self._logits.shape[1])
        owners = rows[owners]
        weak = self._drawn[owners, ids] < LEAST_STRONG
        return self._contenders(owners[weak], ids[weak])

    def _contenders(self, owners: Ids, ids: Ids) -> _Contenders:
        """The ids as contenders; their logits are unchanged."""
        scores = np.divide(self._logits[owners, ids], self._temperatures[owners], dtype=np.float64)
        return self._bounded(owners, ids, scores)

    def _bounded(self, owners: Ids, ids: Ids, scores: Floats) -> _Contenders:
        drawn = self._drawn[owners, ids]
        low, high = (bounds[drawn] for bounds in lead_bounds())
        # The highest lead bounds its noise from below alone, so its ids would be close in every row.
        for place in np.flatnonzero(drawn == LEADS - 1).tolist():
            exact = self._noise[owners[place]].exact(ids[place : place + 1])
            low[place] = high[place] = exact[0]
        low += scores
        high += scores
        return _Contenders(owners, ids, scores, low, high)

    def _close(self, contenders: _Contenders) -> _Contenders:
        """The contenders whose upper bound reaches the known score of their rows."""
        np.maximum.at(self._least, contenders.owners, contenders.low)
        return contenders.kept(contenders.high >= self._least[contenders.owners])

    def _winner(self, at: int, ids: Ids, scores: Floats) -> int | None:
        """The row's token; None if a cut drops, or may drop, the winning id."""
        digest, params, noise = self._choices[at].digest, self._choices[at].params, self._noise[at]
        row = self._processed.get(at)
        highest = float(self._highest[at]) if row is None else row.reference
        if not len(ids) or not math.isfinite(highest) or self._least[at] == -math.inf:
            return None
        place = 0 if len(ids) == 1 else best_of(ids, scores, noise)[0]
        token = int(ids[place])
        if params.has_cuts:
            row = row or ProcessedDigest(digest, params.temperature)
            best = row.highest()
            if best is None or not Cuts(row, params, best).keep(token, float(scores[place])):
                return None
        return token
