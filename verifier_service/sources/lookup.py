"""Copies what followed the longest earlier occurrence of the last ids; knows nothing of the target."""

from collections.abc import Sequence

from speculative.lookup import LOOKUPS, survival
from speculative.named import load
from verifier_service.sources import Continuation

# A node less likely than this to be accepted costs a row of the pass that it does not earn.
_FLOOR = 0.05


class LookupSource:
    """In-session lookup over prompt and output. A LocalSource."""

    def __init__(self, index: str = "suffix_automaton") -> None:
        self._index = load(LOOKUPS, index)()

    def push(self, tokens: Sequence[int]) -> None:
        """See LocalSource."""
        for token in tokens:
            self._index.append(token)

    def draft(self, node_limit: int) -> Continuation | None:
        """See LocalSource; a chain."""
        copied = self._index.draft(node_limit)
        each = survival(copied.match_length)
        chain = [each**depth for depth in range(1, len(copied.tokens) + 1)]
        count = sum(share >= _FLOOR for share in chain)
        if not count:
            return None
        return Continuation(copied.tokens[:count], tuple(range(-1, count - 1)), tuple(chain[:count]))
