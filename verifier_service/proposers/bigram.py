"""Drafts from what the target said after each token before: a table of bigrams, fed by observed tops.

The trivial batched proposer. It computes nothing that costs time, and shows what the protocol gives: the
target's likeliest ids at every verified row teach it as much as the tokens that were committed.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from speculative.tree import ROOT
from verifier_service.proposers.batched import (
    DraftAsk,
    DraftLevel,
    ProposedSession,
    ProposerNeeds,
    SeenPass,
    SeenRound,
)

_BY_RANK = (0.5, 0.15, 0.08, 0.05)
"""Probability given to the likeliest ids after a token, by rank; calibration corrects it."""
_LEAST_SURVIVAL = 0.03
_DEPTH = 6
_TENANTS = 64
_TOKENS = 32_768
"""Tokens of which a table knows what follows; the one learnt longest ago is forgotten first."""


class _Bigrams:
    """The ids that the target found likeliest after a token when it last met the token."""

    def __init__(self) -> None:
        self._following: OrderedDict[int, tuple[int, ...]] = OrderedDict()

    def learn(self, token: int, following: tuple[int, ...]) -> None:
        """Replaces what is known of a token."""
        self._following[token] = following
        self._following.move_to_end(token)
        if len(self._following) > _TOKENS:
            self._following.popitem(last=False)

    def after(self, token: int) -> tuple[int, ...]:
        """The ids that may follow a token, likeliest first."""
        return self._following.get(token, ())


class BigramProposer:
    """A BatchedProposer with one table per tenant that lets it learn, and one per session that does not."""

    needs = ProposerNeeds(tops=len(_BY_RANK))

    def __init__(self) -> None:
        self._sessions: dict[int, tuple[ProposedSession, _Bigrams]] = {}
        self._tenants: OrderedDict[str, _Bigrams] = OrderedDict()

    def open(self, session: ProposedSession) -> None:
        """Gives the session the table that it may read and feed."""
        table = self._of_tenant(session.tenant) if session.learn else _Bigrams()
        self._sessions[session.handle] = session, table

    def close(self, handle: int) -> None:
        """Forgets the session, and its table unless that is the tenant's."""
        self._sessions.pop(handle, None)

    def saw(self, seen: SeenPass) -> None:
        """Learns what the target said after the committed tokens and after all others that were verified."""
        for seen_round in seen.rounds:
            self._learn(seen_round)

    def draft(self, asks: Sequence[DraftAsk]) -> Iterator[Sequence[DraftLevel | None]]:
        """Grows each session's tree by one level after the other."""
        growing = [_Growing(*self._sessions[ask.handle], ask.node_limit) for ask in asks]
        for _ in range(_DEPTH):
            levels = [tree.grow() for tree in growing]
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

    def _of_tenant(self, tenant: str) -> _Bigrams:
        table = self._tenants.setdefault(tenant, _Bigrams())
        self._tenants.move_to_end(tenant)
        if len(self._tenants) > _TENANTS:
            self._tenants.popitem(last=False)
        return table


class _Growing:
    """The draft of one session, level by level."""

    def __init__(self, session: ProposedSession, table: _Bigrams, node_limit: int) -> None:
        self._table = table
        self._left = node_limit
        self._count = 0
        self._leaves = [(ROOT, session.ids[-1], 1.0)]

    def grow(self) -> DraftLevel | None:
        """The likeliest children of the last level's nodes; None where there are none worth a row."""
        children = [
            (survival * share, node, token)
            for node, last, survival in self._leaves
            for share, token in zip(_BY_RANK, self._table.after(last), strict=False)
            if survival * share >= _LEAST_SURVIVAL
        ]
        children.sort(key=lambda child: -child[0])
        children = children[: self._left]
        if not children:
            self._leaves = []
            return None
        self._leaves = [
            (self._count + at, token, survival) for at, (survival, _, token) in enumerate(children)
        ]
        self._count += len(children)
        self._left -= len(children)
        survivals, parents, tokens = zip(*children, strict=True)
        return DraftLevel(tokens, parents, survivals)
