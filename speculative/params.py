"""Sampling parameters of a request; knows nothing of logits (`sampling` applies the parameters)."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from speculative.contrast import Contrast
from speculative.errors import InvalidRequest

SEED_BITS = 53
"""Bits of a seed that is drawn for a request without one: every JSON reader keeps all of its digits."""

GREEDY_BELOW = 1e-5
MAX_BIAS_ENTRIES = 1024
MAX_STOP_IDS = 64


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the target's logits become a token, and which ids end the request; the defaults change nothing.

    The fields apply in this order: contrast, bias, repetition, presence and frequency penalty, `min_tokens`,
    temperature, top-k, top-p, min-p.

    Raises:
        InvalidRequest: a field is out of its range, NaN, infinite or no number.
    """

    temperature: float = 1.0
    """Divisor of the logits, 0 to 100. Below 1e-5 decoding is greedy, without top-k, top-p and min-p."""
    top_k: int = 0
    """Number of likeliest tokens to keep; 0 keeps all."""
    top_p: float = 1.0
    """Probability mass of the likeliest tokens to keep; above 0, at most 1, which keeps all."""
    min_p: float = 0.0
    """Smallest probability to keep, as a share of the likeliest token's probability; 0 to 1."""
    repetition_penalty: float = 1.0
    """Divisor of positive and factor of negative logits of ids in prompt or output; 0.01 to 100."""
    presence_penalty: float = 0.0
    """Number subtracted once from the logit of each id in the output; -100 to 100."""
    frequency_penalty: float = 0.0
    """Number subtracted from an id's logit for each occurrence in the output; -100 to 100."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs (id, number added to its logit), sorted by id; at most 1024, each number -100 to 100."""
    min_tokens: int = 0
    """Number of generated tokens before any of `stop_ids` may be chosen, unless a grammar allows no other."""
    ignore_eos: bool = False
    """Whether the request goes on after the target's end-of-sequence ids."""
    stop_ids: tuple[int, ...] = ()
    """Ids that end the request beside the target's end-of-sequence ids, sorted."""
    contrast_strength: float = 0.0
    """Weight of the verifier's amateur against the target, 0 to 10; 0: the target alone."""
    contrast_plausibility: float = 0.1
    """Where an amateur counts: smallest share of the target's highest probability to keep; above 0 to 1."""

    def __post_init__(self) -> None:
        _check_whole("top_k", self.top_k)
        _check("temperature", self.temperature, 0, 100)
        _check("top_p", self.top_p, 0, 1, above=True)
        _check("min_p", self.min_p, 0, 1)
        _check("repetition_penalty", self.repetition_penalty, 0.01, 100)
        _check("presence_penalty", self.presence_penalty, -100, 100)
        _check("frequency_penalty", self.frequency_penalty, -100, 100)
        _check_whole("min_tokens", self.min_tokens)
        _check("contrast_strength", self.contrast_strength, 0, 10)
        _check("contrast_plausibility", self.contrast_plausibility, 0, 1, above=True)
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequest(f"ignore_eos is {self.ignore_eos!r}; it must be true or false")
        for token in self.stop_ids:
            _check_whole("an id in stop_ids", token)
        object.__setattr__(self, "stop_ids", tuple(sorted(set(self.stop_ids))))
        self._check_bias()

    def _check_bias(self) -> None:
        check_bias_count(len(self.logit_bias))
        for token, bias in self.logit_bias:
            _check_whole("an id in logit_bias", token)
            _check(f"logit_bias of id {token}", bias, -100, 100)
        object.__setattr__(self, "logit_bias", tuple(sorted(self.logit_bias)))
        for (token, _), (following, _) in zip(self.logit_bias, self.logit_bias[1:], strict=False):
            if token == following:
                raise InvalidRequest(f"logit_bias names id {token} twice; name it once")

    def check_vocabulary(self, vocabulary_size: int) -> None:
        """Raises InvalidRequest for a field that names more ids, or other ids, than the vocabulary has."""
        if self.top_k > vocabulary_size:
            raise InvalidRequest(f"top_k is {self.top_k}; the vocabulary has {vocabulary_size} ids")
        if self.logit_bias and self.logit_bias[-1][0] >= vocabulary_size:
            raise InvalidRequest(
                f"logit_bias names id {self.logit_bias[-1][0]}; ids are below {vocabulary_size}"
            )
        if self.stop_ids and self.stop_ids[-1] >= vocabulary_size:
            raise InvalidRequest(f"stop_ids has {self.stop_ids[-1]}; ids are below {vocabulary_size}")

    def check_stops(self, max_tokens: int) -> None:
        """Raises InvalidRequest for `min_tokens` above `max_tokens`, or for too many `stop_ids`."""
        if self.min_tokens > max_tokens:
            raise InvalidRequest(
                f"min_tokens is {self.min_tokens}, but at most {max_tokens} ids may be generated; "
                f"0 to {max_tokens} are possible"
            )
        check_stop_count(len(self.stop_ids))

    def end_ids(self, eos_ids: Iterable[int]) -> frozenset[int]:
        """All ids that end the request; `eos_ids` are the target's end-of-sequence ids."""
        return frozenset(self.stop_ids if self.ignore_eos else (*self.stop_ids, *eos_ids))

    def holding_back(self, eos_ids: Iterable[int]) -> "SamplingParams":
        """Parameters under which `min_tokens` also holds back the target's end-of-sequence ids."""
        return replace(self, stop_ids=(*self.stop_ids, *eos_ids)) if self.min_tokens else self

    @property
    def greedy(self) -> bool:
        """Whether decoding takes the likeliest token, without noise, top-k, top-p and min-p."""
        return self.temperature < GREEDY_BELOW

    @property
    def contrast(self) -> Contrast | None:
        """How an amateur's logits count against the target's; None: not at all."""
        if not self.contrast_strength:
            return None
        return Contrast(self.contrast_strength, self.contrast_plausibility)

    @property
    def penalised(self) -> bool:
        """Whether a penalty applies, so that earlier ids change the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def holds_back(self) -> bool:
        """Whether `min_tokens` holds some ids back at first."""
        return self.min_tokens > 0 and bool(self.stop_ids)

    @property
    def reads_history(self) -> bool:
        """Whether earlier ids, or their number, change the logits."""
        return self.penalised or self.holds_back

    @property
    def plain_logits(self) -> bool:
        """Whether neither a bias, a penalty nor `min_tokens` changes the logits."""
        return not self.reads_history and not self.logit_bias

    @property
    def has_cuts(self) -> bool:
        """Whether top-k, top-p or min-p may drop a token."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def check_bias_count(count: int) -> None:
    """Raises InvalidRequest for too many entries of `logit_bias`, before any entry is looked at."""
    if count > MAX_BIAS_ENTRIES:
        raise InvalidRequest(f"logit_bias has {count} entries; give at most {MAX_BIAS_ENTRIES}")


def check_stop_count(count: int) -> None:
    """Raises InvalidRequest for too many `stop_ids`, before any id is looked at."""
    if count > MAX_STOP_IDS:
        raise InvalidRequest(f"stop_ids has {count} ids; give at most {MAX_STOP_IDS}")


def _check(field: str, value: float, low: float, high: float, *, above: bool = False) -> None:
    number = not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value)
    if not number or not low <= value <= high or (above and value == low):
        start = f"above {low}" if above else f"from {low}"
        raise InvalidRequest(f"{field} is {value!r}; it must be a number {start} to {high}")


def _check_whole(field: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidRequest(f"{field} is {value!r}; it must be a whole number from 0")
