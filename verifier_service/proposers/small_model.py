"""A small language model as a batched proposer: it drafts on the engine's thread, for all sessions at once.

A drafter process drafts beside the target's passes. Beside compiled passes of a few milliseconds its drafts
come too late, above all where sessions sample. Here each level of the drafts is one packed pass of the model
before the target's own pass, as many levels as are worth their time.

The model has a pool of its own. Each session's cache follows the committed tokens: prompts are read in chunks
as the target reads them, drafted rows that were committed stay, and all others are dropped.
"""

import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from outrider.lm.kv.table import SlotTable
from outrider.lm.plan import SequenceRows
from outrider.lm.runner import PackedLM
from outrider.tokens import TokenTable
from speculative.digest import HostDigest
from speculative.errors import EmptySupport, InvalidRequest, Overloaded
from speculative.level_ranking import Children
from speculative.ranking import ChildRanker
from speculative.tree import ROOT
from verifier_service.proposers.batched import (
    DraftAsk,
    DraftLevel,
    ProposedSession,
    ProposerConfig,
    ProposerNeeds,
    ProposerPlan,
    SeenPass,
)

_KV_MB = 512
"""Memory for the keys and values of all sessions, in MiB."""
_CHILDREN = 4
_SCALE = 0.65
"""Spread of the target's logits around the small model's, in logits; see `speculative.ranking`."""
_LEAST_SURVIVAL = 0.03
_DEPTH = 12
_EXPANDED = 4
"""Most leaves of one session that a level expands."""
_CHUNK = 256
"""Most committed tokens that one pass reads."""
_FEW = 32
"""Most unread tokens of a session that a drafting pass reads; longer runs are read between drafts."""


def plan(config: ProposerConfig) -> ProposerPlan:
    """The plan of a small model, whose weights are loaded beside the target's."""
    return ProposerPlan(SmallModelProposer.needs, partial(_load, config))


