"""Accumulates the answers to a body, of every prompt and choice: events in, pieces and usage out. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from orchestrator.admitted_request import AdmittedRequest
from orchestrator.front.http.chat.output_parser import Parsed
from orchestrator.front.http.chat.plan import Thought
from orchestrator.front.http.chat.reasoning_count import ReasoningCount
from orchestrator.relay.delivery import Delivered, Delta, Event, Finished, PromptScored, Started
from outrider.v1 import common_pb2
from outrider.wire.codec import CommittedCode
from outrider.wire.criteria import promise_from_wire
from outrider.wire.names import PREDICTION
from speculative.acceptance.criterion import Promise
from speculative.errors import InvalidRequest, OutriderError, Unavailable
from speculative.stop import FinishReason

TARGET = "target"
"""Name of the source of tokens that no source drafted."""
_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of one choice's text, or all of it."""

    index: int
    """Index of the choice among the choices of all prompts."""
    text: str
    ids: tuple[int, ...] = ()
    logprobs: tuple[common_pb2.TokenLogprob | None, ...] = ()
    """Log-probabilities, one entry per token, where the body asks for them; None for a
    prompt's first token."""
    sources: tuple[str, ...] = ()
    """Names of the sources that drafted the tokens, one per generated token."""
    finish: str | None = None
    """stop or length in the choice's last piece; None in all others."""
    first: bool = False
    """Whether this is the choice's first piece."""
    parsed: Parsed | None = None
    """What the text adds to a message, where a response template says so; None: nobody parsed the text."""


def _no_reasoning() -> ReasoningCount:
    return ReasoningCount(None, Thought.NONE)


@dataclass(slots=True)
class _Choice:
    reasoning: ReasoningCount
    pieces: list[Piece] = field(default_factory=list)
    token_sources: bytearray = field(default_factory=bytearray)
    """Index of the source of each token; 0 stands for the target itself."""
    scored: int = 0
    """Number of the prompt's tokens that have their log-probabilities."""
    usage: common_pb2.Usage | None = None
    """What the choice cost; None while the choice is generated."""


