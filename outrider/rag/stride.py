"""How many retrievals are guessed before a search verifies them. Pure: callers pass in the seconds."""

from collections import deque
from collections.abc import Sequence
from typing import Protocol

MOST = 16
"""Most guesses of one search."""
_WINDOW = 5
"""Searches from which accuracy and times are estimated."""
_MOST_ACCURACY = 0.6
"""Highest accuracy to assume, so that one good run does not make strides long."""


class Stride(Protocol):
    """Decides how many retrievals to guess before the next search."""

    @property
    def guesses(self) -> int:
        """Number of guesses before the next search; at least 1."""
        ...

    def saw(self, guesses: int, right: int, piece_s: Sequence[float], search_s: float) -> None:
        """Learns from one search: how many guesses it verified, and how many were right before a wrong one.

        Args:
            piece_s: seconds that each piece of text took which was generated under a guess.
            search_s: seconds that the search took.
        """
        ...


class FixedStride:
    """Always the same number of guesses."""

    def __init__(self, guesses: int) -> None:
        self.guesses = guesses

    def saw(self, guesses: int, right: int, piece_s: Sequence[float], search_s: float) -> None:
        """Learns nothing."""


class AdaptiveStride:
    """The stride of most verified pieces per second, as RaLMSpec's scheduler (OS3) chooses.

    With accuracy g, seconds a for a piece and b for a search, a stride of s brings (1 - g^s) / (1 - g)
    verified pieces in s a + b seconds on average. All three are estimated from the last searches.
    """

    def __init__(self, first: int = 1) -> None:
        self._seen: deque[tuple[int, int, float, float]] = deque(maxlen=_WINDOW)
        self._guesses = first

    @property
    def guesses(self) -> int:
        """Number of guesses before the next search."""
        return self._guesses

    def saw(self, guesses: int, right: int, piece_s: Sequence[float], search_s: float) -> None:
        """Learns accuracy and times, and chooses anew."""
        if not guesses:
            return
        self._seen.append((guesses, right, sum(piece_s) / len(piece_s), search_s))
        rights = sum(right for _, right, _, _ in self._seen)
        wrongs = sum(right < guesses for guesses, right, _, _ in self._seen)
        accuracy = min(rights / (rights + wrongs), _MOST_ACCURACY)
        piece = sum(piece for _, _, piece, _ in self._seen) / len(self._seen)
        search = sum(search for _, _, _, search in self._seen) / len(self._seen)
        self._guesses = best_stride(accuracy, piece, search)


def best_stride(accuracy: float, piece_s: float, search_s: float) -> int:
    """The stride, 1 to MOST, of most verified pieces per second; the shortest of equals."""
    return max(
        range(1, MOST + 1),
        key=lambda stride: (
            sum(accuracy**step for step in range(stride)) / (stride * piece_s + search_s + 1e-12),
            -stride,
        ),
    )
