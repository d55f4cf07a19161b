"""The words in which a device sends a row's digest, and the words in which the host asks for it.

Every row of a pass has the same words, so that shapes are fixed. Pure: numbers, no tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from speculative.digest import RowAsk

MOST_BYTES = 4096
"""Largest size of one row's digest in the planned transfer."""

_NOBODY = 1.0
"""Temperature of the mass of a row that is chosen greedily: its log-sum-exp."""


class DigestLevel(IntEnum):
    """How much a pass's digests hold. The rows of a pass share a level, as a captured step has one shape."""

    PLAIN = 0
    """The maximum and the mass: greedy choice without penalties."""
    LISTED = 1
    """Also the ids ranked first, the logits of ids that the host names, and the sum for log-probabilities."""
    SAMPLED = 2
    """Also the ids of greatest score and the leads of their noise, the first of them with their rank and the
    mass ranked before them."""


@dataclass(frozen=True, slots=True)
class DigestCapacity:
    """Number of ids of each kind in a row's digest."""

    listed: int = 256
    """Ids ranked first."""
    named: int = 128
    """Ids whose logits the host names ahead; a row that names more gets none of them."""
    candidates: int = 64
    """Ids of greatest score."""
    ranked: int = 8
    """Ids of greatest score whose rank, and the mass before them, are computed over the whole row."""

    def within(self, vocabulary_size: int) -> "DigestCapacity":
        """The capacity for rows of this width. Raises ValueError where a digest is too large."""
        candidates = min(self.candidates, vocabulary_size)
        fitting = DigestCapacity(
            min(self.listed, vocabulary_size), self.named, candidates, min(self.ranked, candidates)
        )
        if (size := 4 * fitting.words(DigestLevel.SAMPLED)) > MOST_BYTES:
            raise ValueError(f"a digest of {size} bytes exceeds {MOST_BYTES}; list or name fewer ids")
        return fitting

    def words(self, level: DigestLevel) -> int:
        """Number of int32 words of one row's digest."""
        words = 4
        if level >= DigestLevel.LISTED:
            words += 2 * self.listed + 1 + self.named + 2
        if level >= DigestLevel.SAMPLED:
            words += 3 * self.candidates + 1 + 3 * self.ranked
        return words


ASK_WORDS = 3
"""Number of int64 words of a row's ask before the named ids: seed, position, and the temperature's bits."""


class Asks(NamedTuple):
    """What the host asks of a pass's wanted rows, and the level of digests that answers it."""

    rows: Sequence[RowAsk]
    """The ask of each wanted row."""
    level: DigestLevel
    words: NDArray[np.int64] | None
    """The asks as int64 words ``[n, ASK_WORDS + named]``; None at the plain level, which needs none."""

    @classmethod
    def of(cls, rows: Sequence[RowAsk], capacity: DigestCapacity, top: int) -> "Asks":
        """The asks of a pass; ``top`` is the number of likeliest tokens that are wanted of every row."""
        level = _level_of(rows, top)
        return cls(rows, level, None if level is DigestLevel.PLAIN else _ask_words(rows, capacity))


NO_ASKS = Asks((), DigestLevel.PLAIN, None)


def _level_of(asks: Sequence[RowAsk], top: int) -> DigestLevel:
    if any(ask.temperature > 0 for ask in asks):
        return DigestLevel.SAMPLED
    if top or any(ask.named or ask.top or ask.nucleus for ask in asks):
        return DigestLevel.LISTED
    return DigestLevel.PLAIN


def _ask_words(asks: Sequence[RowAsk], capacity: DigestCapacity) -> NDArray[np.int64]:
    # Ids that nobody named are 0.
    words = np.zeros((len(asks), ASK_WORDS + capacity.named), dtype=np.int64)
    temperatures = words[:, 2].view(np.float64)
    for at, ask in enumerate(asks):
        words[at, 0] = np.uint64(ask.seed).astype(np.int64)
        words[at, 1] = ask.position
        temperatures[at] = ask.temperature or _NOBODY
        if 0 < len(ask.named) <= capacity.named:
            words[at, ASK_WORDS : ASK_WORDS + len(ask.named)] = ask.named
    return words
