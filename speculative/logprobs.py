"""Log-probabilities that a request may ask for; knows nothing of logits (`sampling` computes them)."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from speculative.errors import InvalidRequest
from speculative.request_bounds import MAX_TOP_LOGPROBS


class LogprobsOf(StrEnum):
    """The distribution that log-probabilities are taken from."""

    RAW = "raw"
    """Softmax of the target's logits as they are."""
    PROCESSED = "processed"
    """The distribution sampled from; when greedy, softmax of the logits after bias, penalties and masks."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities that a request asks for with each generated id.

    Raises:
        InvalidRequest: a field is out of its range.
    """

    top_logprobs: int = 0
    """Number of likeliest ids to report beside the generated one, 0 to 20."""
    logprobs_of: LogprobsOf = LogprobsOf.RAW
    """Distribution that the log-probabilities are taken from."""

    @property
    def listed(self) -> int:
        """Number of highest-ranked ids that a digest has to list, at least 1: the sum comes with a list."""
        return max(1, self.top_logprobs)

    def __post_init__(self) -> None:
        top = self.top_logprobs
        if isinstance(top, bool) or not isinstance(top, int) or not 0 <= top <= MAX_TOP_LOGPROBS:
            raise InvalidRequest(f"top_logprobs is {top!r}; 0 to {MAX_TOP_LOGPROBS} are possible")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The natural log-probability of one generated id, and those of the likeliest ids at its position.

    Packed, because a worker keeps one for every id of its sessions.
    """

    logprob: float
    """Natural log-probability of the generated id."""
    top_ids: "array[int]"
    """The likeliest ids as uint32, likeliest first, among equals the lowest id first."""
    top_logprobs: "array[float]"
    """The log-probability of each of `top_ids`, as float32."""

    @classmethod
    def of(cls, logprob: float, top_ids: Iterable[int], top_logprobs: Iterable[float]) -> "TokenLogprob":
        """Packs the numbers of one generated id."""
        return cls(logprob, array("I", top_ids), array("f", top_logprobs))
