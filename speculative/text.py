"""Text of generated ids, a piece at a time; knows nothing of how the ids were generated."""

import codecs
from collections.abc import Callable, Iterable

from speculative.stop import FinishReason, completed_at


class TextStream:
    """Text of a growing list of ids: the pieces joined are a pure function of the ids, however split.

    The whole text is the ids' bytes up to the first completed stop string, decoded as
    `bytes.decode("utf-8", "replace")` does. The stream holds back an incomplete character and a possible
    beginning of a stop string.

    Args:
        token_bytes: bytes of an id, empty for special ids.
        stops: stop strings as bytes, none empty.
        min_tokens: a stop string counts only if generated id number `min_tokens` or a later one completes it.
    """

    __slots__ = ("_decoder", "_early", "_held", "_stopped", "_stops", "_token_bytes")

    def __init__(
        self, token_bytes: Callable[[int], bytes], stops: tuple[bytes, ...], min_tokens: int = 0
    ) -> None:
        self._token_bytes = token_bytes
        self._stops = stops
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = b""
        self._stopped = False
        self._early = max(0, min_tokens - 1)  # number of ids to come that cannot complete a stop string

    def push(self, ids: Iterable[int]) -> str:
        """Takes the next ids; returns the text that they decide."""
        return "".join(self._take(self._token_bytes(token)) for token in ids)

    def finish(self, reason: FinishReason | None = None) -> str:
        """Ends the stream; returns the text that was held back and is no stop string.

        The text does not depend on the reason: it is a function of the ids alone.
        """
        piece, self._held, self._stopped = self._held, b"", True
        return self._decoder.decode(piece, final=True)

    def _take(self, data: bytes) -> str:
        if self._stopped:
            return ""
        before = len(self._held)
        self._held += data
        starts = []
        if self._early:
            self._early -= 1
        else:
            # Id by id, so that the first *completed* stop string decides, as it does where the request ends.
            found = (completed_at(self._held, stop, before) for stop in self._stops)
            starts = [start for start in found if start >= 0]
        self._stopped = bool(starts)
        ready = min(starts) if starts else len(self._held) - self._undecided()
        piece, self._held = self._held[:ready], b"" if starts else self._held[ready:]
        return self._decoder.decode(piece)

    def _undecided(self) -> int:
        """Number of bytes at the end that may begin a stop string."""
        return max((_overlap(self._held, stop) for stop in self._stops), default=0)


def _overlap(data: bytes, stop: bytes) -> int:
    """Length of the longest proper prefix of `stop` that `data` ends with."""
    longest = min(len(data), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if data.endswith(stop[:n])), 0)
