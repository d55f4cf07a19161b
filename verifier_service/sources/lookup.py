"""Copies what followed the longest earlier occurrence of the last ids; knows nothing of the target."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import takewhile

from speculative.draft import MAX_DRAFT_NODES, Draft
from speculative.lookup import survival
from speculative.lookup.suffix_automaton import SuffixAutomaton
from verifier_service.sources import Given

# A node less likely than this to be accepted costs a row of the pass that it does not earn.
_FLOOR = 0.05
_PARENTS = tuple(range(-1, MAX_DRAFT_NODES - 1))


class LookupSource:
    """In-session lookup over prompt and output. A LocalSource."""

    def __init__(self, given: Given) -> None:
        self._index = SuffixAutomaton()

    def push(self, tokens: Sequence[int]) -> None:
        """See LocalSource."""
        for token in tokens:
            self._index.append(token)

    def draft(self, node_limit: int) -> Draft | None:
        """See LocalSource; a chain."""
        likely = shares(survival(self._index.match_length))
        return chain(self._index.draft(min(node_limit, len(likely))).tokens, likely)


@lru_cache(maxsize=64)
def shares(each: float) -> tuple[float, ...]:
    """Survivals along a chain of ids, each as likely as this given those before, as far as they are worth
    their rows."""
    powers = (each**depth for depth in range(1, MAX_DRAFT_NODES + 1))
    return tuple(takewhile(lambda power: power >= _FLOOR, powers))


def chain(tokens: tuple[int, ...], likely: tuple[float, ...]) -> Draft | None:
    """Copied ids as a draft with these survivals; None where there are none."""
    count = min(len(tokens), len(likely))
    return Draft(tokens[:count], _PARENTS[:count], likely[:count]) if count else None
