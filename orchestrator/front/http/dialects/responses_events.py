"""The events and the object of an answer of /v1/responses. Pure."""

import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from orchestrator.front.http.dialects.answer_events import AnswerEnd, AnswerHead, Event, parts_of

_KINDS = {"reasoning": "reasoning", "text": "message"}
_PARTS = {"reasoning": "reasoning_text", "message": "output_text"}
_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}


class ResponseEvents:
    """Makes the typed, numbered events of one response."""

    def __init__(self, head: AnswerHead) -> None:
        self._head = head
        self._number = 0
        self._output: list[dict[str, Any]] = []
        """Items that are done."""
        self._item: dict[str, Any] | None = None
        """The message or reasoning to which deltas are added."""
        self._texts: list[str] = []
        """The parts of the open item's text."""
        self._rest: dict[str, Any] = {}

    def begin(self) -> Iterator[Event]:
        """`response.created` and `response.in_progress`."""
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))

    def add(self, delta: Mapping[str, Any]) -> Iterator[Event]:
        """The events that a delta of the chat completion adds."""
        for kind, part in parts_of(delta):
            if kind == "call":
                yield from self._close("completed")
                yield from self._call(part["id"], part["function"])
                continue
            if self._item is None or self._item["type"] != _KINDS[kind]:
                yield from self._close("completed")
                yield from self._open(_KINDS[kind])
            self._texts.append(part)
            yield self._text_event("delta", delta=part)

    def end(self, end: AnswerEnd) -> Iterator[Event]:
        """The end of the last item, and `response.completed` or `response.incomplete`."""
        cut = end.finish == "length"
        if not self._output and self._item is None:
            yield from self._open("message")
        yield from self._close("incomplete" if cut else "completed")
        self._rest = {"usage": _usage(end), "completed_at": None if cut else self._head.created}
        if cut:
            self._rest["incomplete_details"] = {"reason": "max_output_tokens"}
        self._rest |= {"status": "incomplete" if cut else "completed", **end.extras}
        yield self._event(f"response.{self._rest['status']}", response=self.whole())

    def failed(self, error: Mapping[str, Any], status: int) -> Iterator[Event]:
        """`response.failed`, and `error`, which clients raise."""
        known = {429: "rate_limit_exceeded"}.get(status, "server_error")
        self._rest = {"error": {"code": known, "message": error["message"]}}
        yield self._event("response.failed", response=self._response("failed"))
        said = {name: error[name] for name in ("code", "message", "param")}
        yield self._event("error", **said, error=error)

    def whole(self) -> dict[str, Any]:
        """The response, after its end."""
        return self._response(self._rest["status"])

    def _event(self, type_: str, **fields: Any) -> Event:
        self._number += 1
        return {"type": type_, "sequence_number": self._number - 1, **fields}

    def _open(self, type_: str) -> Iterator[Event]:
        more: dict[str, Any] = {"role": "assistant"} if type_ == "message" else {"summary": []}
        head = {"id": _new_id(type_), "type": type_, "status": "in_progress"}
        self._item, self._texts = head | {"content": []} | more, []
        yield self._event("response.output_item.added", output_index=len(self._output), item=self._item)
        yield self._part_event("response.content_part.added", part=_part(type_, ""))

    def _close(self, status: str) -> Iterator[Event]:
        if self._item is None:
            return
        text = "".join(self._texts)
        part = _part(self._item["type"], text)
        yield self._text_event("done", text=text)
        yield self._part_event("response.content_part.done", part=part)
        item, self._item = self._item | {"status": status, "content": [part]}, None
        yield from self._done(item)

    def _done(self, item: dict[str, Any]) -> Iterator[Event]:
        yield self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)

    def _call(self, call_id: str, function: Mapping[str, Any]) -> Iterator[Event]:
        item = {"id": _new_id("function_call"), "type": "function_call", "status": "in_progress"}
        item |= {"call_id": call_id, "name": function["name"], "arguments": ""}
        place = {"item_id": item["id"], "output_index": len(self._output)}
        arguments = function["arguments"]
        yield self._event("response.output_item.added", output_index=len(self._output), item=item)
        yield self._event("response.function_call_arguments.delta", **place, delta=arguments)
        yield self._event(
            "response.function_call_arguments.done", **place, name=item["name"], arguments=arguments
        )
        yield from self._done(item | {"status": "completed", "arguments": arguments})

    def _text_event(self, what: str, **fields: Any) -> Event:
        assert self._item is not None
        part = _PARTS[self._item["type"]]
        more: dict[str, Any] = {"logprobs": []} if part == "output_text" else {}
        return self._part_event(f"response.{part}.{what}", **fields, **more)

    def _part_event(self, type_: str, **fields: Any) -> Event:
        assert self._item is not None
        place = {"item_id": self._item["id"], "output_index": len(self._output), "content_index": 0}
        return self._event(type_, **place, **fields)

    def _response(self, status: str) -> dict[str, Any]:
        head, about = self._head, self._head.about
        return {
            "id": head.id,
            "object": "response",
            "created_at": head.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "max_output_tokens": about["max_output_tokens"],
            "metadata": {},
            "model": head.model,
            "output": list(self._output),
            "parallel_tool_calls": about["parallel_tool_calls"],
            "previous_response_id": None,
            "reasoning": {"effort": about["effort"], "summary": None},
            "skipped_tools": about["skipped_tools"],
            "store": False,
            "temperature": head.temperature,
            "text": {"format": _format(head.response_format)},
            "tool_choice": about["tool_choice"],
            "tools": about["tools"],
            "top_p": head.top_p,
            "truncation": "disabled",
            "usage": None,
            **self._rest,
        }


def _new_id(type_: str) -> str:
    return f"{_PREFIXES[type_]}_{secrets.token_hex(12)}"


def _part(type_: str, text: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": _PARTS[type_], "text": text}
    return part | {"annotations": [], "logprobs": []} if type_ == "message" else part


def _format(format_: Mapping[str, Any] | None) -> dict[str, Any]:
    if format_ is None:
        return {"type": "text"}
    return {"type": format_["type"], **format_.get("json_schema", {})}


def _usage(end: AnswerEnd) -> dict[str, Any]:
    usage = end.usage
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": end.reasoning_tokens},
        "total_tokens": usage["total_tokens"],
    }
