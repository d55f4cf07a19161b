"""Finds documents that nearly copy a held-out text, by the runs of tokens that both share.

Training, and every corpus that a figure uses, keep held-out text out by this one rule.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

WINDOW = 50
"""Length of the compared runs, in tokens."""

SHARE = 0.1
"""Share of its runs that a document has in common with held-out text, from which on it is a near-copy."""

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class KeptOut:
    """Held-out texts, as token ids, to compare documents with."""

    def __init__(self, texts: Iterable[Sequence[int] | npt.NDArray[np.uint32]]) -> None:
        hashes = [windows(ids) for ids in texts]
        self._known = np.unique(np.concatenate(hashes or [np.zeros(0, dtype=np.uint64)]))

    def nearly_copied_by(self, ids: Sequence[int] | npt.NDArray[np.uint32]) -> bool:
        """Whether a document shares a tenth or more of its runs of 50 tokens; a shorter document has none."""
        hashes = windows(ids)
        if not len(hashes) or not len(self._known):
            return False
        # The texts' hashes are sorted once; np.isin would sort them for every document.
        nearest = self._known[np.minimum(np.searchsorted(self._known, hashes), len(self._known) - 1)]
        return float((nearest == hashes).mean()) >= SHARE


def windows(ids: Sequence[int] | npt.NDArray[np.uint32]) -> npt.NDArray[np.uint64]:
    """A hash of every run of `WINDOW` ids, in order: uint64, shape (max(0, len(ids) - WINDOW + 1),)."""
    values = np.asarray(ids, dtype=np.uint64) + np.uint64(1)
    count = max(0, len(values) - WINDOW + 1)
    hashes = np.zeros(count, dtype=np.uint64)
    for offset in range(WINDOW if count else 0):
        hashes = hashes * _MULTIPLIER + values[offset : offset + count]
    return hashes
