"""Drafts from what the target said after each token before: a table of bigrams, fed by observed tops.

The trivial batched proposer. It computes nothing that costs time, and shows what the protocol gives: the
target's likeliest ids at every verified row teach it as much as the tokens that were committed.
"""

from collections.abc import Iterator, Sequence

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
from verifier_service.proposers.successors import LevelTree, SuccessorTable, TenantTables

_BY_RANK = (0.5, 0.15, 0.08, 0.05)
"""Probability given to the likeliest ids after a token, by rank; calibration corrects it."""
_LEAST_SURVIVAL = 0.03
_DEPTH = 6


def plan(config: ProposerConfig) -> ProposerPlan:
    """The plan of a BigramProposer, which needs only the target's tokens."""
    return ProposerPlan(BigramProposer.needs, lambda target: BigramProposer())


class BigramProposer:
    """A BatchedProposer with a table per tenant for sessions that may learn, else a table per session."""

    needs = ProposerNeeds(tops=len(_BY_RANK))

    def __init__(self) -> None:
        self._sessions: dict[int, tuple[ProposedSession, SuccessorTable]] = {}
        self._tables = TenantTables()

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
            growing.append((LevelTree(session.ids[-1], ask.node_limit, _LEAST_SURVIVAL), table))
        for _ in range(_DEPTH):
            levels = [_grow(tree, table) for tree, table in growing]
            if not any(levels):
                return
            yield levels

    def _learn(self, seen: SeenRound) -> None:
        if seen.said is None or not seen.tokens:
            return
        session, table = self._sessions[seen.handle]
        before = (session.ids[seen.position - 1], *seen.tokens[:-1])
        for token, top in zip(before, seen.said.tops, strict=False):
            table.learn(token, top.ids[: len(_BY_RANK)])
        for row in seen.said.off_path:
            table.learn(row.last, row.top_ids[: len(_BY_RANK)])


def _grow(tree: LevelTree, table: SuccessorTable) -> DraftLevel | None:
    """The likeliest children of the last level's nodes; None if no child is worth a row."""
    return tree.add(
        (survival * share, node, token)
        for node, last, survival in tree.leaves
        for share, token in zip(_BY_RANK, table.after(last), strict=False)
    )
