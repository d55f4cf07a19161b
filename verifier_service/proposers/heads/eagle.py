"""Drafts with a head of one decoder layer: EAGLE's, with EAGLE-2's tree, EAGLE-3's, and MTP modules.

The pairs of committed tokens lie in planes of the target's pool as keys and values (`planes.py`); slot 0 has
no pair, since no hidden state precedes it. The pairs of drafted tokens live as long as the draft.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from outrider.lm.heads.layer import attend
from outrider.lm.heads.pair_head import PairHead
from outrider.lm.kv.pool import Run
from verifier_service.proposers.batched import (
    DraftAsk,
    DraftLevel,
    ProposedSession,
    ProposerConfig,
    ProposerNeeds,
    ProposerPlan,
    SeenPass,
    SeenRound,
)
from verifier_service.proposers.heads.draft import HeadDraft, HeadGrowth, HeadSession, Logits
from verifier_service.proposers.heads.plan import HeadLimits, host_rows, plan_head
from verifier_service.proposers.planes import may_hold

GROWTH = HeadGrowth(depth=7, width=6)
MOST_UNWRITTEN = 64
"""Committed tokens whose pairs are kept before they are written, while the head does not draft."""


def plan(config: ProposerConfig) -> ProposerPlan:
    """The plan of a head with two planes, for the keys and the values of its layer."""
    return plan_head(config, EagleProposer)


class EagleProposer:
    """A BatchedProposer over a head of one decoder layer.

    Args:
        head: the module.
        needs: as planned.
        limits: limits of the target.
    """

    def __init__(self, head: PairHead, needs: ProposerNeeds, limits: HeadLimits) -> None:
        self.needs = needs
        self._head = head
        self._limits = limits
        self._sessions: dict[int, HeadSession] = {}
        self._unwritten = _UnwrittenPairs()

    def open(self, session: ProposedSession) -> None:
        """Begins a session; the planes already have the pairs of its cached tokens."""
        self._sessions[session.handle] = self._limits.session(session, GROWTH)

    def close(self, handle: int) -> None:
        """Forgets the session; its slots belong to the pool."""
        self._write_pairs()  # now, as other sessions may read the slots, or get them for other tokens
        self._sessions.pop(handle, None)

    @torch.inference_mode()
    def saw(self, seen: SeenPass) -> None:
        """Keeps the pairs of all tokens that the pass committed, to be written before the next draft."""
        assert seen.features is not None
        if self._unwritten.overlap(run for shown in seen.rounds for run in shown.runs):
            self._write_pairs()  # the slots have new tokens since
        for shown in seen.rounds:
            if not shown.rows:
                continue
            first, count = shown.first, len(shown.rows)
            self._unwritten.see(seen.features, shown)
            ids = self._sessions[shown.handle].session.ids
            # Slot 0 is never read, so its position does not matter.
            positions = [max(0, position - 1) for position in range(first, first + count)]
            self._unwritten.add(ids[first : first + count], positions, shown.runs)
        if len(self._unwritten.tokens) >= MOST_UNWRITTEN:
            self._write_pairs()

    @torch.inference_mode()
    def _write_pairs(self) -> None:
        """Writes the kept pairs; one call for tokens of many passes costs little more than for one pass."""
        unwritten, self._unwritten = self._unwritten, _UnwrittenPairs()
        if not unwritten.tokens:
            return
        features = self._head.fuse(unwritten.before(self._head.layer.self_attn.q_proj.weight.dtype))
        pairs = self._head.pairs(self._ids(unwritten.tokens), features)
        written = self._head.keys_values(pairs, self._ids(unwritten.positions))
        planes = next(iter(self._sessions.values())).session.planes
        assert planes is not None
        planes.write(unwritten.runs, written)

    def draft(self, asks: Sequence[DraftAsk]) -> Iterator[Sequence[DraftLevel | None]]:
        """Grows the drafts of all sessions level by level, with one call of the layer per level."""
        self._write_pairs()
        drafts = [_PairDraft(self._sessions[ask.handle], ask) for ask in asks]
        while growing := [at for at, draft in enumerate(drafts) if draft.tree.frontier]:
            rows = self._rows([drafts[at] for at in growing])
            levels: list[DraftLevel | None] = [None] * len(asks)
            for at in growing:
                draft = drafts[at]
                count = len(draft.tree.frontier)
                levels[at], rows = draft.tree.grow(rows[:count]), rows[count:]
            yield levels

    @torch.inference_mode()
    def _rows(self, drafts: Sequence["_PairDraft"]) -> Logits:
        """Logits that follow the nodes to expand of all drafts, float32 ``[rows, V]``."""
        head, attention = self._head, self._head.layer.self_attn
        counts = [len(draft.tree.frontier) for draft in drafts]
        tokens = self._ids([token for draft in drafts for token in draft.tree.frontier_tokens])
        positions = [draft.tree.position - 1 for draft in drafts for _ in draft.tree.frontier]
        pairs = head.pairs(tokens, torch.cat([draft.hidden(head) for draft in drafts]))
        rotation = attention.rotation(self._ids(positions))
        queries = attention.queries(pairs.rows, rotation).split(counts, 1)
        keys, values = (found.split(counts, 1) for found in attention.keys_values(pairs.rows, rotation))
        attended = [draft.attended(*own) for draft, *own in zip(drafts, queries, keys, values, strict=True)]
        hidden = head.finish(pairs, torch.cat(attended, 1))
        for draft, own in zip(drafts, hidden.split(counts), strict=True):
            draft.expected = own
        return host_rows(head.logits(hidden))

    def _ids(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, device=self._head.layer.self_attn.q_proj.weight.device)


@dataclass(slots=True)
class _UnwrittenPairs:
    """Committed tokens whose pairs are not in the planes yet, in order of their slots."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    """Position of each pair."""
    runs: list[Run] = field(default_factory=list)
    seen: list[tuple[Tensor | None, Tensor, tuple[int, ...]]] = field(default_factory=list)
    """Where the hidden states of the positions before are: those before a round, ``[layers, width]``, then
    rows of a pass, ``[layers, rows, width]``."""

    def overlap(self, runs: Iterable[Run]) -> bool:
        """Whether any of these runs has a slot of a kept pair."""
        return any(low < until and since < high for low, high in runs for since, until in self.runs)

    def see(self, features: Tensor, shown: SeenRound) -> None:
        """Notes the hidden states that go with the tokens of a round."""
        rows = shown.rows[:-1]
        if not may_hold(features):
            features, rows = features[:, list(rows)], tuple(range(len(rows)))
        self.seen.append((shown.before, features, rows))

    def before(self, dtype: torch.dtype) -> Tensor:
        """Hidden states of the positions before all kept tokens, ``[tokens, layers, width]``."""
        parts: list[Tensor] = []
        for before, features, rows in self.seen:
            layers, _, width = features.shape  # of no row, where a pass elsewhere read one token alone
            # What precedes slot 0 is never read.
            parts.append((features.new_zeros(layers, width) if before is None else before)[:, None])
            if rows:
                parts.append(features[:, list(rows)])
        return torch.cat([part.to(dtype) for part in parts], 1).transpose(0, 1)

    def add(self, tokens: Sequence[int], positions: Sequence[int], runs: Sequence[Run]) -> None:
        self.tokens += tokens
        self.positions += positions
        self.runs += runs


class _PairDraft:
    """One session's draft with the keys, the values and the predicted hidden states of its rows."""

    def __init__(self, session: HeadSession, ask: DraftAsk) -> None:
        assert ask.before is not None
        assert session.session.planes is not None
        self.tree = HeadDraft(session, ask.node_limit)
        self.expected: Tensor | None = None
        """Hidden states that the head predicts at the nodes expanded last, ``[nodes, hidden]``."""
        self._before = ask.before
        self._planes, self._runs = session.session.planes, ask.runs
        self._caches: list[Tensor] = []
        self._prefix = sum(high - low for low, high in ask.runs) - 1
        self._rows: dict[int, tuple[int, ...]] = {}
        """Rows behind the prefix that the children of an expanded node see, by node."""
        self._last: list[int] = []
        """Nodes expanded last."""
        self._count = 0

    def hidden(self, head: PairHead) -> Tensor:
        """Hidden states that go with the tokens of the frontier, ``[rows, hidden]``."""
        if self.expected is None:
            return head.fuse(self._before.to(head.layer.self_attn.q_proj.weight.dtype)[None])
        parents = [self._last.index(self.tree.parent(node)) for node in self.tree.frontier]
        return self.expected[parents]

    def attended(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of the frontier's rows over committed pairs, ancestors and themselves."""
        count, first = keys.shape[1], self._prefix + self._count
        seen = first + count
        for cache, own in zip(self._held(keys), (keys, values), strict=True):
            cache[:, first:seen] = own
        frontier = self.tree.frontier
        mask = np.zeros((count, seen), bool)
        mask[:, : self._prefix] = True
        for at, node in enumerate(frontier):
            above = () if not self._rows else self._rows[self.tree.parent(node)]
            self._rows[node] = (*above, self._count + at)
            mask[at, [self._prefix + row for row in self._rows[node]]] = True
        self._last, self._count = list(frontier), self._count + count
        seen_keys, seen_values = (cache[None, :, :seen] for cache in self._caches)
        there = torch.from_numpy(mask).to(queries.device)
        return attend(queries[None], seen_keys, seen_values, there)[0]

    def _held(self, like: Tensor) -> Sequence[Tensor]:
        """The keys and the values of the draft: committed pairs first, with room for all levels."""
        if not self._caches:
            most = self._prefix + 1 + GROWTH.width * GROWTH.depth
            for plane in self._planes.read(self._runs):
                cache = like.new_empty(like.shape[0], most, like.shape[2])
                cache[:, : self._prefix] = plane[:, 1:]
                self._caches.append(cache)
        return self._caches
