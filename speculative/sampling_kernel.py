"""The place of a kernel: compiled code that draws noise bits and chooses the tokens of rows in memory.

A process that finds a compiler puts one here (`outrider.lm.compiled.row_kernel`). Without a kernel the same
is computed in NumPy. A kernel changes no token: what it cannot prove, it leaves to `choose_token`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from speculative.batch_choice import RowChoice


class SamplingKernel(Protocol):
    """Compiled code for `noise.leads` and for `batch_choice.sample_rows`; usable from any thread."""

    def leads(self, seed: int, position: int, vocabulary_size: int) -> NDArray[np.uint16]:
        """The leading 16 bits of each id at `position`: uint16[vocabulary_size]."""

    def tokens(self, choices: "Sequence[RowChoice]") -> list[int | None]:
        """The token of each choice; None where `choose_token` has to decide."""


_used: SamplingKernel | None = None


def current_kernel() -> SamplingKernel | None:
    """The kernel of this process; None where NumPy does its work."""
    return _used


def use_kernel(kernel: SamplingKernel | None) -> SamplingKernel | None:
    """Has this process use the kernel from now on, and returns the one that it used so far; None is NumPy."""
    global _used
    before, _used = _used, kernel
    return before
