"""Ranks by the likeliest tokens of one position, which is all that a device's model tells.

A ranker asks for a whole row of logits. A server such as llama.cpp's sends the k likeliest ids with their
log-probabilities. `TopKDigest` answers from those as though no other id existed: of a model whose k likeliest
ids hold nearly all probability, the best child is the same. Drafts are guesses, so a wrong answer costs
acceptance and never a token.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from speculative.digest import Candidates, Mass, Row
from speculative.errors import OutriderError
from speculative.noise import Ids, PositionNoise

ABSENT = -1e4
"""Log-probability that stands for an id outside the list."""


class DraftModelFailed(OutriderError):
    """A device's model cannot be used, or answered with what cannot be ranked; the message says what."""


@dataclass(frozen=True, slots=True)
class TopK:
    """The likeliest ids after some prefix, best first, with their log-probabilities."""

    ids: NDArray[np.int64]
    """Distinct token ids: int64[k], k at least 1."""
    logprobs: NDArray[np.float32]
    """Natural logarithm of each id's probability under the model's raw logits: float32[k]."""

    @classmethod
    def of(cls, pairs: list[tuple[int, float]]) -> "TopK":
        """Sorts pairs of id and log-probability. Raises DraftModelFailed where they cannot be ranked."""
        if not pairs:
            raise DraftModelFailed("the list of likeliest tokens is empty")
        best: dict[int, float] = {}
        for id_, logprob in pairs:
            if not 0 <= id_ < 2**32:
                raise DraftModelFailed(
                    f"the likeliest tokens have the id {id_}; no vocabulary has such an id"
                )
            if not -math.inf < logprob <= 1e-3:
                raise DraftModelFailed(
                    f"token {id_} has the log-probability {logprob}; it must be 0 or below"
                )
            best[id_] = max(logprob, best.get(id_, -math.inf))
        order = sorted(best, key=lambda id_: (-best[id_], id_))
        return cls(np.array(order, dtype=np.int64), np.array([best[id_] for id_ in order], dtype=np.float32))

    @classmethod
    def of_row(cls, logits: NDArray[np.float32], count: int) -> "TopK":
        """The `count` likeliest ids of a whole row of logits: float32[V].

        Raises DraftModelFailed where a logit is NaN or infinite.
        """
        if not np.isfinite(logits).all():
            raise DraftModelFailed("the model's logits hold NaN or infinity")
        row = logits.astype(np.float64)
        row -= row.max()
        row -= np.log(np.exp(row).sum())
        count = min(count, len(row))
        likeliest = np.argpartition(row, len(row) - count)[len(row) - count :]
        order = likeliest[np.lexsort((likeliest, -row[likeliest]))]
        return cls(order.astype(np.int64), row[order].astype(np.float32))


class TopKDigest:
    """The digest of a row of which only the likeliest ids are known; see `speculative.digest.RowDigest`.

    Args:
        top: the ids that are known.
        vocabulary_size: number of ids of the row; known ids from there on are ignored.

    Raises:
        DraftModelFailed: no known id is below `vocabulary_size`.
    """

    __slots__ = ("_ids", "_logprobs", "_size")

    def __init__(self, top: TopK, vocabulary_size: int) -> None:
        inside = top.ids < vocabulary_size
        if not inside.any():
            raise DraftModelFailed(
                f"the likeliest tokens have ids from {int(top.ids.min())} on; "
                f"the target has {vocabulary_size} ids"
            )
        self._ids, self._logprobs, self._size = top.ids[inside], top.logprobs[inside], vocabulary_size

    @property
    def vocabulary_size(self) -> int:
        """Number of ids of the row."""
        return self._size

    def highest(self) -> tuple[int, float]:
        """The id ranked first, and its log-probability."""
        return int(self._ids[0]), float(self._logprobs[0])

    def at(self, ids: Ids) -> Row:
        """The log-probabilities of `ids`, ABSENT for those that are not known: float32[n]."""
        order = np.argsort(self._ids)
        places = np.minimum(np.searchsorted(self._ids, ids, sorter=order), len(order) - 1)
        found = order[places]
        return np.where(self._ids[found] == ids, self._logprobs[found], np.float32(ABSENT))

    def likeliest(self, count: int) -> Candidates:
        """All known ids; no other id counts."""
        return Candidates(self._ids, self._logprobs, -math.inf)

    def candidates(
        self, temperature: float, noise: PositionNoise, least: float | None = None, count: int = 1
    ) -> Candidates:
        """All known ids; no other id counts."""
        return Candidates(self._ids, self._logprobs, -math.inf)

    def mass(self, temperature: float) -> Mass:
        """The sum over the known ids, relative to the highest."""
        return Mass(float(self._weights(temperature).sum()), 0.0)

    def log_sum(self) -> float:
        """The logarithm of the sum over the known ids, relative to the highest."""
        return math.log(float(self._weights(1.0).sum()))

    def mass_before(self, temperature: float, token: int, logit: float) -> Mass:
        """The sum over the known ids that are ranked before `token`."""
        return Mass(float(self._weights(temperature)[self._before(token, logit)].sum()), 0.0)

    def ranked_before(self, token: int, logit: float) -> int:
        """The number of known ids that are ranked before `token`."""
        return int(np.count_nonzero(self._before(token, logit)))

    def full(self) -> Row:
        """A whole row, float32[V], with ABSENT for every id that is not known."""
        row = np.full(self._size, np.float32(ABSENT))
        row[self._ids] = self._logprobs
        return row

    def _weights(self, temperature: float) -> NDArray[np.float64]:
        shifted = (self._logprobs.astype(np.float64) - float(self._logprobs[0])) / temperature
        weights: NDArray[np.float64] = np.exp(shifted)
        return weights

    def _before(self, token: int, logit: float) -> NDArray[np.bool_]:
        ranked: NDArray[np.bool_] = (self._logprobs > logit) | (
            (self._logprobs == logit) & (self._ids < token)
        )
        return ranked
