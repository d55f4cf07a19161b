"""A text that may copy from a given one, and where in that it stands (LLMA, Yang et al., arXiv 2304.04487).

Whoever asks for an edit can say what the answer will mostly be. The text is taken to begin where the given
one does. While they agree the place moves on with it; after a difference it is found again by the last ids,
or by the last one alone a little further on. Knows nothing of prompts.
"""

from bisect import bisect_right
from collections.abc import Sequence

from speculative.lookup.suffix_automaton import Copied

SURE = 4
"""How many ids count as matched where the text begins, which is a guess, and the given one has begun it."""
_GRAM = 3
"""Ids by which a place is found anywhere."""
_NEAR = 32
"""How far ahead of the last place a single id is looked for."""
_STRIDE = 64
"""Places of the given text that are indexed with each id, so that a long one holds nobody up."""


class Copying:
    """A given text and a place in it; some ten microseconds an id."""

    __slots__ = ("_agreed", "_at", "_given", "_grams", "_indexed", "_recent")

    def __init__(self, given: Sequence[int]) -> None:
        self._given = tuple(given)
        self._at = 0
        self._agreed = SURE
        self._recent: tuple[int, ...] = ()
        self._grams: dict[tuple[int, ...], list[int]] = {}
        self._indexed = _GRAM

    def push(self, token: int) -> None:
        """The text's next id."""
        self._index()
        self._recent = (*self._recent, token)[-_GRAM:]
        if self._at < len(self._given) and self._given[self._at] == token:
            self._at += 1
            self._agreed += 1
        else:
            self._find(token)

    def draft(self, count: int) -> Copied:
        """Up to `count` ids from the place on; empty where the text has left the given one."""
        if not self._agreed:
            return Copied((), 0)
        return Copied(self._given[self._at : self._at + max(0, count)], self._agreed)

    def _index(self) -> None:
        until = min(self._indexed + _STRIDE, len(self._given) + 1)
        for end in range(self._indexed, until):
            self._grams.setdefault(self._given[end - _GRAM : end], []).append(end)
        self._indexed = max(self._indexed, until)

    def _find(self, token: int) -> None:
        """The next place of the last ids, the first one where none is ahead; else of the last id, near."""
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
