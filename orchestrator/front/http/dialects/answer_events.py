"""What the events of an answer are made of, in every API but chat. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What is known of an answer before its first token."""

    id: str
    created: int
    """Seconds since 1970."""
    model: str
    prompt_tokens: int
    temperature: float
    top_p: float
    response_format: Mapping[str, Any] | None
    """The format of the chat completion; None: any text."""
    about: Mapping[str, Any]
    """What the answer repeats of the client's body."""


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """How an answer ended, and what it cost."""

    finish: str
    """The finish reason of the chat completion."""
    usage: Mapping[str, Any]
    """The usage of the chat completion."""
    stop_string: str | None = None
    """The stop string that ended the answer; None: none did."""
    context_full: bool = False
    """Whether the context's end cut the answer off, and not the client's limit."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    """Fields of this server's own: the seed, and what the body asked for."""

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the answer that are reasoning."""
        return int(self.usage["completion_tokens_details"]["reasoning_tokens"])


class AnswerEvents(Protocol):
    """The events of one answer, made of the deltas of a chat completion."""

    def begin(self) -> Iterator[Event]:
        """The events before the first token."""

    def add(self, delta: Mapping[str, Any]) -> Iterator[Event]:
        """The events that a delta of the chat completion adds."""

    def end(self, end: AnswerEnd) -> Iterator[Event]:
        """The events behind the last token."""

    def failed(self, error: Mapping[str, Any], status: int) -> Iterator[Event]:
        """The events that report an error after the beginning.

        Args:
            error: OpenAI's error object.
            status: the HTTP status that the error would have had.
        """

    def whole(self) -> dict[str, Any]:
        """The whole answer, after its end."""


def parts_of(delta: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The parts of a chat completion's delta in their order: `reasoning`, `text`, each `call`."""
    if reasoning := delta.get("reasoning_content"):
        yield "reasoning", reasoning
    if text := delta.get("content"):
        yield "text", text
    for call in delta.get("tool_calls", ()):
        yield "call", call
