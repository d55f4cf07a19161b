"""Copies the tokens that followed the longest earlier occurrence of a session's last tokens."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import takewhile

from speculative.draft import MAX_DRAFT_NODES, Draft
from speculative.lookup import survival
from speculative.lookup.suffix_automaton import SuffixAutomaton
from verifier_service.proposers import ProposerInit

# A node that is accepted less often than this costs more than it saves, as each node is a row of the pass.
_LEAST_SURVIVAL = 0.05
_PARENTS = tuple(range(-1, MAX_DRAFT_NODES - 1))


class LookupProposer:
    """Looks the session's last tokens up in its own prompt and output. A Proposer."""

    def __init__(self, init: ProposerInit) -> None:
        self._index = SuffixAutomaton()

    def append(self, tokens: Sequence[int]) -> None:
        """Adds tokens to the index."""
        for token in tokens:
            self._index.append(token)

    def propose(self, node_limit: int) -> Draft | None:
        """A chain of at most `node_limit` copied tokens, or None where the last tokens are new."""
        survivals = chain_survival(survival(self._index.match_length))
        return chain(self._index.draft(min(node_limit, len(survivals))).tokens, survivals)


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
