"""The target of the simulated verifiers: what follows is a hash of everything before it.

One id that is lost, repeated or out of place changes all that come after, so nothing can go wrong unseen.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from benchmarks.simulation.memory import ToyPool
from outrider.lm.plan import SequenceRows
from speculative.digest import HostDigest
from speculative.hashing import EMPTY, extend
from speculative.stop import FinishReason
from verifier_service.engine.core import TargetPass

VOCABULARY = 64
MAX_LENGTH = 512
EOS = 0
MODEL = "toy"

_MASK = (1 << 64) - 1
_LOGITS = np.where(np.eye(VOCABULARY, dtype=bool), np.float32(0.0), np.float32(-1e4))
"""Logits by the id that is next. They leave no doubt about it, whatever noise a request asks for."""


class ToyOutcome:
    """The outcome of a toy pass.

    Args:
        following: the id that follows each wanted row.
    """

    features = None

    def __init__(self, following: Sequence[int]) -> None:
        self._following = following

    def digest(self, index: int) -> HostDigest:
        """Digest of one wanted row."""
        return HostDigest(_LOGITS[self._following[index]])


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


class ToyTarget:
    """Computes passes as a PackedLM does: writes the tables' slots, returns what follows the wanted rows."""

    def __init__(self, pool: ToyPool) -> None:
        self.seeds: dict[int, int] = {}
        """Seed by session handle."""
        self._pool = pool

    def forward(self, begun: TargetPass) -> ToyOutcome:
        """The outcome of a pass. Raises Overloaded."""
        following = [
            next_id(hash_, self.seeds[session.handle])
            for (session, _), sequence in zip(begun.parts, begun.sequences, strict=True)
            for hash_ in self._compute(sequence)
        ]
        return ToyOutcome(following)

    def _compute(self, sequence: SequenceRows) -> list[int]:
        """Prefix hash of each wanted row, from the one in the slot before."""
        table, rows = sequence.table, self._pool.rows
        length, count = table.length, len(sequence.tokens)
        pairs = set(zip(sequence.parents, sequence.tokens, strict=True))
        assert len(pairs) == count, "a node is computed twice"
        table.reserve(length + count)
        prefix = rows[table.slots(length - 1, length)[0]] if length else EMPTY
        hashes: list[int] = []
        for token, parent in zip(sequence.tokens, sequence.parents, strict=True):
            hashes.append(extend(prefix if parent < 0 else hashes[parent], token))
            table.parents.append(parent)
            table.depths.append(table.depths[parent] + 1 if parent >= 0 else 0)
        for slot, hash_ in zip(table.slots(length, length + count), hashes, strict=True):
            rows[slot] = hash_
        return [hashes[row] for row in sequence.want]
