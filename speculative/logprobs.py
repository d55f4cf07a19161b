"""What a request may be told of its ids' probabilities; knows nothing of logits (`sampling` computes it)."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from speculative.errors import InvalidRequest

MAX_TOP_LOGPROBS = 20


class LogprobsOf(StrEnum):
    """The distributions that a log-probability can be of."""

    RAW = "raw"
    """Softmax of the target's logits as they are."""
    PROCESSED = "processed"
    """The one that is sampled from; greedy: of the logits with bias, penalties and masks."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """What is told of each generated id.

    Raises:
        InvalidRequest: a field is out of its range.
    """

    top_logprobs: int = 0
    """How many of the likeliest ids are told beside the generated one; 0 to 20."""
    logprobs_of: LogprobsOf = LogprobsOf.RAW

    def __post_init__(self) -> None:
        top = self.top_logprobs
        if isinstance(top, bool) or not isinstance(top, int) or not 0 <= top <= MAX_TOP_LOGPROBS:
            raise InvalidRequest(f"top_logprobs is {top!r}; 0 to {MAX_TOP_LOGPROBS} are possible")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One generated id's natural log-probability, and the likeliest ids' at its place.

    Packed, as a worker keeps one for every id of its sessions.
    """

    logprob: float
    top_ids: "array[int]"
    """uint32, likeliest first, among equals the lowest id first."""
    top_logprobs: "array[float]"
    """float32, one for each of `top_ids`."""

    @classmethod
    def of(cls, logprob: float, top_ids: Iterable[int], top_logprobs: Iterable[float]) -> "TokenLogprob":
        """Packs them."""
        return cls(logprob, array("I", top_ids), array("f", top_logprobs))
