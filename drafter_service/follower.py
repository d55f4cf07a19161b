"""One followed session: its committed ids, its draft tree, and what the model should compute for it next.

A pass is either a run of committed ids that the cache does not hold yet (the prompt in chunks; after a
mismatch the target's own token) or the likeliest leaves of the tree, never both: below a pending id there is
no tree yet. `plan` says which rows, `grow` takes their logits; between the two nothing else happens, so that
a commit can interrupt growth at any token but never a pass. A node that was expanded keeps its keys and
values when it is committed; only ids that were drafted by nobody, or never expanded, become pending.

Knows nothing of models, threads, sockets or clocks; the cache is whatever keeps that bookkeeping.
"""

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from drafter_service.draft_tree import DraftTree, Growth, Node, Rerooted
from drafter_service.fragments import pack
from drafter_service.ranking import Ranking
from outrider.source.events import NotFollowed, Request
from speculative import hashing
from speculative.fragment import Fragment


class Cache(Protocol):
    """One session's keys and values, as `outrider.lm` keeps them."""

    length: int

    def commit(self, path: Sequence[int]) -> Sequence[int]:
        """Makes a chain of nodes committed; maps old node indices to new ones, -1 for those that are gone."""

    def drop_nodes(self) -> None:
        """Forgets every node."""


