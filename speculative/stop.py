"""Where a request ends: end-of-sequence ids, stop strings, length; knows nothing of models or trees.

Everything here is a function of (ids, prompt length), so a session that is rebuilt from its ids ends at the
same id.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum

from speculative.errors import InvalidRequest

MAX_STOPS = 16
MAX_STOP_BYTES = 256


class FinishReason(StrEnum):
    """Reason for which a request ended."""

    STOP = "stop"
    """An end-of-sequence id, another id that ends the request, or a stop string."""
    LENGTH = "length"
    """The request's token limit is reached, or the target's context is full."""
    CANCELLED = "cancelled"
    """The client cancelled or went away, or the deadline passed."""
    ERROR = "error"
    """The worker could not go on."""


def stop_bytes(stops: Sequence[str]) -> tuple[bytes, ...]:
    """A request's stop strings as UTF-8. Raises InvalidRequest for too many, an empty or a too long one."""
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"stop has {len(stops)} strings; give at most {MAX_STOPS}")
    encoded = tuple(stop.encode("utf-8", "replace") for stop in stops)
    for stop in encoded:
        if not 1 <= len(stop) <= MAX_STOP_BYTES:
            raise InvalidRequest(f"a stop string has {len(stop)} bytes; give 1 to {MAX_STOP_BYTES}")
    return encoded


class StopChecker:
    """Checks of each generated id in turn whether it ends the request.

    Stop strings match the bytes of generated ids only and may span several ids; the id that completes a stop
    string is the last. Where an end id or a stop string and the limit meet at one id, the reason is STOP.

    Args:
        end_ids: ids that end the request.
        limit: largest number of ids, prompt included.
        stops: stop strings as bytes, none empty.
        token_bytes: bytes of an id, empty for special ids; None where the target has no tokenizer.
        ids: all ids so far; those from `prompt_length` on are replayed.
        prompt_length: number of `ids` that are the prompt.
        min_tokens: a stop string counts only if generated id number `min_tokens` or a later one completes it.

    Raises:
        InvalidRequest: stop strings without `token_bytes`.
    """

    __slots__ = (
        "_end_ids",
        "_keep",
        "_limit",
        "_stops",
        "_stops_from",
        "_tail",
        "_token_bytes",
        "finished",
        "length",
    )

    def __init__(
        self,
        end_ids: frozenset[int],
        limit: int,
        stops: tuple[bytes, ...],
        token_bytes: Callable[[int], bytes] | None,
        ids: Sequence[int],
        prompt_length: int,
        min_tokens: int = 0,
    ) -> None:
        if stops and token_bytes is None:
            raise InvalidRequest("stop strings need a tokenizer, and this target has none; leave stop out")
        self._end_ids = end_ids
        self._limit = limit
        self._stops = stops
        self._token_bytes = token_bytes
        self._stops_from = prompt_length + min_tokens
        self._keep = max(map(len, stops), default=1) - 1
        self._tail = b""
        self.length = prompt_length
        """Number of ids so far, prompt included."""
        self.finished: FinishReason | None = FinishReason.LENGTH if prompt_length >= limit else None
        """Why the ids so far end the request; None while they do not."""
        for token in ids[prompt_length:]:
            if self.finished is not None:
                break
            self.push(token)

    def push(self, token: int) -> FinishReason | None:
        """Takes the next generated id; returns why that id is the last, or None. Not after the end."""
        assert self.finished is None, f"id {token} was pushed after the end ({self.finished})"
        self.length += 1
        if token in self._end_ids or (self._stops and self._completes_stop(token)):
            self.finished = FinishReason.STOP
        elif self.length >= self._limit:
            self.finished = FinishReason.LENGTH
        return self.finished

    def _completes_stop(self, token: int) -> bool:
        assert self._token_bytes is not None
        before = len(self._tail)
        text = self._tail + self._token_bytes(token)
        self._tail = text[-self._keep :] if self._keep else b""
        return self.length >= self._stops_from and any(
            completed_at(text, stop, before) >= 0 for stop in self._stops
        )


def completed_at(text: bytes, stop: bytes, before: int) -> int:
    """First offset of `stop` in `text` at which a byte from offset `before` on completes it; -1: none."""
    return text.find(stop, max(0, before - len(stop) + 1))


def cut_at_stop(
    stop_checker: StopChecker, tokens: Sequence[int]
) -> tuple[tuple[int, ...], FinishReason | None]:
    """Cuts a run of ids after the id that ends the request, and advances `stop_checker` over the ids kept.

    Returns the ids kept, and why they end the request (None where they do not).
    """
    for count, token in enumerate(tokens, start=1):
        reason = stop_checker.push(token)
        if reason is not None:
            return tuple(tokens[:count]), reason
    return tuple(tokens), None
