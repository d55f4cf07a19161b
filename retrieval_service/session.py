"""One followed session: the fragments that were drafted for it, and what of its output is kept already.

Knows nothing of memories, threads, sockets or clocks.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from outrider.source.events import Follow
from outrider.source.followed import FollowedIds, FollowedSession
from retrieval_service.joint_tree import WITNESS, FoundTrie, JointNode, JointTree, Sampling, TreeBounds
from retrieval_service.own_text import look_back
from retrieval_service.ranking import DraftShape
from retrieval_service.trust import SessionTrust
from speculative import hashing
from speculative.fragment import Fragment
from speculative.tree import ROOT

WINDOW = 64
"""How many of the last ids memories are asked with: a longer match says no more."""
MOST_UNLEARNT = 4
"""The most texts of one session, such as turns of a conversation, that it remembers not to learn from."""
OWN_TEXT = "own text"
"""Name of the session's own text among the memories that are trusted more or less."""


@dataclass(slots=True)
class _Piece:
    """Nodes of one fragment: those of one source below one node."""

    source: int
    base: int
    prefix_hash: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    survival: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Unlearnt:
    """An output that may not be kept, by the hashes over its prompt and over each longer beginning."""

    prompt_length: int
    hashes: Sequence[int]

    def hash_at(self, length: int) -> int | None:
        """The hash over the first `length` ids; None before the prompt's end and behind the output's."""
        at = length - self.prompt_length
        return self.hashes[at] if 0 <= at < len(self.hashes) else None

    def holds(self, other: "_Unlearnt") -> bool:
        """Whether the other is the beginning of this text, behind the same prompt."""
        end = other.prompt_length + len(other.hashes) - 1
        return self.prompt_length == other.prompt_length and self.hash_at(end) == other.hashes[-1]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a node of the tree stands in its piece."""

    piece: _Piece
    index: int
    prefix_hash: int


class RetrievalSession(FollowedSession):
    """A followed session of the retrieval worker.

    Args:
        trust: how far the session trusts each memory; that of `before` is used instead.
        before: the session as it was followed here before, if it is remembered.

    Attributes:
        kept: positions below this are kept in past outputs, or never have to be.
        learns: whether output is kept from `kept` on.
        is_new_text: whether what was kept of `before` is other text, which is over.
    """

    def __init__(
        self,
        follow: Follow,
        ids: FollowedIds,
        shape: DraftShape,
        trust: SessionTrust,
        before: "RetrievalSession | None",
    ) -> None:
        super().__init__(follow, ids)
        request = follow.request
        self._shape = shape
        self._trust: SessionTrust = trust if before is None else before._trust
        self._tree: JointTree | None = None
        self._sent: frozenset[tuple[int, int]] = frozenset()  # source and hash of the last draft's nodes
        agreed = 0 if before is None else self._agreed(before)
        self.is_new_text = before is not None and agreed == 0
        self.kept = max(agreed, request.prompt_length)
        self._unlearnt = () if before is None else before._unlearnt_so_far()
        self.learns: bool = request.learn and not any(map(self._may_repeat, self._unlearnt))

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

    def commit(self, tokens: Sequence[int]) -> None:
        """Learns from the last draft which of its memories were right; the tokens are in `ids` already."""
        if self._tree is not None:
            self._tree.commit(tokens)

    def draft(self, found: Mapping[int, FoundTrie]) -> list[Fragment]:
        """Fragments of what the memories found; none where nothing is new.

        Args:
            found: by source index: which of the session's names the memory has, from 1.
        """
        if not found:
            self._tree = None
            return []
        request, shape, length = self.request, self._shape, len(self.ids)
        nodes = min(request.node_limit, shape.nodes)
        bounds = TreeBounds(nodes, min(shape.depth, request.limit - 1 - length), request.vocabulary_size)
        own = look_back(self.ids.array, node_limit=nodes, depth=bounds.depth)
        every = dict(found) if own is None else {**found, WITNESS: FoundTrie(OWN_TEXT, own)}
        sampling = None if request.params.greedy else Sampling(request.seed, length)
        self._tree = JointTree(every, self._trust, sampling, shape, bounds)
        pieces, sent = self._pieces(self._tree.nodes)
        if sent <= self._sent:
            return []
        self._sent = sent
        return [
            Fragment(
                piece.source,
                request.epoch,
                piece.base,
                piece.prefix_hash,
                tuple(piece.tokens),
                tuple(piece.parents),
                tuple(piece.survival),
            )
            for piece in pieces
        ]

    def _pieces(self, nodes: Iterable[JointNode]) -> tuple[list[_Piece], frozenset[tuple[int, int]]]:
        """The nodes by source, each with a parent in its own piece or at its piece's base.

        A base is a node of an earlier piece, or the last committed token. Also returns the source and the
        hash of each node.
        """
        pieces: dict[tuple[JointNode | None, int], _Piece] = {}
        places: dict[JointNode | None, _Place] = {}
        sent = set()
        for node in nodes:
            above = places.get(node.parent)
            base_hash = self.ids.prefix_hash if above is None else above.prefix_hash
            own_hash = hashing.extend(base_hash, node.token)
            if above is not None and above.piece.source == node.source:
                piece, parent = above.piece, above.index
            else:
                key = (node.parent, node.source)
                piece = pieces.get(key) or _Piece(node.source, len(self.ids) + node.depth - 1, base_hash)
                pieces[key], parent = piece, ROOT
            share = 1.0 if parent == ROOT else piece.survival[parent]
            places[node] = _Place(piece, len(piece.tokens), own_hash)
            piece.tokens.append(node.token)
            piece.parents.append(parent)
            piece.survival.append(share * node.given_parent)
            sent.add((node.source, own_hash))
        return list(pieces.values()), frozenset(sent)

    def _may_repeat(self, unlearnt: _Unlearnt) -> bool:
        """Whether both texts agree up to the end of the longer prompt, so that this output may repeat it."""
        length = max(self.request.prompt_length, unlearnt.prompt_length)
        return length <= len(self.ids) and self.ids.hash_at(length) == unlearnt.hash_at(length)

    def _unlearnt_so_far(self) -> tuple[_Unlearnt, ...]:
        """The latest texts of this session whose output was forgotten, or may not be kept."""
        if self.learns:
            return self._unlearnt
        prompt_length = self.request.prompt_length
        own = _Unlearnt(prompt_length, self.ids.hashes_from(prompt_length))
        return (*(one for one in self._unlearnt if not own.holds(one)), own)[-MOST_UNLEARNT:]

    def _agreed(self, before: "RetrievalSession") -> int:
        """Number of ids of `before` that are kept and the same in this session; 0 for another text."""
        same_prompt = before.request.prompt_length == self.request.prompt_length
        if not same_prompt or before.kept > len(self.ids):
            return 0
        return before.kept if before.ids.hash_at(before.kept) == self.ids.hash_at(before.kept) else 0
