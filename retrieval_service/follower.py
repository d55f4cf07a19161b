"""One followed session: its committed ids, and the fragments that were drafted for it.

Knows nothing of memories, threads, sockets or clocks.
"""

from array import array
from collections.abc import Sequence

from outrider.source.events import NotFollowed, Request
from retrieval_service.ranking import Shape, rank, reach
from retrieval_service.trie import CountedTrie
from speculative import hashing
from speculative.fragment import Fragment
from speculative.tree import ROOT

WINDOW = 64
"""How many of the last ids memories are asked with: a longer match says no more."""


class Follower:
    """Follows one session.

    Raises:
        NotFollowed: an id outside the target's own vocabulary.
    """

    def __init__(self, request: Request, shape: Shape) -> None:
        self.request = request
        self._shape = shape
        _check_ids(request.ids, request.vocabulary_size)
        self.ids = array("Q", request.ids)
        """Committed ids; to be read only."""
        self._hashes = array("Q", hashing.prefix_hashes(request.ids).tobytes())  # [n]: over the first n ids
        self._sent: dict[int, frozenset[int]] = {}

    @property
    def length(self) -> int:
        """Committed ids."""
        return len(self.ids)

    @property
    def recent(self) -> list[int]:
        """The last ids, at most WINDOW."""
        return self.ids[-WINDOW:].tolist()

    @property
    def wants_drafts(self) -> bool:
        """Whether a drafted id could be of use: the last one stands at limit - 1, and needs no draft."""
        return self.request.node_limit > 0 and self.length < self.request.limit - 1

    def ids_from(self, position: int) -> list[int]:
        """Committed ids from an absolute position on."""
        return self.ids[position:].tolist()

    def hash_at(self, length: int) -> int:
        """The prefix hash of the first `length` committed ids."""
        return self._hashes[length]

    def progress(self, position: int, ids: Sequence[int], prefix_hash: int) -> bool:
        """Takes what the target has committed; returns whether any of it is new.

        Raises:
            NotFollowed: ids before these are missing, one is none of the target's, or the hash tells of
                another prefix. The follower is of no more use.
        """
        known = self.length - position
        if known < 0:
            raise NotFollowed(f"ids {self.length} to {position - 1} are missing; follow the session again")
        fresh = ids[known:]
        _check_ids(fresh, self.request.vocabulary_size)
        for token in fresh:
            self.ids.append(token)
            self._hashes.append(hashing.extend(self._hashes[-1], token))
        end = position + len(ids)
        if self._hashes[end] != prefix_hash:
            raise NotFollowed(
                f"the hash over {end} ids is {self._hashes[end]:#018x} here and {prefix_hash:#018x} there; "
                f"follow the session again"
            )
        return bool(fresh)

    def draft(self, source: int, trie: CountedTrie) -> Fragment | None:
        """What was found under one of the session's names, from 1; None where it has nothing that is new."""
        request = self.request
        limit = min(request.node_limit, self._shape.nodes)
        depth = min(reach(trie.match_length, self._shape), request.limit - 1 - self.length)
        trie = _readable(trie, depth, request.vocabulary_size)
        ranked = rank(trie, request.params, request.seed, self.length, self._shape, limit)
        if ranked is None:
            return None
        hashes: list[int] = []
        for token, parent in zip(ranked.tokens, ranked.parents, strict=True):
            above = self._hashes[-1] if parent == ROOT else hashes[parent]
            hashes.append(hashing.extend(above, token))
        before, self._sent[source] = self._sent.get(source, frozenset()), frozenset(hashes)
        if before.issuperset(hashes):
            self._sent[source] = before
            return None
        return Fragment(
            source=source,
            epoch=request.epoch,
            base=self.length,
            prefix_hash=self._hashes[-1],
            tokens=ranked.tokens,
            parents=ranked.parents,
            survival=ranked.survival,
        )


def _readable(trie: CountedTrie, depth: int, vocabulary_size: int) -> CountedTrie:
    """Without what lies too deep, or is no id of the target's, and what hangs below that."""
    depths: list[int] = []
    kept: dict[int, int] = {}
    for node, (token, parent) in enumerate(zip(trie.tokens, trie.parents, strict=True)):
        depths.append(1 if parent == ROOT else depths[parent] + 1)
        if depths[node] <= depth and token < vocabulary_size and (parent == ROOT or parent in kept):
            kept[node] = len(kept)
    if len(kept) == len(trie):
        return trie
    return CountedTrie(
        tuple(trie.tokens[node] for node in kept),
        tuple(kept.get(trie.parents[node], ROOT) for node in kept),
        tuple(trie.counts[node] for node in kept),
        trie.occurrences,
        trie.match_length,
    )


def _check_ids(ids: Sequence[int], vocabulary_size: int) -> None:
    if ids and max(ids) >= vocabulary_size:
        raise NotFollowed(f"id {max(ids)} is outside the target's vocabulary of {vocabulary_size}")
