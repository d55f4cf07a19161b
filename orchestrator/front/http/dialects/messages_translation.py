"""Translates bodies of /v1/messages and /v1/messages/count_tokens into bodies of chat completions. Pure."""

import json
from typing import Any

from orchestrator.front.http.dialects.messages_fields import (
    BlockRedacted,
    BlockText,
    BlockThinking,
    BlockToolResult,
    BlockToolUse,
    ClientTool,
    CountRequest,
    MessagesRequest,
    MessageTurn,
    Texts,
)
from orchestrator.front.http.dialects.translation import ChatTranslation, ForeignTool, decoding_fields
from orchestrator.front.http.field_faults import FieldRefused

MESSAGES_NAMES = {
    "prompt": "messages",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "continue_final_message": "messages",
}
"""Names of fields in the client's body, by their names in a chat completion's body."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def messages_as_chat(request: MessagesRequest | CountRequest) -> ChatTranslation:
    """The chat completion that stands for a body of the Messages API. Raises FieldRefused."""
    places = dict(MESSAGES_NAMES)
    about: dict[str, Any] = {"skipped_tools": []}
    body: dict[str, Any] = {} if request.model is None else {"model": request.model}
    if isinstance(request, MessagesRequest):
        body = decoding_fields(request) | {"max_tokens": request.max_tokens}
        about["max_tokens"] = request.max_tokens
        if request.stop_sequences:
            body["stop"] = request.stop_sequences
    body["messages"] = _Messages(places).of(request)
    last = request.messages[-1]
    if last.role == "assistant":
        if isinstance(last.content, list) and any(isinstance(block, BlockToolUse) for block in last.content):
            place = f"messages[{len(request.messages) - 1}]"
            raise FieldRefused(
                place, f"{place} calls tools; a turn of the user with their results must follow"
            )
        body["continue_final_message"] = True
    tools: list[dict[str, Any]] = []
    for number, tool in enumerate(request.tools or ()):
        if isinstance(tool, ForeignTool):
            about["skipped_tools"].append({"index": number, "type": tool.type})
            continue
        places[f"tools[{len(tools)}].function"] = f"tools[{number}]"
        places[f"tools[{len(tools)}].function.parameters"] = f"tools[{number}].input_schema"
        tools.append(_tool(tool))
    if tools:
        body["tools"] = tools
    return ChatTranslation(body | _choice(request) | _thinking(request), about, places)


def _tool(tool: ClientTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _choice(request: MessagesRequest | CountRequest) -> dict[str, Any]:
    choice = request.tool_choice
    if choice is None:
        return {}
    if (choice.type == "tool") != (choice.name is not None):
        raise FieldRefused(
            "tool_choice.name", "tool_choice.name must be given with type tool, and with no other type"
        )
    named = {"type": "function", "function": {"name": choice.name}}
    chosen: dict[str, Any] = {"tool_choice": _CHOICES.get(choice.type, named)}
    if choice.disable_parallel_tool_use:
        chosen["parallel_tool_calls"] = False
    return chosen


def _thinking(request: MessagesRequest | CountRequest) -> dict[str, Any]:
    thinks = request.thinking is not None and request.thinking.type != "disabled"
    variables = {"enable_thinking": thinks} | (request.chat_template_kwargs or {})
    body: dict[str, Any] = {"chat_template_kwargs": variables}
    if (config := request.output_config) is not None:
        if config.effort is not None:
            body["reasoning_effort"] = config.effort
        if config.format is not None:
            schema = {"name": "output", "schema": config.format.schema_}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return body


class _Messages:
    """The messages of a conversation, made of turns; notes the place of each in `places`."""

    def __init__(self, places: dict[str, str]) -> None:
        self._places = places
        self._made: list[dict[str, Any]] = []

    def of(self, request: MessagesRequest | CountRequest) -> list[dict[str, Any]]:
        """The messages of the system prompt and the turns."""
        if request.system:
            self._begin({"role": "system", "content": _text(request.system)}, "system")
        for number, turn in enumerate(request.messages):
            place = f"messages[{number}]"
            if isinstance(turn.content, str):
                self._begin({"role": turn.role, "content": turn.content}, place)
            elif turn.role == "assistant":
                self._answer(turn, place)
            else:
                self._told(turn, place)
        return self._made

    def _told(self, turn: MessageTurn, place: str) -> None:
        """Adds the results and the texts of a turn, in their order."""
        texts: list[str] = []
        for number, block in enumerate(turn.content):
            match block:
                case BlockText():
                    texts.append(block.text)
                case BlockToolResult():
                    self._say(turn.role, texts, place)
                    at = f"{place}.content[{number}]"
                    self._places[f"messages[{len(self._made)}].tool_call_id"] = f"{at}.tool_use_id"
                    content = "" if block.content is None else _text(block.content)
                    self._begin({"role": "tool", "tool_call_id": block.tool_use_id, "content": content}, at)
                case _:
                    _misplaced(f"{place}.content[{number}]", block, turn.role)
        self._say(turn.role, texts, place)

    def _say(self, role: str, texts: list[str], place: str) -> None:
        if texts:
            self._begin({"role": role, "content": "\n".join(texts)}, place)
            texts.clear()

    def _answer(self, turn: MessageTurn, place: str) -> None:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        for number, block in enumerate(turn.content):
            match block:
                case BlockText():
                    texts.append(block.text)
                case BlockThinking():
                    thoughts.append(block.thinking)
                case BlockRedacted():
                    pass
                case BlockToolUse():
                    at = f"messages[{len(self._made)}].tool_calls[{len(calls)}].function"
                    self._places[at] = f"{place}.content[{number}]"
                    function = {"name": block.name, "arguments": json.dumps(block.input)}
                    calls.append({"id": block.id, "type": "function", "function": function})
                case _:
                    _misplaced(f"{place}.content[{number}]", block, turn.role)
        message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
        if thoughts:
            message["reasoning_content"] = "\n".join(thoughts)
        if calls:
            message["tool_calls"] = calls
        self._begin(message, place)

    def _begin(self, message: dict[str, Any], place: str) -> None:
        self._places[f"messages[{len(self._made)}]"] = place
        self._made.append(message)


def _misplaced(place: str, block: Any, role: str) -> None:
    raise FieldRefused(place, f"{place} is of type {block.type}, which a turn of role {role} cannot have")


def _text(content: Texts) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)
