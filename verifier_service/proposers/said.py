"""The target's tokens of one round of a session, found by the tokens before them. Pure."""

from collections.abc import Sequence

from speculative.hashing import EMPTY, extend, prefix_hash
from verifier_service.proposers.batched import SeenRound


class CommittedHash:
    """The hash of a session's leading tokens, which only grows.

    Args:
        ids: the session's committed tokens, which grow as the session decodes.
    """

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = ids
        self._length = len(ids)
        self._hash = prefix_hash(ids) if len(ids) else EMPTY

    def at(self, length: int) -> int:
        """The hash of the first `length` tokens; `length` is never smaller than in the call before."""
        for position in range(self._length, length):
            self._hash = extend(self._hash, self._ids[position])
        self._length = max(length, self._length)
        return self._hash


def said_after(before: int, shown: SeenRound) -> dict[int, int]:
    """The target's token after each prefix that the round verified, noise included, by the prefix's hash.

    Args:
        before: hash of the tokens that were committed before the round.
        shown: the round.
    """
    found = {} if shown.said is None else {row.prefix_hash: row.token for row in shown.said.off_path}
    for token in shown.tokens:
        found[before] = token
        before = extend(before, token)
    return found
