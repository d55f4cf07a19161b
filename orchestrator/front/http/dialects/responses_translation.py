"""Translates a body of /v1/responses into the body of a chat completion. Pure."""

from collections.abc import Sequence
from typing import Any

from orchestrator.front.http.dialects.responses_fields import (
    LOGPROBS,
    NO_LOGPROBS,
    AllowedFunctions,
    FunctionTool,
    InputCall,
    InputCallOutput,
    InputItem,
    InputMessage,
    InputReasoning,
    ItemContent,
    ItemRefusal,
    NamedFormat,
    NamedFunctionTool,
    ResponsesRequest,
)
from orchestrator.front.http.dialects.translation import ChatTranslation, ForeignTool, decoding_fields
from orchestrator.front.http.field_faults import FieldRefused
from orchestrator.front.http.fields import TextFormat

RESPONSES_NAMES = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Names of fields in the client's body, by their names in a chat completion's body."""


def response_as_chat(request: ResponsesRequest) -> ChatTranslation:
    """The chat completion that stands for a body of the Responses API. Raises FieldRefused."""
    if LOGPROBS in (request.include or ()):
        raise FieldRefused(
            "include",
            f"include has {LOGPROBS}: {NO_LOGPROBS}",
        )
    places = dict(RESPONSES_NAMES)
    body: dict[str, Any] = decoding_fields(request)
    body["messages"] = _Messages(places).of(request)
    if not body["messages"]:
        raise FieldRefused(
            "input", "input holds only reasoning without text; give a message, or what a function returned"
        )
    for name, value in (
        ("max_tokens", request.max_output_tokens),
        ("parallel_tool_calls", request.parallel_tool_calls),
        ("stop", request.stop),
        ("chat_template_kwargs", request.chat_template_kwargs),
        ("reasoning_effort", None if request.reasoning is None else request.reasoning.effort),
        ("response_format", _format(request)),
        ("tool_choice", _choice(request)),
    ):
        if value is not None:
            body[name] = value
    tools: list[dict[str, Any]] = []
    skipped: list[dict[str, Any]] = []
    for number, tool in enumerate(request.tools or ()):
        if isinstance(tool, ForeignTool):
            skipped.append({"index": number, "type": tool.type})
            continue
        places[f"tools[{len(tools)}].function"] = f"tools[{number}]"
        tools.append(_tool(tool))
    if tools:
        body["tools"] = tools
    return ChatTranslation(body, _about(request, skipped), places)


def _about(request: ResponsesRequest, skipped: Sequence[dict[str, Any]]) -> dict[str, Any]:
    choice = request.tool_choice
    functions = [tool for tool in request.tools or () if isinstance(tool, FunctionTool)]
    return {
        "tool_choice": choice or "auto" if isinstance(choice, str | None) else choice.model_dump(),
        "tools": [{"type": "function", "name": tool.name, "strict": tool.strict} for tool in functions],
        "skipped_tools": list(skipped),
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "max_output_tokens": request.max_output_tokens,
        "effort": None if request.reasoning is None else request.reasoning.effort,
    }


def _tool(tool: FunctionTool) -> dict[str, Any]:
    function = tool.model_dump(include={"name", "description", "parameters", "strict"}, exclude_unset=True)
    return {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}


def _choice(request: ResponsesRequest) -> Any:
    choice = request.tool_choice
    if isinstance(choice, NamedFunctionTool):
        return _named(choice)
    if isinstance(choice, AllowedFunctions):
        allowed = {"mode": choice.mode, "tools": [_named(tool) for tool in choice.tools]}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice


def _named(tool: NamedFunctionTool) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool.name}}


def _format(request: ResponsesRequest) -> dict[str, Any] | None:
    format_ = None if request.text is None else request.text.format
    if format_ is None or isinstance(format_, TextFormat):
        return None
    if isinstance(format_, NamedFormat):
        return {"type": "json_schema", "json_schema": {"name": format_.name, "schema": format_.schema_}}
    return {"type": "json_object"}


class _Messages:
    """The messages of a conversation, made of items; notes the place of each in `places`."""

    def __init__(self, places: dict[str, str]) -> None:
        self._places = places
        self._made: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        """The assistant's message that following items may still add to."""

    def of(self, request: ResponsesRequest) -> list[dict[str, Any]]:
        """The messages of the instructions and the input."""
        if request.instructions:
            self._begin({"role": "system", "content": request.instructions}, "instructions")
        if isinstance(request.input, str):
            self._begin({"role": "user", "content": request.input}, "input")
        else:
            for number, item in enumerate(request.input):
                self._add(f"input[{number}]", item)
        for message in self._made:
            if message["content"] is None and "tool_calls" not in message:
                message["content"] = ""  # an answer that was cut off within its reasoning
        return self._made

    def _add(self, place: str, item: InputItem) -> None:
        match item:
            case InputMessage(role="assistant"):
                self._say(place, _text(item.content))
            case InputMessage():
                self._tell(place, "user" if item.role == "user" else "system", _text(item.content))
            case InputReasoning():
                self._think(place, item)
            case InputCall():
                self._call(place, item)
            case InputCallOutput():
                number = len(self._made)
                self._places[f"messages[{number}].tool_call_id"] = f"{place}.call_id"
                told = {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
                self._begin(told, place)

    def _tell(self, place: str, role: str, text: str) -> None:
        """Adds a message to the model; many templates take one system message, at the beginning."""
        if role == "system" and len(self._made) == 1 and self._made[0]["role"] == "system":
            self._made[0]["content"] += "\n\n" + text
        else:
            self._begin({"role": role, "content": text}, place)

    def _say(self, place: str, text: str) -> None:
        if self._open is None or self._open["content"] is not None:
            self._begin_answer(place)
        assert self._open is not None
        self._open["content"] = text

    def _think(self, place: str, item: InputReasoning) -> None:
        parts = item.content or item.summary or ()
        if text := "\n".join(part.text for part in parts):
            self._begin_answer(place)["reasoning_content"] = text

    def _call(self, place: str, item: InputCall) -> None:
        message = self._open or self._begin_answer(place)
        calls: list[dict[str, Any]] = message.setdefault("tool_calls", [])
        message_place = f"messages[{len(self._made) - 1}]"
        self._places[f"{message_place}.tool_calls[{len(calls)}].function"] = place
        function = {"name": item.name, "arguments": item.arguments}
        calls.append({"id": item.call_id, "type": "function", "function": function})

    def _begin_answer(self, place: str) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": None}
        self._begin(message, place)
        self._open = message
        return message

    def _begin(self, message: dict[str, Any], place: str) -> None:
        self._open = None
        self._places[f"messages[{len(self._made)}]"] = place
        self._made.append(message)


def _text(content: ItemContent) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.refusal if isinstance(part, ItemRefusal) else part.text for part in content)
