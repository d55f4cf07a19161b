"""Many continuations, most of them alike, as a counted trie: equal ones once, only the nodes asked for."""

from collections import Counter
from collections.abc import Iterable
from heapq import heappop, heappush

from retrieval_service.trie import CountedTrie

Continuation = tuple[int, ...]
Waiting = list[tuple[int, int, int, int, list[tuple[Continuation, int]]]]


def best_first(found: Iterable[Continuation], match_length: int, node_limit: int) -> CountedTrie | None:
    """What `retrieval_service.trie.counted` answers for the same continuations, in a tenth of its time.

    Outputs of one template repeat each other: a continuation found fifty times is followed once.
    """
    weighted = list(Counter(found).items())
    waiting: Waiting = []
    _expand(waiting, weighted, 0, -1)
    tokens: list[int] = []
    parents: list[int] = []
    counts: list[int] = []
    while waiting and len(tokens) < node_limit:
        negative, depth, parent, token, members = heappop(waiting)
        tokens.append(token)
        parents.append(parent)
        counts.append(-negative)
        _expand(waiting, members, depth, len(tokens) - 1)
    if not tokens:
        return None
    occurrences = sum(weight for _, weight in weighted)
    return CountedTrie(tuple(tokens), tuple(parents), tuple(counts), occurrences, match_length)


def _expand(waiting: Waiting, members: list[tuple[Continuation, int]], depth: int, index: int) -> None:
    """Put the children of a node at `depth` among what waits; `members` are the continuations through it."""
    if len(members) == 1:
        continuation, weight = members[0]
        if depth < len(continuation):
            heappush(waiting, (-weight, depth + 1, index, continuation[depth], members))
        return
    below: dict[int, list[tuple[Continuation, int]]] = {}
    for member in members:
        if depth < len(member[0]):
            below.setdefault(member[0][depth], []).append(member)
    for token, through in below.items():
        heappush(waiting, (-sum(weight for _, weight in through), depth + 1, index, token, through))