def _load(config: ProposerConfig, target: PackedLM) -> "SmallModelProposer":
    """Loads the model as the target was loaded. Raises InvalidRequest where its tokenizer is another."""
    lm = PackedLM.load(
        config.checkpoint,
        device=str(target.model.device),
        dtype=str(target.model.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        kv_mb=_KV_MB,
        cache_dir=config.cache_dir,
        gpu=target.gpu,
    )
    if _tokens_digest(lm) != _tokens_digest(target):
        raise InvalidRequest(
            f"the small model {config.checkpoint!r} has another tokenizer than the target {config.model!r}; "
            "give one of the same vocabulary"
        )
    lm.capture_steps()
    lm.most_helped = target.most_helped
    lm.compile_passes(config.passes, config.cache_dir)
    proposer = SmallModelProposer(lm, target.vocabulary_size)
    weakref.finalize(proposer, lm.close)  # ends a compiler that still runs when the verifier ends
    return proposer


def _tokens_digest(lm: PackedLM) -> str:
    return "" if lm.tokenizer_json is None else TokenTable.from_json(lm.tokenizer_json).digest


@dataclass(slots=True)
class _Node:
    """A drafted token below the last committed one."""

    token: int
    parent: int
    depth: int
    """Number of drafted tokens up to and including this one."""
    survival: float
    row: int = -1
    """Node of the session's slot table; -1: not computed."""


class _Follower:
    """One session's cache and draft tree."""

    def __init__(
        self, session: ProposedSession, table: SlotTable, width: int, max_length: int, same_width: bool
    ) -> None:
        ids = session.ids
        self.session = session
        self.table = table
        self.nodes: list[_Node] = []
        """Nodes of the draft since the last commit; a node's index is what `DraftLevel.parents` name."""
        self.is_over = False
        """Whether the model can no longer draft for the session."""
        self._end = min(session.limit - 1, max_length)
        self._left = 0
        self._leaves: list[int] = []
        self._pushed = len(ids)
        self._ranker = ChildRanker(
            session.params,
            session.seed,
            ids,
            session.prompt_length,
            width=width,
            bound=width,
            children=_CHILDREN,
            scale=_SCALE,
            noise=session.noise if same_width else None,
            rough=True,
        )

    @property
    def unread(self) -> int:
        """Number of committed tokens that the cache lacks."""
        return 0 if self.is_over else len(self.session.ids) - self.table.length

    def settle(self) -> int:
        """Moves the cache along the tokens that were committed since the last draft.

        Returns the highest of these tokens; -1 if there are none.
        """
        ids = self.session.ids
        fresh = ids[self._pushed :]
        for token in fresh:
            self._ranker.push(token)
        self._pushed = len(ids)
        self._ranker.forget_before(len(ids))
        if self.nodes:
            self.table.keep(self._committed_rows())
            self.nodes = []
        self.is_over |= len(ids) >= self._end
        return max(fresh, default=-1)

    def _committed_rows(self) -> list[int]:
        """Rows of the drafted nodes that were committed, from the root down."""
        rows: list[int] = []
        above = ROOT
        for token in self.session.ids[self.table.length :]:
            found = (at for at, node in enumerate(self.nodes) if node.parent == above and node.token == token)
            above = next(found, ROOT)
            if above == ROOT or self.nodes[above].row < 0:
                break
            rows.append(self.nodes[above].row)
        return rows

    def read(self, most: int, *, to_draft: bool) -> SequenceRows:
        """Rows of unread tokens, at most `most`.

        A draft needs the logits of the last token once no other token is unread. Otherwise the last token
        stays unread for the next draft.
        """
        start = self.table.length
        end = len(self.session.ids) - (not to_draft)
        tokens = list(self.session.ids[start : min(end, start + most)])
        last = len(tokens) - 1
        want = [last] if len(tokens) == self.unread else []
        return SequenceRows(self.table, tokens, list(range(-1, last)), want)

    def begin(self, node_limit: int) -> None:
        """Begins a draft of at most `node_limit` nodes."""
        self._left = node_limit

    def leaves(self) -> list[int]:
        """The likeliest leaves that are worth expanding; the next pass computes their rows."""
        if self._left <= 0:
            return []
        self._leaves.sort(key=lambda leaf: -self.nodes[leaf].survival)
        chosen, self._leaves = self._leaves[:_EXPANDED], self._leaves[_EXPANDED:]
        return chosen

    def rows_of(self, leaves: Sequence[int]) -> SequenceRows:
        """Rows of these nodes, all of whose logits are wanted."""
        first = self.table.nodes
        parents = []
        for at, leaf in enumerate(leaves):
            node = self.nodes[leaf]
            node.row = first + at
            parents.append(ROOT if node.parent == ROOT else self.nodes[node.parent].row)
        tokens = [self.nodes[leaf].token for leaf in leaves]
        return SequenceRows(self.table, tokens, parents, list(range(len(leaves))))

    def expand(self, leaves: Sequence[int], digests: Sequence[HostDigest]) -> DraftLevel | None:
        """The likeliest children of some nodes, or of the root, as many as half of the room takes."""
        found: list[tuple[float, int, int]] = []
        for leaf, digest in zip(leaves, digests, strict=True):
            above = 1.0 if leaf == ROOT else self.nodes[leaf].survival
            found += [
                (above * share, leaf, token)
                for token, share in self._children(leaf, digest)
                if above * share >= _LEAST_SURVIVAL
            ]
        found.sort(key=lambda child: -child[0])
        found = found[: math.ceil(self._left / 2)]
        if not found:
            return None
        self._left -= len(found)
        for survival, parent, token in found:
            depth = 1 if parent == ROOT else self.nodes[parent].depth + 1
            if depth < _DEPTH and len(self.session.ids) + depth < self._end:
                self._leaves.append(len(self.nodes))
            self.nodes.append(_Node(token, parent, depth, survival))
        survivals, parents, tokens = zip(*found, strict=True)
        return DraftLevel(tokens, parents, survivals)

    def forget_leaves(self) -> None:
        """Ends the draft that was begun."""
        self._leaves = []

    def _children(self, leaf: int, digest: HostDigest) -> Children:
        path: list[int] = []
        depth = 0 if leaf == ROOT else self.nodes[leaf].depth
        while self._ranker.reads_path and leaf != ROOT:
            path.append(self.nodes[leaf].token)
            leaf = self.nodes[leaf].parent
        return self._ranker.children(digest, len(self.session.ids) + depth, path[::-1])


class SmallModelProposer:
    """A BatchedProposer that drafts with a causal language model of the target's vocabulary.

    Args:
        lm: the small model; only the proposer uses it, on the engine's thread.
        width: number of ids that the target knows.
    """

    needs = ProposerNeeds(prompts=True)

    def __init__(self, lm: PackedLM, width: int) -> None:
        self._lm = lm
        self._width = min(width, lm.vocabulary_size)
        self._same_width = self._width == width
        self._followers: dict[int, _Follower] = {}

    def open(self, session: ProposedSession) -> None:
        """Begins to follow a session with an empty cache."""
        table = self._lm.table(room=session.limit)
        follower = _Follower(session, table, self._width, self._lm.max_length, self._same_width)
        self._followers[session.handle] = follower
        if max(session.ids) >= self._lm.vocabulary_size:
            self._lose(follower)

    def close(self, handle: int) -> None:
        """Frees the session's cache."""
        follower = self._followers.pop(handle, None)
        if follower is not None:
            self._lm.release(follower.table)

    def saw(self, seen: SeenPass) -> None:
        """Reads the tokens of prompts, and of sessions that had no draft for a while, in one pass."""
        behind = []
        for shown in seen.rounds:
            follower = self._followers[shown.handle]
            if follower.unread > _FEW:
                self._settle(follower)
                behind.append(follower)
        self._read(behind, to_draft=False)

    def draft(self, asks: Sequence[DraftAsk]) -> Iterator[Sequence[DraftLevel | None]]:
        """One pass per level: first the unread tokens, then the likeliest leaves of all sessions."""
        followers = [self._followers[ask.handle] for ask in asks]
        drafting = []
        for ask, follower in zip(asks, followers, strict=True):
            self._settle(follower)
            follower.forget_leaves()
            follower.begin(ask.node_limit)
            if 0 < follower.unread <= _FEW:
                drafting.append(follower)
        found = self._read(drafting, to_draft=True)
        while found:
            yield [found.get(follower.session.handle) for follower in followers]
            found = self._expand(followers)

    def _settle(self, follower: _Follower) -> None:
        """Moves a session on to its last token, unless the model does not know one of the new tokens."""
        if follower.settle() >= self._lm.vocabulary_size and not follower.is_over:
            self._lose(follower)

    def _read(self, followers: Sequence[_Follower], *, to_draft: bool) -> dict[int, DraftLevel]:
        """Reads unread tokens in one pass; to draft, ranks the children of the last token as well."""
        left = _CHUNK
        batch = []
        for follower in followers:
            if left > 0 and not follower.is_over:
                rows = follower.read(left, to_draft=to_draft)
                left -= len(rows.tokens)
                batch.append((follower, rows))
        levels = {}
        for follower, rows, digests in self._forward(batch):
            follower.table.keep(range(len(rows.tokens)))
            if rows.want:
                level = self._ranked(follower, [ROOT], digests)
                if level is not None:
                    levels[follower.session.handle] = level
        return levels

    def _expand(self, followers: Sequence[_Follower]) -> dict[int, DraftLevel]:
        """One more level of the sessions whose trees have leaves that are worth expanding."""
        batch, chosen = [], {}
        for follower in followers:
            if leaves := follower.leaves():
                chosen[follower.session.handle] = leaves
                batch.append((follower, follower.rows_of(leaves)))
        levels = {}
        for follower, _, digests in self._forward(batch):
            level = self._ranked(follower, chosen[follower.session.handle], digests)
            if level is not None:
                levels[follower.session.handle] = level
        return levels

    def _ranked(
        self, follower: _Follower, leaves: Sequence[int], digests: Sequence[HostDigest]
    ) -> DraftLevel | None:
        try:
            return follower.expand(leaves, digests)
        except EmptySupport:
            self._lose(follower)  # NaN in the small model's logits is no fault of the session
            return None

    def _forward(
        self, batch: Sequence[tuple[_Follower, SequenceRows]]
    ) -> list[tuple[_Follower, SequenceRows, list[HostDigest]]]:
        """Runs one pass. If the pool is too small, the longest session gets no further drafts."""
        left = list(batch)
        while left:
            try:
                rows = self._lm.forward([sequence for _, sequence in left]).rows()
            except Overloaded:
                longest = max(left, key=lambda entry: entry[0].table.length + len(entry[1].tokens))
                left.remove(longest)
                self._lose(longest[0])
                continue
            found, first = [], 0
            for follower, sequence in left:
                wanted = rows[first : first + len(sequence.want), : self._width]
                first += len(sequence.want)
                found.append((follower, sequence, [HostDigest(row) for row in wanted]))
            return found
        return []

    def _lose(self, follower: _Follower) -> None:
        """Frees the cache of a session that the model cannot draft for."""
        follower.is_over = True
        follower.nodes = []
        follower.forget_leaves()
        self._lm.release(follower.table)
