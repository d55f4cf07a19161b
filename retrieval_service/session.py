"""One followed session: the fragments that were drafted for it, and what of its output is kept already.

Knows nothing of memories, threads, sockets or clocks.
"""

from outrider.source.events import Follow
from outrider.source.followed import FollowedIds, FollowedSession
from retrieval_service.ranking import DraftShape, rank, reach
from retrieval_service.trie import CountedTrie
from speculative import hashing
from speculative.fragment import Fragment
from speculative.tree import ROOT

WINDOW = 64
"""How many of the last ids memories are asked with: a longer match says no more."""


class RetrievalSession(FollowedSession):
    """A followed session of the retrieval worker.

    Args:
        before: the session as it was followed here before, if it is remembered.

    Attributes:
        kept: positions below this are kept in past outputs, or never have to be.
        learns: whether output is kept from `kept` on.
        is_new_text: whether what was kept of `before` is other text, which is over.
    """

    def __init__(
        self, follow: Follow, ids: FollowedIds, shape: DraftShape, before: "RetrievalSession | None"
    ) -> None:
        super().__init__(follow, ids)
        request = follow.request
        self._shape = shape
        self._sent: dict[int, frozenset[int]] = {}  # hashes of the last draft's nodes, by source
        agreed = 0 if before is None else self._agreed(before)
        self.is_new_text = before is not None and agreed == 0
        self.kept = max(agreed, request.prompt_length)
        self.learns: bool = request.learn and (before is None or self.is_new_text or before.learns)

    @property
    def recent(self) -> list[int]:
        """The last ids of the session, at most WINDOW."""
        return self.ids.array[-WINDOW:].tolist()

    def take_unkept(self) -> list[int]:
        """The ids of output not kept yet; empty if the session's output may not be kept."""
        if not self.learns:
            return []
        fresh = self.ids.array[self.kept :].tolist()
        self.kept += len(fresh)
        return fresh

    def draft(self, source: int, trie: CountedTrie) -> Fragment | None:
        """A fragment of what a memory found; None if it has no new node.

        Args:
            source: which of the session's names the memory has, from 1.
        """
        request, length = self.request, len(self.ids)
        limit = min(request.node_limit, self._shape.nodes)
        depth = min(reach(trie.match_length, self._shape), request.limit - 1 - length)
        trie = _draftable(trie, depth, request.vocabulary_size)
        ranked = rank(trie, request.params, request.seed, length, self._shape, limit)
        if ranked is None:
            return None
        hashes: list[int] = []
        for token, parent in zip(ranked.tokens, ranked.parents, strict=True):
            above = self.ids.prefix_hash if parent == ROOT else hashes[parent]
            hashes.append(hashing.extend(above, token))
        before, self._sent[source] = self._sent.get(source, frozenset()), frozenset(hashes)
        if before.issuperset(hashes):
            self._sent[source] = before
            return None
        return self.fragment(ranked.tokens, ranked.parents, ranked.survival, source)

    def _agreed(self, before: "RetrievalSession") -> int:
        """Number of ids of `before` that are kept and the same in this session; 0 for another text."""
        same_prompt = before.request.prompt_length == self.request.prompt_length
        if not same_prompt or before.kept > len(self.ids):
            return 0
        return before.kept if before.ids.hash_at(before.kept) == self.ids.hash_at(before.kept) else 0


def _draftable(trie: CountedTrie, depth: int, vocabulary_size: int) -> CountedTrie:
    """The trie without nodes that are too deep or outside the vocabulary, and without nodes below them."""
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
