"""The tokens in which a grammar's forced text goes on: where only some bytes may follow, which ids they are.

A grammar speaks of bytes, and several ids may write the same bytes: where `name` is forced, `n` and `na` are
allowed, too. So only an id that stands alone in its mask is certain. Pure; knows no grammar library.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from speculative.errors import EmptySupport
from speculative.grammar import ForcedToken

Allowed = Callable[[Sequence[int]], NDArray[np.bool_]]
"""Mask of the ids that may follow a path of drafted tokens; raises EmptySupport for none."""
_MOST_ALLOWED = 512
"""Where more ids are allowed, the text is free: forced text has no more beginnings than bytes."""


def forced_tokens(allowed: Allowed, tokens: Sequence[bytes], most: int) -> list[ForcedToken]:
    """A chain of at most `most` tokens along the forced text, and the id that may follow where there is one.

    The chain ends where the grammar leaves a choice of bytes, or allows nothing.

    Args:
        allowed: of the session's grammar.
        tokens: bytes of each id.
        most: the most tokens; each costs a mask.
    """
    chain: list[ForcedToken] = []
    path: list[int] = []
    while len(chain) < most:
        try:
            mask = allowed(path)
        except EmptySupport:
            break  # the next round finds out, unless the request ends before
        number = int(np.count_nonzero(mask))
        token = _pick(np.flatnonzero(mask).tolist(), tokens) if number <= _MOST_ALLOWED else None
        if token is None:
            break
        chain.append(ForcedToken(token, number == 1))
        path.append(token)
        if token >= len(tokens) or not tokens[token]:
            break  # an end-of-sequence id
    return chain


def _pick(ids: Sequence[int], tokens: Sequence[bytes]) -> int | None:
    """The id that most likely writes the forced text, out of those that are allowed; None: no id does.

    The longest of which every other id writes a part, or which every other id begins with. Of ids that write
    the same the last is taken: vocabularies with fallbacks for single bytes have them in front.
    """
    if len(ids) == 1:
        return ids[0]
    written = [tokens[id_] if id_ < len(tokens) else b"" for id_ in ids]
    if not all(written) or len({text[0] for text in written}) > 1:
        return None  # the text may end here, or go on with another byte
    common = _common(written)
    return max(
        (id_ for id_, text in zip(ids, written, strict=True) if common.startswith(text)),
        key=lambda id_: (len(tokens[id_]), id_),
        default=None,
    )


def _common(written: Sequence[bytes]) -> bytes:
    """The longest text along which no two of the texts differ."""
    longest = max(written, key=len)
    length = len(longest)
    for text in written:
        while not longest.startswith(text[:length]):
            length -= 1
    return longest[:length]
