"""The model behind the simulated verifiers: what follows is a hash of everything before it.

One id that is lost, repeated or out of place changes all that come after, so nothing can go wrong unseen.
"""

from collections.abc import Sequence
from functools import lru_cache

from speculative.commit import FinishReason
from speculative.hashing import EMPTY, extend

VOCABULARY = 64
MAX_LENGTH = 512
EOS = 0
MODEL = "toy"

_MASK = (1 << 64) - 1


def next_id(hash_: int, seed: int) -> int:
    """What follows a prefix of this hash in a request of this seed; EOS after one prefix of 61."""
    z = (hash_ ^ (seed * 0x9E3779B97F4A7C15)) & _MASK
    z = ((z ^ (z >> 29)) * 0xBF58476D1CE4E5B9) & _MASK
    z ^= z >> 32
    return EOS if z % 61 == 0 else 1 + (z >> 8) % (VOCABULARY - 1)


def hash_of(ids: Sequence[int]) -> int:
    """The prefix hash, one id after the other: quicker than with arrays where they are few."""
    hash_ = EMPTY
    for id_ in ids:
        hash_ = extend(hash_, id_)
    return hash_


@lru_cache(maxsize=4096)
def golden(prompt: tuple[int, ...], seed: int, most: int) -> tuple[tuple[int, ...], FinishReason]:
    """The generated ids, at most so many, and why they are the last."""
    hash_ = hash_of(prompt)
    ids: list[int] = []
    while len(ids) < most:
        ids.append(next_id(hash_, seed))
        hash_ = extend(hash_, ids[-1])
        if ids[-1] == EOS:
            return tuple(ids), FinishReason.STOP
    return tuple(ids), FinishReason.LENGTH
