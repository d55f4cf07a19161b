"""Passes of a head of one layer in eager torch, on any device."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.lm.heads.layer import attend
from outrider.lm.heads.pair_head import PairHead
from outrider.lm.kv.pool import Run
from verifier_service.proposers.batched import DraftAsk, DraftLevel, SeenPass
from verifier_service.proposers.heads.draft import HeadDraft, HeadSession, Logits
from verifier_service.proposers.heads.pair_passes import MOST_ROWS
from verifier_service.proposers.heads.plan import host_rows


class EagerPairs:
    """PairPasses in torch.

    Args:
        head: the module.
    """

    def __init__(self, head: PairHead) -> None:
        self._head = head

    @torch.inference_mode()
    def saw(self, seen: SeenPass, sessions: Sequence[HeadSession]) -> None:
        """Writes the pairs of all tokens that the pass committed."""
        assert seen.features is not None
        known = seen.features.transpose(0, 1)
        features: list[Tensor] = []
        tokens: list[int] = []
        positions: list[int] = []
        runs: list[Run] = []
        for shown, session in zip(seen.rounds, sessions, strict=True):
            if not shown.rows:
                continue
            first, count = shown.first, len(shown.rows)
            # Slot 0 is never read, so neither its position nor its hidden states matter.
            features.append(known[:1] if shown.before is None else shown.before[None])
            if count > 1:
                features.append(known[list(shown.rows[:-1])])
            tokens += session.session.ids[first : first + count]
            positions += [max(0, position - 1) for position in range(first, first + count)]
            runs += shown.runs
        if tokens:
            pairs = self._head.pairs(self._ids(tokens), self._head.fuse(self._joined(features)))
            planes = sessions[0].session.planes
            assert planes is not None
            planes.write(runs, self._head.keys_values(pairs, self._ids(positions)))

    def begin(self, session: HeadSession, ask: DraftAsk) -> "_EagerDraft":
        """A draft without a level."""
        return _EagerDraft(session, ask)

    def grow(self, drafts: Sequence["_EagerDraft"]) -> list[DraftLevel | None]:
        """One more level of these drafts, with one call of the layer."""
        rows = self._rows(drafts)
        levels: list[DraftLevel | None] = []
        for draft in drafts:
            count = len(draft.tree.frontier)
            levels.append(draft.tree.grow(rows[:count]))
            rows = rows[count:]
        return levels

    @torch.inference_mode()
    def _rows(self, drafts: Sequence["_EagerDraft"]) -> Logits:
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

    def _joined(self, features: Sequence[Tensor]) -> Tensor:
        dtype = self._head.layer.self_attn.q_proj.weight.dtype
        return torch.cat([rows.to(dtype) for rows in features])

    def _ids(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, device=self._head.layer.self_attn.q_proj.weight.device)


class _EagerDraft:
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
            most = self._prefix + MOST_ROWS
            for plane in self._planes.read(self._runs):
                cache = like.new_empty(like.shape[0], most, like.shape[2])
                cache[:, : self._prefix] = plane[:, 1:]
                self._caches.append(cache)
        return self._caches
