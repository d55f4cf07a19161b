"""Drafts that a head's probabilities grow level by level, as EAGLE-2's dynamic tree does (arXiv 2406.16858).

Each level expands the likeliest nodes of the level above. A node is likely as far as its whole path is, so a
node that is not among the best `node_limit` of the tree can never become one of them, nor can what is below.
Children are ranked as the drafter ranks them (`speculative.ranking`): by the request's parameters and the
noise of the session at their position. Where nothing changes the logits and the vocabulary is small, all
nodes of a level are ranked at once (`speculative.level_ranking`).

Pure: knows sessions and logits, not the modules that compute these.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.lm.compiled.head_kernel import Ranking
from speculative.digest import HostDigest
from speculative.draft import MAX_DRAFT_NODES
from speculative.level_ranking import WIDEST, Children, level_children
from speculative.noise import NoiseRows
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
        params = session.params
        self.by_level = params.plain_logits and not params.has_cuts and vocabulary_size <= WIDEST
        """Whether all nodes of a level are ranked at once."""
        self._noise = NoiseRows(session.seed, vocabulary_size) if session.noise is None else session.noise
        self._ranker: ChildRanker | None = None
        self._ranked = 0
        """Number of the session's leading tokens that the ranking includes."""

    def level(self, logits: Logits, position: int, least: Sequence[float]) -> list[Children]:
        """Children at a position behind each of some nodes; see `level_children`."""
        params, growth = self.session.params, self.growth
        noise = None if params.greedy else self._noise.at(position)
        return level_children(logits, noise, params.temperature, growth.scale, least, growth.children)

    def ranking(self, position: int) -> Ranking | None:
        """What a compiled head ranks children at a position by; None: it gives logits."""
        params, growth = self.session.params, self.growth
        if not self.by_level:
            return None
        leads = None if params.greedy else self._noise.at(position).leads
        return Ranking(leads, params.temperature, growth.scale, growth.children)

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
                noise=self._noise,
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
        self._ranker = None if session.by_level else session.ranker()
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

    def grow(self, logits: Logits) -> DraftLevel | None:
        """Expands the frontier; None if no node is likely enough.

        Args:
            logits: a row for each node of the frontier, or a single one for all; float32 ``[rows, V]``.

        Raises:
            EmptySupport: NaN among the logits.
        """
        return self.add(self._one_by_one(logits) if self._ranker else self._at_once(logits))

    def add(self, children: Sequence[Children]) -> DraftLevel | None:
        """Expands the frontier by the children of each of its nodes; None if no node is likely enough."""
        found = [
            (survival * min(1.0, share), node, token)
            for node, survival, shares in zip(self.frontier, self._above, children, strict=True)
            for token, share in shares
            if survival * share >= self._session.growth.least
        ]
        found.sort(key=lambda child: (-child[0], child[1], child[2]))
        return self._cut(found)

    @property
    def least_shares(self) -> list[float]:
        """For each node of the frontier, the probability below which a token is no child."""
        return [self._session.growth.least / survival for survival in self._above]

    @property
    def _above(self) -> list[float]:
        """Survival of each node of the frontier."""
        return [1.0 if node == ROOT else self._survival[node] for node in self.frontier]

    def _at_once(self, logits: Logits) -> list[Children]:
        """Children of all nodes of the frontier."""
        least = self.least_shares
        if len(logits) == len(least):
            return self._session.level(logits, self.position + 1, least)
        return self._session.level(logits, self.position + 1, [min(least)]) * len(least)

    def _one_by_one(self, logits: Logits) -> list[Children]:
        assert self._ranker is not None
        if len(logits) == len(self.frontier) or self._ranker.reads_path:
            rows = logits if len(logits) == len(self.frontier) else [logits[0]] * len(self.frontier)
            return [self._children(self._ranker, *each) for each in zip(rows, self.frontier, strict=True)]
        return [self._children(self._ranker, logits[0], ROOT)] * len(self.frontier)

    def _children(self, ranker: ChildRanker, logits: Logits, node: int) -> Children:
        path = self._path(node) if ranker.reads_path else ()
        return ranker.children(HostDigest(logits), self.position + 1, path)

    def _cut(self, found: list[tuple[float, int, int]]) -> DraftLevel | None:
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
