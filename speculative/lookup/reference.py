"""Drafts copied from a given text that the output may resemble (LLMA, Yang et al., arXiv 2304.04487).

A request for an edit can give the text that the answer will mostly repeat. The output is taken to begin where
the given text does. While both agree, the place in the given text moves on with the output; after a
difference, the last ids find the place again, or the last id alone finds it a little further on. Knows
nothing of prompts.
"""

from bisect import bisect_right
from collections.abc import Sequence

from speculative.lookup.suffix_automaton import Copied

SURE = 4
"""Match length at the beginning of the output, before any id has matched."""
_GRAM = 3
"""Number of last ids that find a place anywhere in the given text."""
_NEAR = 32
"""Number of ids ahead of the last place among which a single id is looked for."""
_STRIDE = 64
"""Number of places of the given text that each pushed id indexes, so that a long text delays no id."""


class ReferenceCursor:
    """A given text and the output's place in it; some ten microseconds per pushed id."""

    __slots__ = ("_agreed", "_at", "_given", "_grams", "_indexed", "_recent")

    def __init__(self, given: Sequence[int]) -> None:
        self._given = tuple(given)
        self._at = 0
        self._agreed = SURE
        self._recent: tuple[int, ...] = ()
        self._grams: dict[tuple[int, ...], list[int]] = {}
        self._indexed = _GRAM

    def push(self, token: int) -> None:
        """Takes the next id of the output."""
        self._index()
        self._recent = (*self._recent, token)[-_GRAM:]
        if self._at < len(self._given) and self._given[self._at] == token:
            self._at += 1
            self._agreed += 1
        else:
            self._find(token)

    def draft(self, count: int) -> Copied:
        """Up to `count` ids from the place on; empty where the output has left the given text."""
        if not self._agreed:
            return Copied((), 0)
        return Copied(self._given[self._at : self._at + max(0, count)], self._agreed)

    def _index(self) -> None:
        until = min(self._indexed + _STRIDE, len(self._given) + 1)
        for end in range(self._indexed, until):
            self._grams.setdefault(self._given[end - _GRAM : end], []).append(end)
        self._indexed = max(self._indexed, until)

    def _find(self, token: int) -> None:
        """Moves to the next place of the last ids, or to the first; else to the last id, a little ahead."""
        places = self._grams.get(self._recent)
        if places is not None:
            ahead_of = bisect_right(places, self._at)
            self._at, self._agreed = places[ahead_of % len(places)], _GRAM
            return
        ahead = self._given[self._at : self._at + _NEAR]
        if token in ahead:
            self._at, self._agreed = self._at + ahead.index(token) + 1, 1
        else:
            self._agreed = 0
