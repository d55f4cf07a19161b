"""The events and the object of an answer of /v1/messages. Pure."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from orchestrator.front.http.dialects.answer_events import AnswerEnd, AnswerHead, Event, parts_of
from orchestrator.front.http.errors import anthropic_error

_BLOCKS = {"reasoning": "thinking", "text": "text"}
PING = b'event: ping\ndata: {"type":"ping"}\n\n'


class MessageEvents:
    """Makes the events of one message."""

    def __init__(self, head: AnswerHead) -> None:
        self._head = head
        self._content: list[dict[str, Any]] = []
        """Blocks that are done."""
        self._block: dict[str, Any] | None = None
        """The text or thinking to which deltas are added."""
        self._texts: list[str] = []
        """The parts of the open block's text."""
        self._rest: dict[str, Any] = {}

    def begin(self) -> Iterator[Event]:
        """`message_start` and a `ping`."""
        usage = {"input_tokens": self._head.prompt_tokens, "output_tokens": 0}
        yield {"type": "message_start", "message": self._message({"usage": usage})}
        yield {"type": "ping"}

    def add(self, delta: Mapping[str, Any]) -> Iterator[Event]:
        """The events that a delta of the chat completion adds."""
        for kind, part in parts_of(delta):
            if kind == "call":
                yield from self._close()
                yield from self._call(part["id"], part["function"])
                continue
            type_ = _BLOCKS[kind]
            if self._block is None or self._block["type"] != type_:
                yield from self._close()
                self._block = {"type": type_, type_: ""}
                if type_ == "thinking":
                    self._block["signature"] = ""
                yield self._event("content_block_start", content_block=self._block)
            self._texts.append(part)
            yield self._event("content_block_delta", delta={"type": f"{type_}_delta", type_: part})

    def end(self, end: AnswerEnd) -> Iterator[Event]:
        """The end of the last block, `message_delta` and `message_stop`."""
        yield from self._close()
        reason = {"stop_reason": self._reason(end), "stop_sequence": end.stop_string}
        usage = _usage(end)
        own = {**end.extras, "skipped_tools": self._head.about["skipped_tools"]}
        self._rest = {**reason, "usage": usage, **own}
        yield {"type": "message_delta", "delta": reason, "usage": usage, **own}
        yield {"type": "message_stop"}

    def failed(self, error: Mapping[str, Any], status: int) -> Iterator[Event]:
        """`error`, which clients raise."""
        yield anthropic_error(status, error["message"])

    def whole(self) -> dict[str, Any]:
        """The message, after its end."""
        return self._message(self._rest)

    def _reason(self, end: AnswerEnd) -> str:
        if end.finish == "length":
            return "model_context_window_exceeded" if end.context_full else "max_tokens"
        if end.stop_string is not None:
            return "stop_sequence"
        called = any(block["type"] == "tool_use" for block in self._content)
        return "tool_use" if called else "end_turn"

    def _event(self, type_: str, **fields: Any) -> Event:
        return {"type": type_, "index": len(self._content), **fields}

    def _close(self) -> Iterator[Event]:
        if self._block is not None:
            yield self._event("content_block_stop")
            self._content.append(self._block | {self._block["type"]: "".join(self._texts)})
            self._block, self._texts = None, []

    def _call(self, id_: str, function: Mapping[str, Any]) -> Iterator[Event]:
        block = {"type": "tool_use", "id": id_, "name": function["name"], "input": {}}
        yield self._event("content_block_start", content_block=block)
        delta = {"type": "input_json_delta", "partial_json": function["arguments"]}
        yield self._event("content_block_delta", delta=delta)
        yield self._event("content_block_stop")
        self._content.append(block | {"input": json.loads(function["arguments"])})

    def _message(self, rest: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "id": self._head.id,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": list(self._content),
            "stop_reason": None,
            "stop_sequence": None,
            **rest,
        }


def _usage(end: AnswerEnd) -> dict[str, Any]:
    """The usage, in which tokens read from the cache are no input tokens."""
    cached = end.usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    return {
        "input_tokens": end.usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": end.usage["completion_tokens"],
        "output_tokens_details": {"thinking_tokens": end.reasoning_tokens},
    }