class AnswerAccumulator:
    """The answers of all choices of a body's requests; `add` every event of each request.

    Args:
        echoed: the text of each request's prompt, with which its answers begin; empty: they begin without.
        silent: whether the answers have no generated tokens, but the prompt alone.
        reasoning: makes the count of one choice's reasoning; the default counts none.
    """

    def __init__(
        self,
        requests: Sequence[AdmittedRequest],
        echoed: Sequence[str] = (),
        *,
        silent: bool = False,
        reasoning: Callable[[], ReasoningCount] = _no_reasoning,
    ) -> None:
        self._requests = requests
        self._echoed = echoed
        self._silent = silent
        self._choices = [_Choice(reasoning()) for request in requests for _ in range(request.choices)]
        self._prompt_tokens = sum(len(request.ids) for request in requests)
        self._tokens = self._predicted = 0
        self._prediction_index: dict[int, int] = {}
        """Index of the source that drafts from the client's prediction, by the request's index."""
        self._source_names: dict[int, tuple[str, ...]] = {}
        """Names by source index, by the request's index."""

    def add(self, place: int, event: Event) -> Piece | None:
        """The piece that an event adds; None for an event without text.

        Raises OutriderError where the choice failed.

        Args:
            place: index of the event's request.
        """
        if isinstance(event, Started):
            self._source_names[place] = (TARGET, *event.source_names)
            if PREDICTION in event.source_names:
                self._prediction_index[place] = event.source_names.index(PREDICTION) + 1
        if not isinstance(event, PromptScored | Delivered | Finished):
            return None
        index = place * self._requests[0].choices + event.choice
        choice = self._choices[index]
        echoed = "" if choice.pieces or not self._echoed else self._echoed[place]
        if isinstance(event, PromptScored):
            piece = self._scored(index, choice, event)
        elif isinstance(event, Finished):
            piece = Piece(index, "" if self._silent else event.text, finish=_reason(event))
            choice.usage = event.usage
        elif self._silent:
            return None
        else:
            sources = self._named(place, event.delta.token_sources)
            piece = Piece(index, event.delta.text, event.delta.ids, event.delta.logprobs, sources)
            self._count(place, choice, event.delta)
        if not choice.pieces and self._scores_one(place):  # no score ever comes of it
            prompt = self._requests[place].ids[:1]
            piece = replace(piece, ids=(*prompt, *piece.ids), logprobs=(None, *piece.logprobs))
        piece = replace(piece, text=echoed + piece.text, first=not choice.pieces)
        choice.pieces.append(piece)
        return piece

    def _scores_one(self, place: int) -> bool:
        """Whether a request asks for the scores of a prompt of one token, which has none."""
        request = self._requests[place]
        return request.score_prompt and len(request.ids) == 1

    def _scored(self, index: int, choice: _Choice, event: PromptScored) -> Piece:
        """The piece of a prompt's tokens; the first piece has the first token, which nothing comes before."""
        prompt = self._requests[index // self._requests[0].choices].ids
        start = choice.scored
        choice.scored += len(event.logprobs)
        if not start:
            choice.scored += 1
            return Piece(index, "", prompt[: choice.scored], (None, *event.logprobs))
        return Piece(index, "", prompt[start : choice.scored], event.logprobs)

    def _count(self, place: int, choice: _Choice, delta: Delta) -> None:
        choice.token_sources += delta.token_sources
        choice.reasoning.add(delta.ids)
        self._tokens += len(delta.ids)
        if place in self._prediction_index:
            self._predicted += delta.token_sources.count(self._prediction_index[place])

    def _named(self, place: int, token_sources: bytes) -> tuple[str, ...]:
        names = self._source_names[place]
        return tuple(names[source_index] for source_index in token_sources)

    def whole(self) -> list[Piece]:
        """The whole text of every choice, once all have ended."""
        return [_joined(choice.pieces) for choice in self._choices]

    def usage(self) -> dict[str, Any]:
        """The usage so far in OpenAI's fields; a prompt with several choices counts once."""
        usage: dict[str, Any] = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._tokens,
            "total_tokens": self._prompt_tokens + self._tokens,
            "completion_tokens_details": {
                "accepted_prediction_tokens": self._predicted,
                "rejected_prediction_tokens": max(0, self._offered_by_prediction() - self._predicted),
                "reasoning_tokens": sum(choice.reasoning.count for choice in self._choices),
            },
        }
        first = [choice.usage for choice in self._choices[:: self._requests[0].choices]]
        if None not in first:  # what was cached is known when the choice ends
            cached = sum(usage.cached_tokens for usage in first if usage is not None)
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
            promises = {promise_from_wire(usage.promise) for usage in first if usage is not None}
            if promises != {Promise.SAME_IDS}:
                usage["promise"] = next(iter(promises - {Promise.SAME_IDS})).value
        return usage

    def _offered_by_prediction(self) -> int:
        ended = (choice.usage for choice in self._choices if choice.usage is not None)
        return sum(usage.drafted_by_source.get(PREDICTION, 0) for usage in ended)

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
        tuple(name for piece in pieces for name in piece.sources),
        pieces[-1].finish,
        first=True,
    )


def _reason(event: Finished) -> str:
    """OpenAI's finish reason. Raises the error that a reason stands for, where the choice failed."""
    if event.reason is FinishReason.ERROR and event.code == CommittedCode.DEAD_END:
        raise InvalidRequest(event.message)
    if event.reason is FinishReason.ERROR:
        raise OutriderError(event.message or "the request failed without a word")
    if event.reason is FinishReason.CANCELLED:
        raise Unavailable("the request was cancelled")
    return _REASONS[event.reason]
