"""One followed session: its draft tree, and what the model should compute for it next.

A pass is either a run of committed ids that the cache does not hold yet (the prompt in chunks; after a
mismatch the target's own token) or the likeliest leaves of the tree, never both: below an unread id there is
no tree yet. `plan` says which rows, `grow` takes their logits; between the two nothing else happens, so that
a commit can interrupt growth at any token but never a pass. A node that was expanded keeps its keys and
values when it is committed; only ids that were drafted by nobody, or never expanded, have to be read.

Knows nothing of models, threads, sockets or clocks; the cache is any object that keeps that bookkeeping.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from drafter_service.draft_tree import DraftNode, DraftTree, Growth, Rerooted, pack
from outrider.source.events import Follow
from outrider.source.followed import FollowedIds, FollowedSession
from speculative.digest import HostDigest
from speculative.fragment import Fragment
from speculative.ranking import ChildRanker


class Cache(Protocol):
    """The cached keys and values of one session, as `outrider.lm` keeps them."""

    length: int

    def commit(self, path: Sequence[int]) -> Sequence[int]:
        """Commits a chain of nodes; maps old node indices to new ones, -1 for nodes that are gone."""

    def drop_nodes(self) -> None:
        """Forgets every node."""


@dataclass(frozen=True, slots=True)
class Abilities:
    """The sizes of the drafter's model.

    Attributes:
        width: width of its logits; ids at or past it cannot be read either.
        bound: ids from here on are no tokens of its tokenizer and are never drafted.
        max_length: longest session that it can read, in ids.
        eos_ids: tokens after which nothing is worth drafting.
    """

    width: int
    bound: int
    max_length: int
    eos_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class PassRows:
    """Rows of one session in one pass: tokens, their parent rows, and the rows whose logits are wanted."""

    tokens: list[int]
    parents: list[int]
    want: list[int]


class DraftingSession(FollowedSession):
    """A followed session with its draft tree. `cache.length` of its ids may be in the cache already."""

    def __init__(
        self, follow: Follow, ids: FollowedIds, cache: Cache, abilities: Abilities, growth: Growth
    ) -> None:
        super().__init__(follow, ids)
        self.cache = cache
        request = follow.request
        width = min(request.vocabulary_size, abilities.width)
        self._ranker = ChildRanker(
            request.params,
            request.seed,
            request.ids,
            request.prompt_length,
            width=width,
            bound=min(width, abilities.bound),
            children=growth.children,
            scale=growth.scale,
        )
        self._width = width
        self._unread = list(request.ids[cache.length :])
        self._rows = 0  # nodes in the cache
        self._asked: list[DraftNode] = []
        self._tree = DraftTree(
            request.ids[-1],
            len(ids),
            ids.prefix_hash,
            growth=growth,
            node_limit=request.node_limit,
            end=min(request.limit - 2, abilities.max_length),
            eos_ids=abilities.eos_ids,
        )

    @property
    def unread(self) -> int:
        """Number of committed ids to read before anything can be drafted; from any thread."""
        return 0 if self._is_over else len(self._unread)

    @property
    def _is_over(self) -> bool:
        """Whether drafting is over: the tree's root is at the limit, or no draft is wanted."""
        return self._tree.root.position >= self._tree.end or self.request.node_limit == 0

    @property
    def in_flight(self) -> int:
        """Number of sent nodes that can still be accepted."""
        return self._tree.in_flight

    def require(self, survival: float) -> None:
        """Sets the least survival of nodes to send and to expand; the floor of `Growth` holds beside it."""
        self._tree.least = max(survival, self._tree.growth.floor)

    def commit(self, ids: Sequence[int]) -> Rerooted:
        """Moves the tree along newly committed ids, which are in `self.ids` already."""
        if not ids:
            return Rerooted((), self.in_flight, 0)
        rerooted = self._tree.commit(ids)
        self._asked = []
        for token in ids:
            self._ranker.push(token)
        self._ranker.forget_before(len(self.ids))
        rows = [node.row for node in rerooted.path if node.row is not None]
        if rows:
            self._renumber(self.cache.commit(rows))
        if len(rows) < len(ids):
            self._unread.extend(ids[len(rows) :])
            if self._rows:
                self.cache.drop_nodes()
                self._rows = 0
        return rerooted

    def plan(self, nodes: int, chunk: int) -> PassRows | None:
        """The rows that this session wants in the next pass; None if nothing is worth computing.

        Args:
            nodes: most leaves to expand.
            chunk: most unread ids to read.
        """
        if self._is_over:
            return None
        if self._unread:
            tokens = self._unread[:chunk]
            last = len(tokens) - 1
            want = [last] if len(tokens) == len(self._unread) else []
            return PassRows(tokens, list(range(-1, last)), want)
        if not self._asked:  # else a pass that failed is tried again
            self._asked = self._tree.frontier(nodes)
        if not self._asked:
            return None
        return PassRows(
            [node.token for node in self._asked],
            [self._parent_row(node) for node in self._asked],
            list(range(len(self._asked))),
        )

    def grow(self, rows: PassRows, logits: NDArray[np.float32]) -> None:
        """Takes the logits of the pass that `plan` asked for.

        Args:
            logits: float32[len(rows.want), own vocabulary].

        Raises:
            EmptySupport: the logits rank nothing.
        """
        if self._unread:
            self.cache.commit(range(len(rows.tokens)))
            del self._unread[: len(rows.tokens)]
            if rows.want:
                self._expand(self._tree.root, logits[0])
            return
        for index, node in enumerate(self._asked):
            node.row = self._rows + index
            self._expand(node, logits[index])
        self._rows += len(self._asked)
        self._asked = []

    def take_fragments(self) -> list[Fragment]:
        """New nodes to send, as fragments; each node once."""
        return pack(self._tree.take_unsent(), self.request.epoch)

    def _renumber(self, mapping: Sequence[int]) -> None:
        self._rows = sum(new >= 0 for new in mapping)
        for node in self._tree.nodes():
            if node.row is not None:
                node.row = mapping[node.row]

    def _expand(self, node: DraftNode, logits: NDArray[np.float32]) -> None:
        path = self._path(node) if self._ranker.reads_path else ()
        digest = HostDigest(logits[: self._width])
        self._tree.expand(node, self._ranker.children(digest, node.position + 1, path))

    def _parent_row(self, node: DraftNode) -> int:
        parent = node.parent
        if parent is self._tree.root:
            return -1
        assert parent is not None
        assert parent.row is not None, "a parent is expanded before its child"
        return parent.row

    def _path(self, node: DraftNode) -> tuple[int, ...]:
        """Drafted tokens from below the root to this node."""
        tokens: list[int] = []
        while node.parent is not None:
            tokens.append(node.token)
            node = node.parent
        return tuple(reversed(tokens))
