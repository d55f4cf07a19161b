"""How long sessions wait, read their prompts and decode: histograms since the start.

Pure: the clock is an argument. One thread writes; any may read.
"""

from verifier_service.timings import Samples

BOUNDS_MS = (
    *(1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1e3, 2e3, 4e3, 8e3),
    *(16e3, 32e3, 64e3, 128e3, 256e3, 512e3),
)
"""Upper bounds of the histograms' buckets, in ms."""

QUEUED, READING, DECODING = range(3)


class Phases:
    """Of sessions by handle: queued, then the prompt is read, then decoding."""

    __slots__ = ("_at", "decode", "prefill", "queue")

    def __init__(self) -> None:
        self.queue = Samples(bounds=BOUNDS_MS)
        """From the Open until the session's first pass can be planned."""
        self.prefill = Samples(bounds=BOUNDS_MS)
        """From there to the end of its first round."""
        self.decode = Samples(bounds=BOUNDS_MS)
        """From there to its end."""
        self._at: dict[int, tuple[int, float]] = {}

    def opened(self, handle: int, now_s: float) -> None:
        """It waits for its turn."""
        self._at[handle] = (QUEUED, now_s)

    def began(self, handle: int, now_s: float) -> None:
        """It has memory; one that had given it up and has it again goes on in its phase."""
        self._move(handle, QUEUED, READING, self.queue, now_s)

    def committed(self, handle: int, now_s: float) -> None:
        """It had a round."""
        if self._at.get(handle, (DECODING, 0.0))[0] == READING:
            self._move(handle, READING, DECODING, self.prefill, now_s)

    def ended(self, handle: int, now_s: float) -> None:
        """It is over, or parked."""
        phase, since_s = self._at.pop(handle, (QUEUED, 0.0))
        if phase == DECODING:
            self.decode.add((now_s - since_s) * 1000)

    def _move(self, handle: int, phase: int, to: int, samples: Samples, now_s: float) -> None:
        at = self._at.get(handle)
        if at is not None and at[0] == phase:
            samples.add((now_s - at[1]) * 1000)
            self._at[handle] = (to, now_s)
