"""Counts of n-grams with backoff: how likely each token is after the last few, as texts had it.

What differs from the retrieval worker's suffix array: counts keep no text, take bounded memory however long
the texts are, and give every token a probability, so children are ranked by the request's parameters and the
session's noise as a model's are. A suffix array finds longer matches. Pure; knows no tokenizer and no files.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

ORDERS = (1, 2, 3)
"""Numbers of tokens that predict the next one; longer contexts come first."""
_FOLLOWERS = 8
"""The most tokens kept after one context, the most frequent ones."""
_BYTES = 12
"""Bytes of one context, and of one token after a context, at most."""
_FACTOR = np.uint64(0x9E3779B97F4A7C15)

Tokens = NDArray[np.uint32]


class NgramCounts:
    """Probabilities of the next token, interpolated as Witten and Bell have it (1991).

    Args:
        tokens: the texts' ids, one after the other, uint32[N]; below `width`.
        width: size of the vocabulary.
        most_bytes: memory of the tables; the rarest contexts are left out.
    """

    def __init__(self, tokens: Tokens, width: int, most_bytes: int) -> None:
        counts = np.bincount(tokens, minlength=width) + 1.0
        self._single = counts / counts.sum()
        self._logs = np.log(self._single).astype(np.float32)
        self._orders = [_Order(tokens, order, most_bytes // len(ORDERS)) for order in ORDERS]

    @property
    def nbytes(self) -> int:
        """Bytes of the tables of contexts."""
        return sum(order.nbytes for order in self._orders)

    def logprobs(self, context: Sequence[int]) -> NDArray[np.float32]:
        """Natural logarithms of the next token's probabilities after these ids: float32[width]."""
        found = [followers for order in self._orders if (followers := order.after(context)) is not None]
        logs: NDArray[np.float32] = self._logs.copy()
        if not found:
            return logs
        seen = np.unique(np.concatenate([tokens for tokens, _ in found]))
        chances, left = self._single[seen], 1.0
        for tokens, shares in found:
            rest = 1.0 - float(shares.sum())
            chances = chances * rest
            chances[np.searchsorted(seen, tokens)] += shares
            left *= rest
        logs += np.float32(np.log(left))
        logs[seen] = np.log(chances)
        return logs


class _Order:
    """The tokens that followed contexts of one length, with their shares."""

    def __init__(self, tokens: Tokens, length: int, most_bytes: int) -> None:
        self._length = length
        self._keys, self._starts, self._tokens, self._shares = _followers(
            tokens, length, most_bytes // _BYTES
        )

    @property
    def nbytes(self) -> int:
        return self._keys.nbytes + self._starts.nbytes + self._tokens.nbytes + self._shares.nbytes

    def after(self, context: Sequence[int]) -> tuple[Tokens, NDArray[np.float64]] | None:
        """The tokens after a context and their shares of the probability; None: the context is unseen."""
        if len(context) < self._length or not len(self._keys):
            return None
        key = _keys(np.array(context[-self._length :], dtype=np.uint32), self._length)[0]
        at = int(np.searchsorted(self._keys, key))
        if at == len(self._keys) or self._keys[at] != key:
            return None
        low, high = self._starts[at], self._starts[at + 1]
        return self._tokens[low:high], self._shares[low:high].astype(np.float64)


def _followers(
    tokens: Tokens, length: int, most: int
) -> tuple[NDArray[np.uint64], NDArray[np.int64], Tokens, NDArray[np.float32]]:
    """Contexts in order of key, where each one's followers start, the followers, and their shares."""
    keys, following = _keys(tokens[:-1], length), tokens[length:]
    order = np.lexsort((following, keys))
    keys, following = keys[order], following[order]
    first = _first_of_each(keys, following)
    counts = np.diff(np.append(first, len(keys)))
    keys, following = keys[first], following[first]
    order = np.lexsort((-counts, keys))
    keys, following, counts = keys[order], following[order], counts[order]
    starts = _first_of_each(keys)
    kinds = np.diff(np.append(starts, len(keys)))
    totals = np.add.reduceat(counts, starts) if len(counts) else counts
    rank = np.arange(len(keys)) - np.repeat(starts, kinds)
    kept = (rank < _FOLLOWERS) & np.repeat(_frequent(totals, np.minimum(kinds, _FOLLOWERS), most), kinds)
    # The more kinds of tokens follow a context, the likelier is one that the texts did not have.
    shares = counts / np.repeat(totals + kinds, kinds)
    keys, following, shares = keys[kept], following[kept], shares[kept]
    starts = _first_of_each(keys)
    return keys[starts], np.append(starts, len(keys)), following, shares.astype(np.float32)


def _frequent(totals: NDArray[np.int64], sizes: NDArray[np.int64], most: int) -> NDArray[np.bool_]:
    """The contexts that occur most often, as many as take `most` entries with their followers."""
    order = np.argsort(-totals, kind="stable")
    kept = np.zeros(len(totals), np.bool_)
    kept[order[np.cumsum(sizes[order] + 2) <= most]] = True
    return kept


def _first_of_each(*columns: NDArray[np.integer]) -> NDArray[np.int64]:
    """Indices where a run of equal rows begins."""
    if not len(columns[0]):
        return np.zeros(0, np.int64)
    changed = np.ones(len(columns[0]), np.bool_)
    changed[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return np.flatnonzero(changed)


def _keys(tokens: Tokens, length: int) -> NDArray[np.uint64]:
    """A hash of each run of `length` tokens: uint64[max(0, N - length + 1)]."""
    count = max(0, len(tokens) - length + 1)
    keys = np.zeros(count, np.uint64)
    for place in range(length):
        keys = (keys ^ (tokens[place : place + count].astype(np.uint64) + np.uint64(1))) * _FACTOR
        keys ^= keys >> np.uint64(29)
    return keys
