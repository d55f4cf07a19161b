"""The index of one tenant's past outputs in Python: what is used until the compiled one is there.

Pure. Ids stay the caller's; an index holds positions of pages, each of which belongs to one sequence.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from retrieval_service.past.bulk import context_order
from retrieval_service.past.order import ContextOrder

CONTEXT = 32
"""Longest suffix that is matched, in ids: a power of two."""

READ = 64
"""Occurrences read in a lookup; of more, as many evenly spread ones."""

PAGE = 256
"""Positions of a page."""
FIRST_PAGE = 2**31 // PAGE


class PositionIndex(Protocol):
    """Sequences by handle, and the order of their positions. Callers hold a lock."""

    def open(self, ids: "array[int]") -> int:
        """A handle for a sequence without ids, which will grow in `ids`."""

    def extend(self, handle: int, new: "array[int]") -> None:
        """The sequence's ids have got these new ones at their end."""

    def finish(self, handle: int, ids: "array[int]") -> None:
        """The sequence no longer grows, and its ids lie in this equal array from now on."""

    def remove(self, handle: int, steps: int) -> int:
        """Takes up to `steps` positions out of the order; returns how many. 0: there is none left."""

    def close(self, handle: int) -> None:
        """Forgets a sequence whose positions are all taken out."""

    def read(self, suffix: "array[int]") -> tuple[int, list[tuple["array[int]", int]]]:
        """Length of the longest prefix of `suffix` (latest first) that occurs, with READ occurrences at most.

        An occurrence is a sequence's ids and the index of the id that follows.
        """


@dataclass(slots=True)
class IndexedSequence:
    """A sequence as an index has it: positions 0 .. indexed - 1 are in the order.

    The last id is not, as nothing follows it yet.
    """

    ids: "array[int]"
    pages: "array[int]"
    indexed: int = 0

    def position(self, index: int) -> int:
        return self.pages[index // PAGE] * PAGE + index % PAGE


class PythonIndex:
    """A PositionIndex in Python."""

    def __init__(self) -> None:
        self.sequences: dict[int, IndexedSequence] = {}
        """By handle."""
        self.free: list[int] = []
        """Pages that no sequence has; the last one is used first."""
        # The page's ids, and what to add to a position to get the index among them.
        self._pages: dict[int, tuple[array[int], int]] = {}
        self.order = ContextOrder(_keys(self._pages))
        self._next = 0

    def open(self, ids: "array[int]") -> int:
        """See PositionIndex."""
        self._next += 1
        self.sequences[self._next] = IndexedSequence(ids, array("I"))
        return self._next

    def extend(self, handle: int, new: "array[int]") -> None:
        """See PositionIndex."""
        sequence = self.sequences[handle]
        for index in range(sequence.indexed, len(sequence.ids) - 1):
            if index % PAGE == 0:
                self._add_page(sequence)
            self.order.add(sequence.position(index))
            sequence.indexed += 1

    def finish(self, handle: int, ids: "array[int]") -> None:
        """See PositionIndex."""
        sequence = self.sequences[handle]
        sequence.ids = ids
        for page in sequence.pages:
            self._pages[page] = ids, self._pages[page][1]

    def load(self, handles: Sequence[int]) -> None:
        """Sort all positions of these sequences, which have their ids already, at once."""
        held = [self.sequences[handle] for handle in handles if len(self.sequences[handle].ids) > 1]
        if not held:
            return
        ids, starts, positions = [], [], []
        at = 0
        for sequence in held:
            size = len(sequence.ids)
            while len(sequence.pages) * PAGE < size - 1:
                self._add_page(sequence)
            sequence.indexed = size - 1
            ids.append(np.frombuffer(sequence.ids, np.uint32).astype(np.int64))
            starts.append(np.full(size, at))
            pages = np.frombuffer(sequence.pages, np.uint32).astype(np.int64)
            index = np.arange(size - 1)
            positions.append(np.append(pages[index // PAGE] * PAGE + index % PAGE, -1))
            at += size
        order = context_order(np.concatenate(ids), np.concatenate(starts), CONTEXT)
        ordered = np.concatenate(positions)[order]
        self.order.load(array("I", ordered[ordered >= 0].astype(np.uint32).tobytes()))

    def remove(self, handle: int, steps: int) -> int:
        """See PositionIndex."""
        sequence = self.sequences[handle]
        taken = min(max(steps, 0), sequence.indexed)
        for _ in range(taken):
            self.order.remove(sequence.position(sequence.indexed - 1))
            sequence.indexed -= 1
        return taken

    def close(self, handle: int) -> None:
        """See PositionIndex."""
        sequence = self.sequences.pop(handle)
        for page in sequence.pages:
            del self._pages[page]
        self.free.extend(sequence.pages)

    def read(self, suffix: "array[int]") -> tuple[int, list[tuple["array[int]", int]]]:
        """See PositionIndex."""
        length, span = self.order.find(suffix)
        if not length:
            return 0, []
        found = []
        for position in self.order.sample(span, READ):
            text, shift = self._pages[position // PAGE]
            found.append((text, position + shift + 1))
        return length, found

    def _add_page(self, sequence: IndexedSequence) -> None:
        page = self.free.pop() if self.free else FIRST_PAGE + len(self._pages)
        self._pages[page] = sequence.ids, (len(sequence.pages) - page) * PAGE
        sequence.pages.append(page)


def _keys(pages: "dict[int, tuple[array[int], int]]") -> "Callable[[int], array[int]]":
    """The key function of `ContextOrder`, where lookups and insertions spend most of their time."""

    def key(position: int) -> "array[int]":
        text, shift = pages[position // PAGE]
        index = position + shift
        ids = text[index : index - CONTEXT if index >= CONTEXT else None : -1]
        ids.append(position)
        return ids

    return key
