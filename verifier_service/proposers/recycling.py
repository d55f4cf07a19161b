"""Token Recycling: drafts from the target's likeliest ids after each token (arXiv 2408.08696).

A table has the ids that the target found likeliest when it last met a token, at a committed place or at any
other row that it verified: the next draft offers candidates that were computed and not chosen. A draft is a
tree that grows breadth-first from the last token. Its branches are as wide as their survival is high: the
proposer measures how often an id of each rank was right, instead of using the paper's static template. Where
the session samples, the noise of the position ranks the ids.
"""

import math
from collections.abc import Iterator, Sequence

from speculative.noise import lead_medians, leads
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
from verifier_service.proposers.hit_rates import HitRates
from verifier_service.proposers.successors import LevelTree, SuccessorTable, TenantTables

_FIRST_BY_RANK = (0.4, 0.12, 0.06, 0.04, 0.03, 0.02, 0.02, 0.01)
"""Initial hit rates of the likeliest ids after a token, by rank."""
_LEAST_SHARE = 0.002
_LEAST_SURVIVAL = 0.02
_SCALE = 1.0
"""Spread of the target's logits around the table's, in logits; see `speculative.ranking`."""
_OTHERS_NOISE = 0.37
"""The median of the noise, which stands for all ids that the table does not list."""
_DEPTH = 8


def plan(config: ProposerConfig) -> ProposerPlan:
    """The plan of a RecyclingProposer, which needs only the target's likeliest ids."""
    return ProposerPlan(RecyclingProposer.needs, lambda target: RecyclingProposer())


class RecyclingProposer:
    """A BatchedProposer with a table per tenant for sessions that may learn, else a table per session."""

    needs = ProposerNeeds(tops=len(_FIRST_BY_RANK))

    def __init__(self) -> None:
        self._sessions: dict[int, tuple[ProposedSession, SuccessorTable]] = {}
        self._tables = TenantTables()
        self._greedy, self._sampled = HitRates(_FIRST_BY_RANK), HitRates(_FIRST_BY_RANK)

    def open(self, session: ProposedSession) -> None:
        """Gives the session the table that the session may read and extend."""
        self._sessions[session.handle] = session, self._tables.table(session)

    def close(self, handle: int) -> None:
        """Forgets the session, and its table unless that is the tenant's."""
        self._sessions.pop(handle, None)

    def saw(self, seen: SeenPass) -> None:
        """Learns the target's likeliest ids after all verified tokens, committed or not."""
        for seen_round in seen.rounds:
            self._learn(seen_round)

    def draft(self, asks: Sequence[DraftAsk]) -> Iterator[Sequence[DraftLevel | None]]:
        """Grows each session's tree level by level."""
        growing = []
        for ask in asks:
            session, table = self._sessions[ask.handle]
            growing.append(_Growing(session, table, self._rates(session), ask.node_limit))
        for _ in range(_DEPTH):
            levels = [tree.grow() for tree in growing]
            if not any(levels):
                return
            yield levels

    def _rates(self, session: ProposedSession) -> HitRates:
        return self._greedy if session.params.greedy else self._sampled

    def _learn(self, seen: SeenRound) -> None:
        if seen.said is None or not seen.tokens:
            return
        session, table = self._sessions[seen.handle]
        rates = self._rates(session)
        before = (session.ids[seen.position - 1], *seen.tokens[:-1])
        for last, token, top in zip(before, seen.tokens, seen.said.tops, strict=False):
            for rank, guess in enumerate(table.after(last)):
                rates.learn(rank, guess == token)
            table.learn(last, top.ids[: len(rates)])
        for row in seen.said.off_path:
            table.learn(row.last, row.top_ids[: len(rates)])


class _Growing:
    """The draft of one session, level by level."""

    def __init__(
        self, session: ProposedSession, table: SuccessorTable, rates: HitRates, node_limit: int
    ) -> None:
        self._session = session
        self._table = table
        self._shares = [max(_LEAST_SHARE, rates[rank]) for rank in range(len(rates))]
        self._position = len(session.ids)
        self._tree = LevelTree(session.ids[-1], node_limit, _LEAST_SURVIVAL)

    def grow(self) -> DraftLevel | None:
        """The likeliest children of the last level's nodes; None if no child is worth a row."""
        families = [(node, survival, self._table.after(last)) for node, last, survival in self._tree.leaves]
        shares = self._family_shares([tokens for _, _, tokens in families])
        self._position += 1
        return self._tree.add(
            (survival * share, node, token)
            for (node, survival, tokens), family in zip(families, shares, strict=True)
            for share, token in zip(family, tokens, strict=True)
        )

    def _family_shares(self, families: Sequence[tuple[int, ...]]) -> list[list[float]]:
        """The probability of each child of each family: by rank, and by noise where the session samples."""
        params = self._session.params
        if params.greedy:
            return [self._shares[: len(tokens)] for tokens in families]
        named = sorted({token for tokens in families for token in tokens})
        if not named:
            return [[] for _ in families]
        # The leading bits bound the noise closely enough; the tails' bits are not worth their time.
        drawn = leads(self._session.seed, self._position, named[-1] + 1)[named]
        noise = dict(zip(named, lead_medians()[drawn].tolist(), strict=True))
        sharpness = params.temperature / _SCALE
        shares = []
        for tokens in families:
            known = self._shares[: len(tokens)]
            others = math.log(max(_LEAST_SHARE, 1 - sum(known))) + _OTHERS_NOISE
            weights = [
                math.exp(sharpness * (math.log(share) + noise[token]))
                for share, token in zip(known, tokens, strict=True)
            ]
            total = sum(weights) + math.exp(sharpness * others)
            shares.append([weight / total for weight in weights])
        return shares
