"""Continuations found in some memory, as a trie with counts: what every memory answers a lookup with.

Knows nothing of where they were found, of files, threads or the wire.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush


@dataclass(frozen=True, slots=True)
class CountedTrie:
    """What followed the longest suffix of a session's ids that a memory holds.

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


class _Node:
    __slots__ = ("children", "count")

    def __init__(self) -> None:
        self.count = 0
        self.children: dict[int, _Node] = {}


def counted(continuations: Iterable[Sequence[int]], match_length: int, node_limit: int) -> CountedTrie | None:
    """The trie of what followed each occurrence, its `node_limit` most counted nodes; None without any.

    Ties go to the node nearer the root, then to the smaller id: the answer depends on the multiset of
    continuations alone, not on their order.
    """
    root = _Node()
    for continuation in continuations:
        root.count += 1
        node = root
        for token in continuation:
            node = node.children.setdefault(token, _Node())
            node.count += 1
    if not root.children:
        return None
    tokens: list[int] = []
    parents: list[int] = []
    counts: list[int] = []
    # Counts never rise along a path, so that the most counted nodes are always connected.
    waiting: list[tuple[int, int, int, int, _Node]] = []
    _push(waiting, root, -1, 1)
    while waiting and len(tokens) < node_limit:
        count, depth, parent, token, node = heappop(waiting)
        tokens.append(token)
        parents.append(parent)
        counts.append(-count)
        _push(waiting, node, len(tokens) - 1, depth + 1)
    return CountedTrie(tuple(tokens), tuple(parents), tuple(counts), root.count, match_length)


def _push(waiting: list[tuple[int, int, int, int, _Node]], node: _Node, index: int, depth: int) -> None:
    for token, child in node.children.items():
        heappush(waiting, (-child.count, depth, index, token, child))
