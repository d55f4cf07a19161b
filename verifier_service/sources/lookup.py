"""Copies what followed the longest earlier occurrence of the last ids; knows nothing of the target."""

from collections.abc import Sequence

from speculative.lookup import LOOKUPS, survival
from speculative.named import load
from verifier_service.sources import Continuation, Given

# A node less likely than this to be accepted costs a row of the pass that it does not earn.
_FLOOR = 0.05


class LookupSource:
    """In-session lookup over prompt and output. A LocalSource."""

    def __init__(self, given: Given) -> None:
        self._index = load(LOOKUPS, "suffix_automaton")()

    def push(self, tokens: Sequence[int]) -> None:
        """See LocalSource."""
        for token in tokens:
            self._index.append(token)

    def draft(self, node_limit: int) -> Continuation | None:
        """See LocalSource; a chain."""
        copied = self._index.draft(node_limit)
        return chain(copied.tokens, survival(copied.match_length))


def chain(tokens: tuple[int, ...], each: float) -> Continuation | None:
    """Copied ids as a draft, each as likely as this given those before; None where none is worth its row."""
    shares = [each**depth for depth in range(1, len(tokens) + 1)]
    count = sum(share >= _FLOOR for share in shares)
    if not count:
        return None
    return Continuation(tokens[:count], tuple(range(-1, count - 1)), tuple(shares[:count]))
