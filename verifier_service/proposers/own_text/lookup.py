"""Copies the tokens that followed the longest earlier occurrence of a session's last tokens.

The last tokens may be drafted ones: then the copy goes on below a leaf of other sources' drafts.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import takewhile

from outrider.wire.names import LOOKUP_BELOW
from speculative.draft import MAX_DRAFT_NODES, Draft
from speculative.draft_nodes import Leaf
from speculative.draft_pool import DraftPool
from speculative.lookup import survival
from verifier_service.engine.source_policy import Reputations
from verifier_service.observe.round_log import Rest, SourceState
from verifier_service.proposers import ProposerInit, make_leaf_proposer
from verifier_service.remote_sources.source_rests import SourceThrottle
from verifier_service.sessions.request import SessionRequest

# A node that is accepted less often than this costs more than it saves, as each node is a row of the pass.
_LEAST_SURVIVAL = 0.05
_LEAST_MATCH = 2
"""Tokens that have to match for a drafted path to be continued: a match of one token is seldom right, and
each draft takes time to merge."""
LEAVES = 1
"""Leaves of a session that are continued in one step: a second one gained nothing in counts."""
NODES = 6
"""Nodes below one leaf. Each takes some two microseconds to merge, so this bounds what a step pays."""
LEAST_SURVIVAL = 0.1
"""Survival of a leaf below which nothing is looked up: its continuation would hardly pay for its rows."""
MOST_READ = 4096
"""Ids of a session that a proposer reads in one step: to index them takes some milliseconds. A long prompt of
which much was cached takes several steps, and so does what was not read during a rest."""
_PARENTS = tuple(range(-1, MAX_DRAFT_NODES - 1))


class LookupProposer:
    """Looks the session's last tokens up in its own prompt and output. A Proposer."""

    def __init__(self, init: ProposerInit) -> None:
        self._text = init.text
        self._read = 0

    def append(self, tokens: Sequence[int]) -> None:
        """Adds tokens to the index."""
        self._read = self._text.take(self._read, tokens)

    def propose(self, node_limit: int) -> Draft | None:
        """A chain of at most `node_limit` copied tokens, or None where the last tokens are new."""
        index = self._text.index
        survivals = chain_survival(survival(index.match_length))
        return chain(index.draft(min(node_limit, len(survivals))).tokens, survivals)


class LookupBelow:
    """Looks up what followed a drafted path, together with the text before it. A LeafProposer.

    Cheap drafts below dear ones, as in staged speculative decoding (arXiv 2308.04623) and CS Drafting
    (arXiv 2312.11462), with the order turned round: the lookup goes on where a model's draft ends.
    """

    def __init__(self, init: ProposerInit) -> None:
        self._text = init.text
        self._read = 0

    def append(self, tokens: Sequence[int]) -> None:
        """Adds tokens to the index."""
        self._read = self._text.take(self._read, tokens)

    def propose_below(self, path: Sequence[int], most: int) -> Draft | None:
        """A chain of at most `most` copied tokens, or None where the path's last tokens are new."""
        copied = self._text.index.draft_below(path, most)
        if copied.match_length < _LEAST_MATCH:
            return None
        return chain(copied.tokens, chain_survival(survival(copied.match_length)))


@lru_cache(maxsize=64)
def chain_survival(each: float) -> tuple[float, ...]:
    """Survival of each node of a chain, where `each` node is accepted with this probability after its parent.

    Ends where a further node would not be worth its row.
    """
    powers = (each**depth for depth in range(1, MAX_DRAFT_NODES + 1))
    return tuple(takewhile(lambda power: power >= _LEAST_SURVIVAL, powers))


def chain(tokens: tuple[int, ...], survivals: tuple[float, ...]) -> Draft | None:
    """The draft of a chain of tokens, cut to as many as have a survival; None for an empty chain."""
    count = min(len(tokens), len(survivals))
    return Draft(tokens[:count], _PARENTS[:count], survivals[:count]) if count else None


class LeafDrafts:
    """The leaf proposer of one session: what it adds below the leaves of other sources' drafts.

    A model's draft ends where a further level would not pay for its time; a lookup goes on from there for
    microseconds. The same rule as for remote sources lets it rest where it gains too little.

    Args:
        source_index: its index among the session's sources.
        init: what its proposer needs of the request.
        request: the session's request.
        reputations: what other sessions taught about the source.
    """

    def __init__(
        self, source_index: int, init: ProposerInit, request: SessionRequest, reputations: Reputations
    ) -> None:
        self.source_index = source_index
        self._proposer = make_leaf_proposer(LOOKUP_BELOW, init)
        self._appended = 0
        """How many of the session's leading tokens the proposer has."""
        self._throttle = SourceThrottle(reputations.of_address((LOOKUP_BELOW,), request.params).activity)
        self._drafted = False
        """Whether it has drafted since the last round."""

    @property
    def state(self) -> SourceState:
        """How the source stands."""
        rest = Rest.GAINS_TOO_LITTLE if self._throttle.resting else Rest.NONE
        if self._throttle.is_spared:
            rest = Rest.NOT_ADMITTED
        return SourceState(self.source_index, rest, None)

    def propose(
        self, ids: Sequence[int], pool: DraftPool, without: frozenset[int], node_limit: int
    ) -> Iterator[tuple[Leaf, Draft]]:
        """Drafts below the likeliest leaves of the pool; none while the source rests, or has ids to read.

        Args:
            ids: all committed ids of the session.
            without: indices of sources whose leaves are not continued, as they have drafted from this text.
        """
        if self._throttle.resting:
            return
        leaves = pool.leaves(LEAVES, LEAST_SURVIVAL, without | {self.source_index})
        if not leaves:
            return
        new = ids[self._appended : self._appended + MOST_READ]
        self._proposer.append(new)
        self._appended += len(new)
        if self._appended < len(ids):
            return
        for leaf in leaves:
            most = min(NODES, node_limit - len(leaf.path))
            if (found := self._proposer.propose_below(leaf.path, most)) is not None:
                self._drafted = True
                yield leaf, found

    def committed(self, saved: float, *, spared: bool, batch: int, step: int, right: bool) -> None:
        """Notes a committed round; see `SourceThrottle.committed`."""
        self._throttle.committed(saved, self._drafted, spared, batch, step, right=right)
        self._drafted = False
