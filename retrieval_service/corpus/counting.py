"""`retrieval_service.trie.counted`, visiting only the nodes that it gives.

Equal answers; but sixty-four continuations of sixteen ids are a thousand nodes, of which a draft has room for
a few dozen. Making them all takes a millisecond, and at times ten for the garbage collector.
"""

from collections.abc import Iterable
from heapq import heappop, heappush

from retrieval_service.trie import CountedTrie

Rows = list[tuple[int, ...]]
Waiting = list[tuple[int, int, int, int, int]]


def counted(
    continuations: Iterable[tuple[int, ...]], match_length: int, node_limit: int
) -> CountedTrie | None:
    """The trie of what followed each occurrence, its `node_limit` most counted nodes; None without any.

    Ties as there: the node nearer the root first, then the smaller id.
    """
    # In order, those that begin alike stand together: a node is a run of rows.
    rows = sorted(continuations)
    waiting: Waiting = []
    _push_children(waiting, rows, 0, len(rows), 0, -1)
    if not waiting:
        return None
    tokens: list[int] = []
    parents: list[int] = []
    counts: list[int] = []
    while waiting and len(tokens) < node_limit:
        count, depth, parent, token, low = heappop(waiting)
        tokens.append(token)
        parents.append(parent)
        counts.append(-count)
        _push_children(waiting, rows, low, low - count, depth, len(tokens) - 1)
    return CountedTrie(tuple(tokens), tuple(parents), tuple(counts), len(rows), match_length)


def _push_children(waiting: Waiting, rows: Rows, low: int, high: int, depth: int, index: int) -> None:
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
