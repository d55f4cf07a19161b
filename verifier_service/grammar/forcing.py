"""The tokens in which a grammar's forced text goes on: where only some bytes may follow, which ids they are.

A grammar speaks of bytes, and several ids may write the same bytes: where `name` is forced, `n` and `na` are
allowed, too. So only an id that stands alone in its mask is certain. Pure; knows no grammar library.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from speculative.grammar import ForcedToken

Allowed = Callable[[Sequence[int]], NDArray[np.bool_]]
"""Mask of the ids that may follow a path of drafted tokens; raises EmptySupport for none."""


def forced_tokens(allowed: Allowed, text: bytes, tokens: Sequence[bytes], most: int) -> list[ForcedToken]:
    """A chain of tokens along the forced text, and the one id that may follow, where there is only one.

    The chain ends with a token that reaches beyond the forced text: plain decoding might never look at what
    follows there. Raises EmptySupport where no id may follow the committed ids.

    Args:
        text: the bytes that the grammar forces; may be empty, as before an end-of-sequence id.
        tokens: bytes of each id.
        most: the most tokens.
    """
    chain: list[ForcedToken] = []
    path: list[int] = []
    while len(chain) < most:
        mask = allowed(path)
        only = bool(np.count_nonzero(mask) == 1)
        if not only and not text:
            break
        token = _pick(np.flatnonzero(mask).tolist(), text, tokens)
        if token is None:
            break
        chain.append(ForcedToken(token, only))
        path.append(token)
        written = tokens[token] if token < len(tokens) else b""
        if not written or not text.startswith(written):
            break
        text = text[len(written) :]
    return chain


def _pick(ids: Sequence[int], text: bytes, tokens: Sequence[bytes]) -> int | None:
    """The id that most likely writes the forced text, out of those that are allowed; None: no id does.

    An id that reaches beyond the text is taken if all others write a part of what it writes. Of ids that
    write the same the last is taken: vocabularies with fallbacks for single bytes have them in front.
    """
    if len(ids) == 1:
        return ids[0]
    longest = max(ids, key=lambda id_: (len(tokens[id_]), id_))
    if all(tokens[longest].startswith(tokens[id_]) for id_ in ids):
        return longest
    within = [id_ for id_ in ids if tokens[id_] and text.startswith(tokens[id_])]
    return max(within, key=lambda id_: (len(tokens[id_]), id_), default=None)
