"""Match, then copy (LLMA, Yang et al., arXiv 2304.04487): the longest suffix found in some documents.

The texts stand one after another, and every id's places and every pair's places are sorted once. A lookup
begins with the places of the session's last pair and keeps those that also match one id further back, until
none would be left: a few array operations, tens of microseconds.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieval_service.trie import CountedTrie, counted

Ids = NDArray[np.int32]

BETWEEN = -1
"""Stands between two texts: no id equals it, so no match or copy crosses it."""
_NOWHERE = -2
"""Stands for what cannot be an id."""
LONGEST = 64
"""Longer matches count as so long."""
READ = 32
"""Occurrences whose continuations are read; those of the texts that come first."""
_FEW = 4
"""Length in ids from which a match with `_MANY` places goes on with the first of them alone."""
_MANY = 1024


class DocumentText:
    """Texts, the most relevant first, indexed for matching. Immutable; safe from several threads."""

    __slots__ = ("_by_id", "_by_pair", "_ids", "_pairs", "ids")

    def __init__(self, texts: Sequence[Ids]) -> None:
        self.ids: Ids = np.full(sum(len(text) + 1 for text in texts), BETWEEN, dtype=np.int32)
        at = 0
        for text in texts:
            self.ids[at : at + len(text)] = text
            at += len(text) + 1
        self._by_id = np.argsort(self.ids, kind="stable").astype(np.int32)
        self._ids = self.ids[self._by_id]
        pairs = _pair(self.ids[:-1], self.ids[1:])
        self._by_pair = np.argsort(pairs, kind="stable").astype(np.int32)
        self._pairs = pairs[self._by_pair]

    def lookup(
        self, ids: Sequence[int], *, node_limit: int, depth: int, shortest: int = 1
    ) -> CountedTrie | None:
        """Continuations of the longest suffix of `ids` found here; None if it is shorter than `shortest`."""
        places, length = self.match(ids)
        if length < shortest:
            return None
        return self.continued(places, length, node_limit=node_limit, depth=depth)

    def match(self, ids: Sequence[int]) -> tuple[NDArray[np.int32], int]:
        """Places where the longest suffix of `ids` ends and an id follows, and the suffix' length."""
        tail = np.array(ids[-LONGEST:], dtype=np.int64)
        tail[(tail < 0) | (tail > np.iinfo(np.int32).max)] = _NOWHERE
        return self._longest(tail)

    def continued(
        self, places: NDArray[np.integer[Any]], match_length: int, *, node_limit: int, depth: int
    ) -> CountedTrie | None:
        """Trie of what follows the first READ of these places; a place given twice counts twice."""
        following = [self._copy(int(place) + 1, depth) for place in places[:READ]]
        return counted(following, match_length, node_limit) if depth > 0 else None

    def _copy(self, start: int, depth: int) -> list[int]:
        copied: list[int] = self.ids[start : start + depth].tolist()
        return copied[: copied.index(BETWEEN)] if BETWEEN in copied else copied

    def _longest(self, tail: NDArray[np.int64]) -> tuple[NDArray[np.int32], int]:
        """Places of the last id of the longest suffix of `tail` that an id follows here, and its length."""
        if not len(tail) or tail[-1] < 0:
            return self._by_id[:0], 0
        places = self._going_on(_equal(self._ids, self._by_id, tail[-1]))
        if not len(places):
            return places, 0
        length = 1
        if len(tail) > 1:
            starts = _equal(self._pairs, self._by_pair, _pair(tail[-2], tail[-1]))
            pairs = self._going_on(starts + 1)
            if not len(pairs):
                return places, length
            places, length = self._extended(pairs, 2, tail)
        return places, length

    def _extended(
        self, places: NDArray[np.int32], length: int, tail: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], int]:
        """The places with the longest match, and its length; `length` ids match at all given places."""
        while length < len(tail) and len(places) > READ:
            # A place too near the beginning reads from the end, which is BETWEEN: no match.
            kept = places[self.ids[np.maximum(places - length, -1)] == tail[-1 - length]]
            if not len(kept):
                return places, length
            places, length = kept, length + 1
            if length >= _FEW:
                places = places[:_MANY]
        if length == len(tail):
            return places, length
        # Few places: what stands before all of them at once.
        before = self.ids[np.maximum(places[:, None] - np.arange(length, len(tail)), -1)]
        equal = before == tail[::-1][length:]
        further = np.where(equal.all(axis=1), equal.shape[1], np.argmin(equal, axis=1))
        most = int(further.max())
        return places[further == most], length + most

    def _going_on(self, places: NDArray[np.int32]) -> NDArray[np.int32]:
        """Places that an id follows; every text ends with BETWEEN, so there is a next value."""
        going_on: NDArray[np.int32] = places[self.ids[places + 1] != BETWEEN]
        return going_on


def _pair(first: Any, second: Any) -> Any:
    """Two ids as one number, int64."""
    return (np.int64(first) << 32) | (np.int64(second) & 0xFFFFFFFF)


def _equal(ordered: NDArray[Any], places: NDArray[np.int32], value: Any) -> NDArray[np.int32]:
    low, high = np.searchsorted(ordered, value, "left"), np.searchsorted(ordered, value, "right")
    found: NDArray[np.int32] = places[low:high]
    return found
