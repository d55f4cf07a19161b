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
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from drafter_service.cascade import CheapChain
from drafter_service.draft_tree import DraftNode, DraftTree, Growth, Rerooted, pack
from outrider.source.events import Follow
from outrider.source.followed import FollowedIds, FollowedSession
from speculative.digest import HostDigest
from speculative.fragment import Fragment
from speculative.level_ranking import Children
from speculative.policies.entropy import entropy_of
from speculative.policies.policy import DraftPolicy, SeenProgress
from speculative.ranking import ChildRanker
from speculative.survival_curve import SurvivalCurve


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
        masks: ids that stand for tokens not known yet, in order of place; empty: the model has learnt none.
    """

    width: int
    bound: int
    max_length: int
    eos_ids: frozenset[int] = frozenset()
    masks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PassRows:
    """Rows of one session in one pass: tokens, their parent rows, and the rows whose logits are wanted."""

    tokens: list[int]
    parents: list[int]
    want: list[int]


class GuessedChain(NamedTuple):
    """A chain of tokens guessed below one of the leaves of a pass."""

    leaf: int
    """Place of the leaf among the leaves of the pass."""
    tokens: tuple[int, ...]


class DraftingSession(FollowedSession):
    """A followed session with its draft tree. `cache.length` of its ids may be in the cache already.

    Without a `policy` the tree keeps the bounds of `growth`; without a `curve` the model's estimates stand.
    """

    def __init__(
        self,
        follow: Follow,
        ids: FollowedIds,
        cache: Cache,
        abilities: Abilities,
        growth: Growth,
        policy: DraftPolicy | None = None,
        curve: SurvivalCurve | None = None,
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
            rough=True,
        )
        self._width = width
        self._unread = list(request.ids[cache.length :])
        self._rows = 0  # nodes in the cache
        self._asked: list[DraftNode] = []
        self._guess: GuessedChain | None = None
        """What a cheap source guessed below one of the asked leaves."""
        self._cheap = CheapChain(request.ids) if growth.cascade else None
        self.passes_before = 0
        """Passes of the drafter when the last tokens were committed."""
        self.is_sated = False
        """Whether nothing was left to draft at some time since the last tokens were committed."""
        self._abilities = abilities
        self._growth = growth
        self._curve = curve
        self._tree = self._new_tree(policy)
        self._committed_ms = 0.0  # when progress came last, on the caller's clock

    @property
    def unread(self) -> int:
        """Number of committed ids to read before anything can be drafted; from any thread."""
        return 0 if self.is_over else len(self._unread)

    @property
    def is_over(self) -> bool:
        """Whether drafting is over: the tree's root is at the limit, or no draft is wanted."""
        return self._tree.root.position >= self._tree.end or self.request.node_limit == 0

    @property
    def in_flight(self) -> int:
        """Number of sent nodes that can still be accepted."""
        return self._tree.in_flight

    def require(self, survival: float) -> None:
        """Sets the least survival of nodes to send and to expand; the floor of `Growth` holds beside it."""
        self._tree.required = survival

    def restart(self, cache: Cache) -> None:
        """Goes on with an empty cache, of another drafter: forgets the tree, and has every id to read again.

        Nodes sent before may still be accepted; they are no longer counted as in flight.
        """
        left = self._tree
        self.cache = cache
        self._unread = self.ids.array.tolist()
        self._rows, self._asked, self._guess = 0, [], None
        self._tree = self._new_tree(left.policy)
        self._tree.required = left.required

    def commit(self, ids: Sequence[int], now_ms: float = 0.0) -> Rerooted:
        """Moves the tree along newly committed ids, which are in `self.ids` already.

        `now_ms` is the time on the caller's clock; 0: not known.
        """
        if not ids:
            return Rerooted((), self.in_flight, 0)
        self._learn(ids, now_ms)
        rerooted = self._tree.commit(ids)
        self._asked, self._guess = [], None
        if self._cheap is not None:
            self._cheap.commit(ids)
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
        if self.is_over:
            return None
        if self._unread:
            tokens = self._unread[:chunk]
            last = len(tokens) - 1
            want = [last] if len(tokens) == len(self._unread) else []
            return PassRows(tokens, list(range(-1, last)), want)
        if not self._asked:  # else a pass that failed is tried again
            self._asked = self._tree.frontier(nodes)
        if not self._asked:
            self.is_sated = True
            return None
        tokens = [node.token for node in self._asked]
        parents = [self._parent_row(node) for node in self._asked]
        self._guess = self._guess_below()
        if self._guess is not None:
            # The first guessed token hangs below its leaf's row, each other one below the one before.
            first = self._rows + len(tokens)
            parents += [self._rows + self._guess.leaf, *range(first, first + len(self._guess.tokens) - 1)]
            tokens += self._guess.tokens
        return PassRows(tokens, parents, list(range(len(tokens))))

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
        if self._guess is not None:
            self._adopt(self._guess, logits[len(self._asked) :])
        self._rows += len(rows.tokens)
        self._asked, self._guess = [], None

    def _guess_below(self) -> GuessedChain | None:
        """The tokens that a cheap source guesses below the likeliest asked leaf that it knows."""
        if self._cheap is None:
            return None
        for place, leaf in enumerate(self._asked):
            most = min(self._growth.cascade, self._tree.room_below(leaf))
            if tokens := self._cheap.below(self._path(leaf), most):
                return GuessedChain(place, tokens)
        return None

    def _adopt(self, guess: GuessedChain, logits: NDArray[np.float32]) -> None:
        """Expands the guessed nodes that the tree has by now, from the leaf down to the first it lacks."""
        assert self._cheap is not None, "without a cheap source nothing is guessed"
        node, drawn, first = self._asked[guess.leaf], 0, self._rows + len(self._asked)
        for token in guess.tokens:
            child = node.children.get(token) if node.children else None
            if child is None or not self._tree.can_expand(child):
                break
            child.row = first + drawn
            self._expand(child, logits[drawn])
            node, drawn = child, drawn + 1
        self._cheap.learn(len(guess.tokens), drawn)

    def take_fragments(self) -> list[Fragment]:
        """New nodes to send, as fragments; each node once."""
        return pack(self._tree.take_unsent(), self.request.epoch)

    def _new_tree(self, policy: DraftPolicy | None) -> DraftTree:
        return DraftTree(
            self.ids.array[-1],
            len(self.ids),
            self.ids.prefix_hash,
            growth=self._growth,
            node_limit=self.request.node_limit,
            end=min(self.request.limit - 2, self._abilities.max_length),
            eos_ids=self._abilities.eos_ids,
            policy=policy,
            curve=self._curve,
        )

    def _learn(self, ids: Sequence[int], now_ms: float) -> None:
        ms = now_ms - self._committed_ms if self._committed_ms else 0.0
        self._committed_ms = now_ms
        self._tree.policy.saw(SeenProgress(len(ids), self._tree.trials(ids), ms))

    def _renumber(self, mapping: Sequence[int]) -> None:
        self._rows = sum(new >= 0 for new in mapping)
        for node in self._tree.nodes():
            if node.row is not None:
                node.row = mapping[node.row]

    def _expand(self, node: DraftNode, logits: NDArray[np.float32]) -> None:
        used = logits[: self._width]
        self._tree.expand(node, self._ranked(node, HostDigest(used)), self._entropy(used))

    def _ranked(self, node: DraftNode, digest: HostDigest) -> Children:
        """The tokens that may follow a node, likeliest first, each with its probability."""
        path = self._path(node) if self._ranker.reads_path else ()
        return self._ranker.children(digest, node.position + 1, path)

    def _entropy(self, logits: NDArray[np.float32]) -> float:
        return entropy_of(logits) if self._tree.policy.reads_entropy else 0.0

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
