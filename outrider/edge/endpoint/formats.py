"""Answers as OpenAI's objects; pure."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from outrider.client import Chunk, Completion
from outrider.edge.device_report import DeviceReport
from speculative.errors import OutriderError


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The format of one answer.

    Args:
        chat: whether the answer continues a conversation.
        number: unique number of the answer, part of the answer's id.
        model: name of the model that answers.
        created: seconds since 1970.
        provenance: `local` for an answer of the device's own model; empty: the answer is the cloud's.
    """

    chat: bool
    number: str
    model: str
    created: int
    provenance: str = ""

    def whole(self, completion: Completion, report: DeviceReport | None) -> dict[str, Any]:
        """The whole answer, with the usage and the device's contribution."""
        text = completion.text
        message = {"role": "assistant", "content": text, "refusal": None}
        said: dict[str, Any] = {"message": message} if self.chat else {"text": text}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": completion.finish_reason.value}
        return self._head(streams=False) | {
            "choices": [choice],
            "usage": usage_of(completion),
            "seed": completion.seed,
            "device": None if report is None else asdict(report),
        }

    def event(self, chunk: Chunk, *, first: bool) -> dict[str, Any]:
        """An event of a stream; a conversation's first event also names the role."""
        role = {"role": "assistant"} if first else {}
        return self._event({"delta": role | {"content": chunk.text}} if self.chat else {"text": chunk.text})

    def last(self, completion: Completion, report: DeviceReport | None) -> dict[str, Any]:
        """The event that ends the text."""
        said: dict[str, Any] = {"delta": {}} if self.chat else {"text": ""}
        ended = self._event(said, completion.finish_reason.value)
        return ended | {"seed": completion.seed, "device": None if report is None else asdict(report)}

    def usage(self, completion: Completion) -> dict[str, Any]:
        """The event with the usage."""
        return self._head(streams=True) | {"choices": [], "usage": usage_of(completion)}

    def _event(self, said: Mapping[str, Any], finish: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": finish}
        return self._head(streams=True) | {"choices": [choice]}

    def _head(self, *, streams: bool) -> dict[str, Any]:
        kind = "chat.completion" + ".chunk" * streams if self.chat else "text_completion"
        id_ = f"{'chatcmpl' if self.chat else 'cmpl'}-{self.number}"
        head = {"id": id_, "object": kind, "created": self.created, "model": self.model}
        return head | ({"provenance": self.provenance} if self.provenance else {})


def usage_of(completion: Completion) -> dict[str, Any]:
    """The usage in OpenAI's fields."""
    usage = completion.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def error_of(message: str, kind: str = "server_error") -> dict[str, Any]:
    """An error in OpenAI's fields."""
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def broken_off(error: OutriderError) -> dict[str, Any]:
    """The event that ends a stream whose request failed."""
    return error_of(str(error))
