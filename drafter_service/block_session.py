"""One followed session whose drafter writes a block of tokens in one pass (SpecDec, arXiv 2203.16487).

Behind the last token the pass computes rows of mask ids, each of which stands for an unknown token. The
first row gives the distribution of the next token, the row of the first mask gives that of the token after
next, and so on: a distribution for each place, whatever stands in the places between. The tree takes its
nodes from the products of these distributions, best first. While the verifier computes, further passes
write blocks below the likeliest leaf, given the tokens that lead to the leaf.

The cache holds committed tokens alone, so each round costs one pass over what was committed, and the masks.
Knows nothing of models, threads, sockets or clocks.
"""

import dataclasses
import heapq
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from drafter_service.draft_tree import DraftNode, Growth, Rerooted
from drafter_service.session import Abilities, Cache, DraftingSession, PassRows
from outrider.source.events import Follow
from outrider.source.followed import FollowedIds
from speculative.digest import HostDigest
from speculative.level_ranking import Children
from speculative.policies.policy import DraftPolicy
from speculative.survival_curve import SurvivalCurve


class _BlockPlace(NamedTuple):
    """Where the children of a node come from."""

    place: int
    """Place in the block, from 0."""
    children: Children
    """The model's own estimates."""


class BlockSession(DraftingSession):
    """A followed session whose trees grow by blocks of up to `1 + len(abilities.masks)` levels.

    Args:
        curves: corrects the model's estimates, one curve for each place of a block: a distribution that does
            not know the tokens before it is wrong more often the further away it is.
    """

    def __init__(
        self,
        follow: Follow,
        ids: FollowedIds,
        cache: Cache,
        abilities: Abilities,
        growth: Growth,
        policy: DraftPolicy | None,
        curves: Sequence[SurvivalCurve],
    ) -> None:
        super().__init__(follow, ids, cache, abilities, dataclasses.replace(growth, cascade=0), policy)
        self._curves = curves
        self._places: dict[int, _BlockPlace] = {}
        """Places of the nodes that have children, by prefix hash."""

    def restart(self, cache: Cache) -> None:
        """Goes on with an empty cache, of another drafter; see `DraftingSession.restart`."""
        super().restart(cache)
        self._places.clear()

    def commit(self, ids: Sequence[int], now_ms: float = 0.0) -> Rerooted:
        """Moves the tree along newly committed ids, and teaches the curves; see `DraftingSession.commit`."""
        self._teach(ids)
        rerooted = super().commit(ids, now_ms)
        left = [self._tree.root.prefix_hash, *(node.prefix_hash for node in self._tree.nodes())]
        self._places = {key: self._places[key] for key in left if key in self._places}
        return rerooted

    def plan(self, nodes: int, chunk: int) -> PassRows | None:
        """Unread ids with masks behind the last, or the path to the likeliest leaf with masks behind it.

        A pass writes one block, whatever `nodes` says; see `DraftingSession.plan`.
        """
        if self.is_over:
            return None
        if self._unread:
            tokens = self._unread[:chunk]
            if len(tokens) < len(self._unread):
                return PassRows(tokens, list(range(-1, len(tokens) - 1)), [])
            return self._block_below(self._tree.root, tokens)
        if not self._asked:
            self._asked = self._tree.frontier(1)
        if not self._asked:
            self.is_sated = True
            return None
        leaf = self._asked[0]
        return self._block_below(leaf, self._path(leaf))

    def grow(self, rows: PassRows, logits: NDArray[np.float32]) -> None:
        """Takes the logits of the pass that `plan` asked for; see `DraftingSession.grow`."""
        if not self._unread:
            self.cache.drop_nodes()
            leaf, self._asked = self._asked[0], []
            self._write(leaf, logits)
            return
        read = len(rows.tokens) - max(0, len(rows.want) - 1)
        self.cache.commit(range(read))
        self.cache.drop_nodes()
        del self._unread[:read]
        if rows.want:
            self._write(self._tree.root, logits)

    def _block_below(self, leaf: DraftNode, tokens: Sequence[int]) -> PassRows:
        """Rows of the tokens up to a leaf, and of as many masks as there are levels below it."""
        levels = min(self._tree.room_below(leaf), self._abilities.max_length - 1 - leaf.position)
        rows = [*tokens, *self._abilities.masks[: max(0, levels)]]
        return PassRows(rows, list(range(-1, len(rows) - 1)), list(range(len(tokens) - 1, len(rows))))

    def _write(self, leaf: DraftNode, logits: NDArray[np.float32]) -> None:
        """Expands a leaf and the likeliest nodes below it by the distributions of a block's places."""
        used = logits[:, : self._width]
        if leaf is self._tree.root:
            # A node of the block before may have become the root. Its children did not know its token.
            self._tree.clear()
        digests = [HostDigest(row) for row in used]
        entropies = [self._entropy(row) for row in used]
        serial = count()
        waiting = [(-leaf.survival, next(serial), leaf, 0)]
        left = max(1, self._tree.room)
        while waiting and left:
            _, _, node, place = heapq.heappop(waiting)
            found = self._ranked(node, digests[place])
            self._places[node.prefix_hash] = _BlockPlace(place, found)
            curve = self._curves[place]
            self._tree.expand(node, [(token, curve.worth(own)) for token, own in found], entropies[place])
            left -= 1
            if place + 1 < len(digests):
                for child in (node.children or {}).values():
                    if self._tree.can_expand(child):
                        heapq.heappush(waiting, (-child.survival, next(serial), child, place + 1))

    def _teach(self, ids: Sequence[int]) -> None:
        """Shows each place's curve which of the tokens drafted for the place came true."""
        node: DraftNode | None = self._tree.root
        for token in ids:
            known = None if node is None else self._places.get(node.prefix_hash)
            if node is None or known is None:
                return
            for drafted, own in known.children:
                self._curves[known.place].saw(own, drafted == token)
            node = node.children.get(token) if node.children else None


def drafting_session(
    follow: Follow,
    ids: FollowedIds,
    cache: Cache,
    abilities: Abilities,
    growth: Growth,
    policy: DraftPolicy | None = None,
    curves: Sequence[SurvivalCurve] = (),
) -> DraftingSession:
    """The session of a drafter with these abilities: one that writes blocks where the model has masks.

    Args:
        curves: corrects the model's estimates, one curve for each place of a block; empty: estimates of a
            model without masks stand, and places of a block learn from this session alone.
    """
    if not abilities.masks:
        return DraftingSession(follow, ids, cache, abilities, growth, policy, curves[0] if curves else None)
    own = curves or [SurvivalCurve() for _ in range(1 + len(abilities.masks))]
    return BlockSession(follow, ids, cache, abilities, growth, policy, own)
