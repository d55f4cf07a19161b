"""The part of a target that decoding uses."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.lm.plan import Share
from outrider.lm.pool import SlotPool


class Logits(Protocol):
    """What a forward returns: something that is a float32 array on the CPU."""

    def numpy(self) -> NDArray[np.float32]:
        """[rows wanted, vocabulary]."""


class Target(Protocol):
    """A PackedLM, or what stands in for one."""

    pool: SlotPool

    def forward(self, shares: Sequence[Share]) -> Logits:
        """See PackedLM."""
