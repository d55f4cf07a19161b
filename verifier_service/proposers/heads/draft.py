"""Drafts that a head's probabilities grow level by level, as EAGLE-2's dynamic tree does (arXiv 2406.16858).

Each level expands the likeliest nodes of the level above. A node is likely as far as its whole path is, so a
node that is not among the best `node_limit` of the tree can never become one of them, nor can what is below.
Children are ranked as the drafter ranks them (`speculative.ranking`): by the request's parameters and the
noise of the session at their position.

Pure: knows sessions and logits, not the modules that compute these.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from speculative.digest import HostDigest
from speculative.draft import MAX_DRAFT_NODES
from speculative.ranking import ChildRanker
from speculative.tree import ROOT
from verifier_service.proposers.batched import DraftLevel, ProposedSession

Logits = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class HeadGrowth:
    """Bounds and estimates that decide which nodes a head's draft gets."""

    depth: int
    """Most levels of a draft."""
    width: int = 8
    """Most nodes of one level that a draft expands."""
    children: int = 5
    """Most children of one node."""
    scale: float = 1.0
    """Spread of the target's logits around the head's, in logits; see `speculative.ranking`."""
    least: float = 0.02
    """Survival below which a node is not drafted."""


class HeadSession:
    """A session that a head drafts for: its tokens, and the ranking that its request and noise give.

    Args:
        session: the session as the proposers' host describes it.
        growth: bounds of the session's drafts.
        vocabulary_size: number of logits.
        max_length: position from which on nothing is drafted.
        eos_ids: tokens behind which nothing is drafted.
    """

    def __init__(
        self,
        session: ProposedSession,
        growth: HeadGrowth,
        vocabulary_size: int,
        max_length: int,
        eos_ids: frozenset[int],
    ) -> None:
        self.session = session
        self.growth = growth
        self.eos_ids = eos_ids
        self.end = min(session.limit - 2, max_length)
        """Position from which on nodes get no children."""
        self._vocabulary_size = vocabulary_size
        self._ranker: ChildRanker | None = None
        self._ranked = 0
        """Number of the session's leading tokens that the ranking includes."""

    def ranker(self) -> ChildRanker:
        """The ranking of tokens that may follow the committed tokens."""
        session = self.session
        if self._ranker is None:
            self._ranker = ChildRanker(
                session.params,
                session.seed,
                session.ids,
                session.prompt_length,
                width=self._vocabulary_size,
                bound=self._vocabulary_size,
                children=self.growth.children,
                scale=self.growth.scale,
                noise=session.noise,
            )
            self._ranked = len(session.ids)
        for token in session.ids[self._ranked :]:
            self._ranker.push(token)
        self._ranked = len(session.ids)
        self._ranker.forget_before(self._ranked)
        return self._ranker


class HeadDraft:
    """The draft of one session while it grows.

    Args:
        session: whose draft this is.
        node_limit: most nodes of the draft.
    """

    def __init__(self, session: HeadSession, node_limit: int) -> None:
        self._session = session
        self._ranker = session.ranker()
        self._limit = min(node_limit, MAX_DRAFT_NODES)
        self._length = len(session.session.ids)
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._survival: list[float] = []
        self._depth = 0
        self.frontier: list[int] = [ROOT] if self._length - 1 < session.end and node_limit else []
        """Nodes to expand next: those of the last level that are likely enough, likeliest first."""

    @property
    def frontier_tokens(self) -> list[int]:
        """Tokens of the nodes to expand next."""
        last = self._session.session.ids[-1]
        return [last if node == ROOT else self._tokens[node] for node in self.frontier]

    @property
    def frontier_paths(self) -> list[tuple[int, ...]]:
        """For each node to expand next, the last committed token and the drafted tokens up to the node."""
        last = self._session.session.ids[-1]
        return [(last, *self._path(node)) for node in self.frontier]

    @property
    def position(self) -> int:
        """Position of the tokens of the nodes to expand next."""
        return self._length - 1 + self._depth

    def parent(self, node: int) -> int:
        """The node that a node continues; ROOT: the last committed token."""
        return self._parents[node]

    def grow(self, logits: Sequence[Logits]) -> DraftLevel | None:
        """Expands the frontier; None if no node is likely enough.

        Args:
            logits: a row for each node of the frontier, or a single one for all; float32 ``[V]``.

        Raises:
            EmptySupport: NaN among the logits.
        """
        alike = len(logits) == 1 and not self._ranker.reads_path
        children = [self._children(row, node) for row, node in zip(logits, self.frontier, strict=False)]
        if len(logits) == 1 and len(self.frontier) > 1:
            children = [children[0] if alike else self._children(logits[0], node) for node in self.frontier]
        above = [1.0 if node == ROOT else self._survival[node] for node in self.frontier]
        found = [
            (survival * min(1.0, share), node, token)
            for node, survival, shares in zip(self.frontier, above, children, strict=True)
            for token, share in shares
            if survival * share >= self._session.growth.least
        ]
        found.sort(key=lambda child: (-child[0], child[1], child[2]))
        return self._add(found)

    def _children(self, logits: Logits, node: int) -> list[tuple[int, float]]:
        path = self._path(node) if self._ranker.reads_path else ()
        return self._ranker.children(HostDigest(logits), self.position + 1, path)

    def _add(self, found: list[tuple[float, int, int]]) -> DraftLevel | None:
        """Adds the children that are among the best nodes of the whole draft."""
        room = MAX_DRAFT_NODES - len(self._tokens)
        best = sorted([*self._survival, *(survival for survival, *_ in found)], reverse=True)
        bound = best[self._limit - 1] if len(best) > self._limit else 0.0
        found = [child for child in found[: min(room, self._limit)] if child[0] >= bound]
        first = len(self._tokens)
        self._depth += 1
        self.frontier = []
        if not found:
            return None
        survivals, parents, tokens = zip(*found, strict=True)
        self._tokens += tokens
        self._parents += parents
        self._survival += survivals
        growth = self._session.growth
        if self._depth < growth.depth and self.position < self._session.end:
            self.frontier = [
                first + at for at, token in enumerate(tokens) if token not in self._session.eos_ids
            ][: growth.width]
        return DraftLevel(tokens, parents, survivals)

    def _path(self, node: int) -> tuple[int, ...]:
        """Drafted tokens on the path from the last committed token to a node."""
        tokens: list[int] = []
        while node != ROOT:
            tokens.append(self._tokens[node])
            node = self._parents[node]
        return tuple(reversed(tokens))
