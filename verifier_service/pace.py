"""How long a step is going to take, learnt from the steps before it.

Pure: knows rows and milliseconds, nothing of what is computed.
"""

_WEIGHT = 0.2


class StepPace:
    """A running mean of forward milliseconds per power of two of rows."""

    __slots__ = ("_mean_ms",)

    def __init__(self) -> None:
        self._mean_ms: dict[int, float] = {}

    def record(self, rows: int, milliseconds: float) -> None:
        """Learn from one step of `rows` input tokens."""
        bucket = rows.bit_length()
        mean = self._mean_ms.get(bucket, milliseconds)
        self._mean_ms[bucket] = mean + _WEIGHT * (milliseconds - mean)

    def expected_ms(self, rows: int) -> float:
        """What a step of `rows` should take; 0 where no step was ever seen.

        Between sizes seen, the nearest one decides; a larger step than any seen scales with its rows.
        """
        if not self._mean_ms:
            return 0.0
        bucket = rows.bit_length()
        nearest = min(self._mean_ms, key=lambda seen: (abs(seen - bucket), seen))
        return self._mean_ms[nearest] * float(2 ** max(0, bucket - nearest))
