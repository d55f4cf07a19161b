"""A toy drafting model and a toy target: functions of the ids before, which differ at times."""

import math
from collections.abc import Sequence

import numpy as np

from outrider.edge.top_k import DraftModelFailed, TopK
from speculative.hashing import prefix_hash

VOCABULARY = 97
DIGEST = "d" * 64


def guess(ids: Sequence[int]) -> int:
    """What the toy model finds likeliest."""
    return prefix_hash(ids) % VOCABULARY


def truth(ids: Sequence[int], wrong_of_8: int = 2) -> int:
    """What the toy target chooses under greedy decoding: the guess, but for some of eight prefixes."""
    return (guess(ids) + (prefix_hash(ids) // 1009 % 8 < wrong_of_8)) % VOCABULARY


class ToyModel:
    """A `DraftModel` that checks that it is asked as it may be asked.

    Attributes:
        ids: what it has read.
        fails: how many further calls fail.
        reads: number of ids read so far.
    """

    def __init__(self, digest: str = DIGEST) -> None:
        self.name = "toy"
        self.max_length = 512
        self.ids: list[int] = []
        self.fails = 0
        self.reads = 0
        self.closed = False
        self._digest = digest

    def forward(self, ids: Sequence[int]) -> TopK:
        assert ids
        self.ids.extend(ids)
        self.reads += len(ids)
        if self.fails:
            self.fails -= 1
            raise DraftModelFailed("the toy is tired")
        best = self.guess()
        return TopK(
            np.array([best, (best + 1) % VOCABULARY]),
            np.array([math.log(0.9), math.log(0.1)], dtype=np.float32),
        )

    def guess(self) -> int:
        return guess(self.ids)

    def rewind(self, to: int) -> None:
        assert 0 <= to <= len(self.ids)
        del self.ids[to:]

    def digest(self) -> str:
        return self._digest

    def close(self) -> None:
        self.closed = True


class TextToy(ToyModel):
    """The toy with text: an id stands for the character 32 + id; the last id ends an answer."""

    vocabulary_size = VOCABULARY
    end_ids = frozenset((VOCABULARY - 1,))

    def encode(self, text: str) -> list[int]:
        return [ord(character) - 32 for character in text]

    def token_bytes(self, id_: int) -> bytes:
        return chr(32 + id_).encode()
