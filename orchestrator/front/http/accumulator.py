"""Accumulates the answers to a body, of every prompt and choice: events in, pieces and usage out. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestrator.admitted_request import AdmittedRequest
from orchestrator.relay.delivery import Delivered, Event, Finished
from outrider.v1 import common_pb2
from speculative.errors import OutriderError, Unavailable
from speculative.stop import FinishReason

_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of one choice's text, or all of it."""

    index: int
    """Index of the choice among the choices of all prompts."""
    text: str
    ids: tuple[int, ...] = ()
    logprobs: tuple[common_pb2.TokenLogprob, ...] = ()
    """Log-probabilities, one entry per token, where the body asks for them."""
    finish: str | None = None
    """stop or length in the choice's last piece; None in all others."""


@dataclass(slots=True)
class _Choice:
    pieces: list[Piece] = field(default_factory=list)
    token_sources: bytearray = field(default_factory=bytearray)
    usage: common_pb2.Usage | None = None


class AnswerAccumulator:
    """The answers of all choices of a body's requests; `add` every event of each request."""

    def __init__(self, requests: Sequence[AdmittedRequest]) -> None:
        self._requests = requests
        self._choices = [_Choice() for request in requests for _ in range(request.choices)]

    def add(self, place: int, event: Event) -> Piece | None:
        """The piece that an event adds; None for an event without text.

        Raises OutriderError where the choice failed.

        Args:
            place: index of the event's request.
        """
        if not isinstance(event, Delivered | Finished):
            return None
        index = place * self._requests[0].choices + event.choice
        choice = self._choices[index]
        if isinstance(event, Delivered):
            piece = Piece(index, event.delta.text, event.delta.ids, event.delta.logprobs)
            choice.token_sources += event.delta.token_sources
        else:
            piece = Piece(index, event.text, finish=_reason(event))
            choice.usage = event.usage
        choice.pieces.append(piece)
        return piece

    def whole(self) -> list[Piece]:
        """The whole text of every choice, once all have ended."""
        return [_joined(choice.pieces) for choice in self._choices]

    def usage(self) -> dict[str, Any]:
        """The usage in OpenAI's fields; a prompt with several choices counts once."""
        prompt = sum(len(request.ids) for request in self._requests)
        completion = sum(len(piece.ids) for choice in self._choices for piece in choice.pieces)
        accepted, admitted = self._accepted(), self._admitted()
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": max(0, admitted - accepted),
            },
        }

    def metrics(self, *, detailed: bool) -> dict[str, Any]:
        """Speculative-decoding metrics of all choices together, in vLLM's fields.

        A step is a pass that committed tokens of a choice.
        """
        steps = [count for choice in self._choices for count in accepted_by_step(choice.token_sources)]
        accepted, drafted = self._accepted(), self._admitted()
        histogram = [0] * (max(steps, default=0) + 1)
        for count in steps:
            histogram[count] += 1
        metrics = {
            "mean_acceptance_length": 1 + accepted / len(steps) if steps else 0.0,
            "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
            "acceptance_histogram": histogram,
            "num_spec_steps": len(steps),
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
        }
        if detailed:
            metrics["per_step_accepted"] = steps
        return {"speculative_decoding": metrics}

    def _accepted(self) -> int:
        return sum(1 for choice in self._choices for source_index in choice.token_sources if source_index)

    def _admitted(self) -> int:
        return sum(choice.usage.admitted for choice in self._choices if choice.usage is not None)


def accepted_by_step(token_sources: bytes | bytearray) -> list[int]:
    """Numbers of accepted tokens of each pass, in order.

    The target's own token ends a pass, unless the answer ends before it.
    """
    runs = [len(run) for run in bytes(bool(source_index) for source_index in token_sources).split(b"\0")]
    return runs if runs[-1] else runs[:-1]


def _joined(pieces: Sequence[Piece]) -> Piece:
    return Piece(
        pieces[-1].index,
        "".join(piece.text for piece in pieces),
        tuple(id_ for piece in pieces for id_ in piece.ids),
        tuple(entry for piece in pieces for entry in piece.logprobs),
        pieces[-1].finish,
    )


def _reason(event: Finished) -> str:
    """OpenAI's finish reason. Raises the error that a reason stands for, where the choice failed."""
    if event.reason is FinishReason.ERROR:
        raise OutriderError(event.message or "the request failed without a word")
    if event.reason is FinishReason.CANCELLED:
        raise Unavailable("the request was cancelled")
    return _REASONS[event.reason]
