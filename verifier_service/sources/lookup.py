"""Copies what followed the longest earlier occurrence of the session's last ids; knows nothing of the target."""

from collections.abc import Sequence

from speculative.lookup import LOOKUPS, survival
from speculative.named import load
from verifier_service.sources import Continuation


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
        count = len(copied.tokens)
        if not count:
            return None
        each = survival(copied.match_length)
        return Continuation(
            copied.tokens, tuple(range(-1, count - 1)), tuple(each**depth for depth in range(1, count + 1))
        )