@dataclass(frozen=True, slots=True)
class Abilities:
    """What the drafter's model can do.

    Attributes:
        width: of its logits; ids at or past it cannot be read either.
        bound: ids from here on are no tokens of its tokenizer; never drafted.
        max_length: most ids that it can read.
        eos_ids: tokens after which nothing is worth drafting.
    """

    width: int
    bound: int
    max_length: int
    eos_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one session in one pass, in the words of `outrider.lm`."""

    tokens: list[int]
    parents: list[int]
    want: list[int]


class Follower:
    """Follows one session. `cache.length` ids of the request may be in the cache already.

    Raises:
        NotFollowed: the ids cannot be read by this model.
    """

    def __init__(self, request: Request, cache: Cache, abilities: Abilities, growth: Growth) -> None:
        check_readable(request.ids, 0, request.vocabulary_size, abilities)
        self.request = request
        self.cache = cache
        self._abilities = abilities
        width = min(request.vocabulary_size, abilities.width)
        self._ranking = Ranking(
            request.params,
            request.seed,
            request.ids,
            request.prompt_length,
            width=width,
            bound=min(width, abilities.bound),
            growth=growth,
        )
        self._hashes = array("Q", hashing.prefix_hashes(request.ids).tobytes())  # [n]: over the first n ids
        self._pending = list(request.ids[cache.length :])
        self._rows = 0  # nodes in the cache
        self._asked: list[Node] = []
        self._tree = DraftTree(
            request.ids[-1],
            self.length,
            self._hashes[-1],
            growth=growth,
            node_limit=request.node_limit,
            end=min(request.limit - 2, abilities.max_length),
            eos_ids=abilities.eos_ids,
        )

    @property
    def length(self) -> int:
        """Committed ids."""
        return len(self._hashes) - 1

    def agreed_length(self, ids: Sequence[int]) -> int:
        """How many of these ids, from the first on, are committed here too."""
        theirs = hashing.prefix_hashes(ids)
        most = min(len(ids), self.length)
        return bisect_left(range(1, most + 1), True, key=lambda n: self._hashes[n] != theirs[n])

    @property
    def unread(self) -> int:
        """Committed ids that are still to be read before anything can be drafted; from any thread."""
        return 0 if self._is_over else len(self._pending)

    @property
    def _is_over(self) -> bool:
        """Whether nothing can be drafted any more."""
        return self._tree.root.position >= self._tree.end or self.request.node_limit == 0

    @property
    def in_flight(self) -> int:
        """Nodes sent and still possible."""
        return self._tree.in_flight

    def needs(self, survival: float) -> None:
        """Nodes need so much now to be worth drafting, if not more."""
        self._tree.least = max(survival, self._tree.growth.floor)

    def progress(self, position: int, ids: Sequence[int], prefix_hash: int) -> Rerooted:
        """Takes what the target has committed; ids that are known already are skipped.

        Raises:
            NotFollowed: ids before these are missing, the hash tells of another prefix, or the model cannot
                read them. The follower is of no more use.
        """
        known = self.length - position
        if known < 0:
            raise NotFollowed(f"ids {self.length} to {position - 1} are missing; follow the session again")
        fresh = ids[known:]
        check_readable(fresh, self.length, self.request.vocabulary_size, self._abilities)
        hashes = self._hashes
        for token in fresh:
            hashes.append(hashing.extend(hashes[-1], token))
        end = position + len(ids)
        if hashes[end] != prefix_hash:
            raise NotFollowed(
                f"the hash over {end} ids is {hashes[end]:#018x} here and {prefix_hash:#018x} there; "
                f"follow the session again"
            )
        return self._commit(fresh) if fresh else Rerooted((), self.in_flight, 0)

    def plan(self, nodes: int, chunk: int) -> Rows | None:
        """The rows that this session wants in the next pass; None where nothing is worth computing.

        Args:
            nodes: most leaves to expand.
            chunk: most pending ids to read.
        """
        if self._is_over:
            return None
        if self._pending:
            tokens = self._pending[:chunk]
            last = len(tokens) - 1
            want = [last] if len(tokens) == len(self._pending) else []
            return Rows(tokens, list(range(-1, last)), want)
        if not self._asked:  # else a pass that failed is tried again
            self._asked = self._tree.frontier(nodes)
        if not self._asked:
            return None
        return Rows(
            [node.token for node in self._asked],
            [self._parent_row(node) for node in self._asked],
            list(range(len(self._asked))),
        )

    def grow(self, rows: Rows, logits: NDArray[np.float32]) -> None:
        """Takes the pass that `plan` asked for.

        Args:
            logits: float32[len(rows.want), own vocabulary].

        Raises:
            EmptySupport: the logits rank nothing.
        """
        if self._pending:
            self.cache.commit(range(len(rows.tokens)))
            del self._pending[: len(rows.tokens)]
            if rows.want:
                self._expand(self._tree.root, logits[0])
            return
        for index, node in enumerate(self._asked):
            node.row = self._rows + index
            self._expand(node, logits[index])
        self._rows += len(self._asked)
        self._asked = []

    def take_fragments(self) -> list[Fragment]:
        """New nodes to send, each once."""
        return pack(self._tree.take_unsent(), self.request.epoch)

    def _commit(self, ids: Sequence[int]) -> Rerooted:
        rerooted = self._tree.commit(ids)
        self._asked = []
        for token in ids:
            self._ranking.push(token)
        self._ranking.forget_before(self.length)
        rows = [node.row for node in rerooted.path if node.row is not None]
        if rows:
            self._renumber(self.cache.commit(rows))
        if len(rows) < len(ids):
            self._pending.extend(ids[len(rows) :])
            if self._rows:
                self.cache.drop_nodes()
                self._rows = 0
        return rerooted

    def _renumber(self, mapping: Sequence[int]) -> None:
        self._rows = sum(new >= 0 for new in mapping)
        for node in self._tree.nodes():
            if node.row is not None:
                node.row = mapping[node.row]

    def _expand(self, node: Node, logits: NDArray[np.float32]) -> None:
        path = self._path(node) if self._ranking.reads_path else ()
        self._tree.expand(node, self._ranking.children(logits, node.position + 1, path))

    def _parent_row(self, node: Node) -> int:
        parent = node.parent
        if parent is self._tree.root:
            return -1
        assert parent is not None
        assert parent.row is not None, "a parent is expanded before its child"
        return parent.row

    def _path(self, node: Node) -> tuple[int, ...]:
        """Drafted tokens from below the root to this node."""
        tokens: list[int] = []
        while node.parent is not None:
            tokens.append(node.token)
            node = node.parent
        return tuple(reversed(tokens))


def check_readable(ids: Sequence[int], position: int, vocabulary_size: int, abilities: Abilities) -> None:
    """Whether these ids, the first of them at `position`, are the target's and the model can read them.

    Raises:
        NotFollowed: with the numbers.
    """
    if position + len(ids) > abilities.max_length:
        raise NotFollowed(
            f"the session has {position + len(ids)} ids; this drafter can follow {abilities.max_length}"
        )
    if ids and max(ids) >= abilities.width:
        raise NotFollowed(f"id {max(ids)} is outside this drafter's vocabulary of {abilities.width}")
    if ids and max(ids) >= vocabulary_size:
        raise NotFollowed(f"id {max(ids)} is outside the target's vocabulary of {vocabulary_size}")
