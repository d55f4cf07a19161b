"""Tables of the ids that the target found likeliest after each token, and trees that grow from such tables.

Shared by the proposers that draft from the target's own choices: bigrams and Token Recycling. Pure.
"""

from collections import OrderedDict
from collections.abc import Iterable

from speculative.tree import ROOT
from verifier_service.proposers.batched import DraftLevel, ProposedSession

MOST_TENANTS = 64
"""Most tenants that have a table; the table used longest ago is forgotten first."""
MOST_TOKENS = 32_768
"""Most tokens whose successors a table keeps; the token learnt longest ago is forgotten first."""


class SuccessorTable:
    """The ids that the target found likeliest after a token when it last met the token."""

    def __init__(self) -> None:
        self._following: OrderedDict[int, tuple[int, ...]] = OrderedDict()

    def learn(self, token: int, following: tuple[int, ...]) -> None:
        """Replaces the likeliest successors of a token."""
        self._following[token] = following
        self._following.move_to_end(token)
        if len(self._following) > MOST_TOKENS:
            self._following.popitem(last=False)

    def after(self, token: int) -> tuple[int, ...]:
        """The ids that may follow a token, likeliest first."""
        return self._following.get(token, ())


class TenantTables:
    """A table per tenant for sessions that may learn, else a table per session."""

    def __init__(self) -> None:
        self._tables: OrderedDict[str, SuccessorTable] = OrderedDict()

    def table(self, session: ProposedSession) -> SuccessorTable:
        """The table that the session may read and extend."""
        if not session.learn:
            return SuccessorTable()
        table = self._tables.setdefault(session.tenant, SuccessorTable())
        self._tables.move_to_end(session.tenant)
        if len(self._tables) > MOST_TENANTS:
            self._tables.popitem(last=False)
        return table


class LevelTree:
    """The draft of one session, level by level: `leaves` are the nodes whose children come next.

    Args:
        last: the last committed token.
        node_limit: the most nodes of the whole draft.
        least_survival: the survival below which a node is not worth a row.
    """

    def __init__(self, last: int, node_limit: int, least_survival: float) -> None:
        self.leaves = [(ROOT, last, 1.0)]
        """Node index, token and survival of each leaf."""
        self._left = node_limit
        self._least_survival = least_survival
        self._count = 0

    def add(self, children: Iterable[tuple[float, int, int]]) -> DraftLevel | None:
        """Keeps the likeliest children as the next level; None if no child is worth a row.

        Args:
            children: survival, parent's node index and token of each child.
        """
        worth = [child for child in children if child[0] >= self._least_survival]
        worth.sort(key=lambda child: -child[0])
        worth = worth[: self._left]
        if not worth:
            self.leaves = []
            return None
        self.leaves = [(self._count + at, token, survival) for at, (survival, _, token) in enumerate(worth)]
        self._count += len(worth)
        self._left -= len(worth)
        survivals, parents, tokens = zip(*worth, strict=True)
        return DraftLevel(tokens, parents, survivals)
