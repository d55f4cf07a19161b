"""The interface of memories, and the result of a lookup: continuations as a trie with counts.

Knows nothing of where continuations were found, of files, threads or the wire.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Protocol


@dataclass(frozen=True, slots=True)
class CountedTrie:
    """Continuations of a session's longest known suffix, found in a memory: a trie with counts.

    Attributes:
        tokens: one id per node; a parent precedes its child, no two siblings carry the same id.
        parents: the parent's index per node; -1 where the node follows the suffix itself.
        counts: occurrences of the node's path below the suffix, at least 1; never more than the parent's.
        occurrences: of the suffix itself that were read; at least the sum of the counts of the first level.
        match_length: ids of the suffix that was found; at least 1.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    counts: tuple[int, ...]
    occurrences: int
    match_length: int

    def __len__(self) -> int:
        return len(self.tokens)


class Memory(Protocol):
    """Text of one scope to look up in: a corpus, a tenant's past outputs, or a session's documents."""

    def lookup(self, ids: Sequence[int], *, node_limit: int, depth: int) -> CountedTrie | None:
        """Finds what followed the longest suffix of `ids` in this text, up to `depth` ids; None if not found.

        Safe beside writers of other threads; well below a millisecond; never raises for any ids.
        """
        ...


_Rows = list[tuple[int, ...]]
_Waiting = list[tuple[int, int, int, int, int]]


def counted(continuations: Iterable[Sequence[int]], match_length: int, node_limit: int) -> CountedTrie | None:
    """The trie of what followed each occurrence, its `node_limit` most counted nodes; None without any.

    Ties go to the node nearer the root, then to the smaller id: the answer depends on the multiset of
    continuations alone, not on their order. Only the nodes that it gives are made: sixty-four continuations
    of sixteen ids have a thousand, of which a draft has room for a few dozen.
    """
    # In order, those that begin alike stand together: a node is a run of rows.
    rows = sorted(map(tuple, continuations))
    # Counts never rise along a path, so that the most counted nodes are always connected.
    waiting: _Waiting = []
    _push_children(waiting, rows, 0, len(rows), 0, -1)
    tokens: list[int] = []
    parents: list[int] = []
    counts: list[int] = []
    while waiting and len(tokens) < node_limit:
        count, depth, parent, token, low = heappop(waiting)
        tokens.append(token)
        parents.append(parent)
        counts.append(-count)
        _push_children(waiting, rows, low, low - count, depth, len(tokens) - 1)
    if not tokens:
        return None
    return CountedTrie(tuple(tokens), tuple(parents), tuple(counts), len(rows), match_length)


def _push_children(waiting: _Waiting, rows: _Rows, low: int, high: int, depth: int, index: int) -> None:
    while low < high and len(rows[low]) == depth:
        low += 1  # ends here; shorter rows come first
    while low < high:
        token = rows[low][depth]
        end = low + 1
        if rows[high - 1][depth] == token:
            end = high
        else:
            while rows[end][depth] == token:
                end += 1
        heappush(waiting, (low - end, depth + 1, index, token, low))
        low = end
