"""The rolling 64-bit hash of a prefix of ids, by which messages name the prefix that they continue.

`hash(ids + [t]) = hash(ids) * MULTIPLIER + mix(t)  mod 2**64`, with `hash([]) = EMPTY` and `mix(t)` the first
output of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) seeded with t. The hash guards against accidents,
not attackers: a collision costs a useless draft, never a wrong token. docs/exactness.md publishes vectors.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

EMPTY = 0x6F75747269646572
"""The hash of no ids ("outrider" in ASCII)."""
MULTIPLIER = 0xD1342543DE82EF95
"""Multiplier of a 64-bit congruential generator (Steele and Vigna, 2022): odd, hence invertible."""

_MASK = (1 << 64) - 1
_INVERSE = pow(MULTIPLIER, -1, 1 << 64)


@lru_cache(maxsize=1 << 16)
def _mix(token: int) -> int:
    z = (token + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def extend(prefix: int, token: int) -> int:
    """The hash of a prefix and one more id; `prefix` is the hash of the prefix."""
    return (prefix * MULTIPLIER + _mix(token)) & _MASK


def prefix_hash(ids: Sequence[int]) -> int:
    """The hash of `ids`."""
    return int(prefix_hashes(ids)[-1])


def prefix_hashes(ids: Sequence[int]) -> NDArray[np.uint64]:
    """The hashes of ids[:0], ids[:1], … ids[:n]: uint64[n + 1], without a loop."""
    z = np.asarray(ids, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed = z ^ (z >> np.uint64(31))
    # Unrolled, h_n = M**n * (EMPTY + sum of mix(t_i) / M**(i + 1)): a running sum instead of a loop.
    shrink = _powers(_INVERSE, len(mixed))
    terms = np.concatenate([np.array([EMPTY], dtype=np.uint64), mixed * shrink[1:]])
    return np.cumsum(terms, dtype=np.uint64) * _powers(MULTIPLIER, len(mixed))


def _powers(base: int, highest: int) -> NDArray[np.uint64]:
    factors = np.full(highest + 1, base, dtype=np.uint64)
    factors[0] = 1
    return np.cumprod(factors, dtype=np.uint64)
