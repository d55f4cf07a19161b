"""A conversation as a chat template takes it, checked: messages, tools, variables. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestrator.front.http.chat.chat_fields import ConversationFields, Message, Tool, ToolCall
from orchestrator.front.http.chat.schemas import check_schema
from orchestrator.front.http.chat.tool_choice import chosen_tools
from orchestrator.front.http.field_faults import FieldRefused, quoted
from orchestrator.front.http.fields import joined
from orchestrator.front.http.strict_json import finite_object

RESERVED = frozenset(("messages", "tools", "documents", "add_generation_prompt"))
"""Names that a chat template knows already."""


@dataclass(frozen=True, slots=True)
class ChatConversation:
    """The values that a chat template renders."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    """Functions that the model may call, in OpenAI's form."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables that the request sets for the chat template."""
    answer_follows: bool = True
    """Whether the prompt ends where an answer begins."""
    continued: bool = False
    """Whether the prompt ends within the last message, which the answer continues."""


def chat_conversation(messages: Sequence[Message], asked: ConversationFields) -> ChatConversation:
    """The conversation of a chat completion. Raises FieldRefused.

    The prompt leaves out tools that tool_choice forbids.
    """
    _check_tools(asked.tools or ())
    shown = chosen_tools(asked).shown
    plain = plain_messages(messages)
    variables = asked.variables()
    if taken := sorted(RESERVED & variables.keys()):
        raise FieldRefused(
            "chat_template_kwargs",
            f"chat_template_kwargs has {taken[0]}, which has a field of its own; use that",
        )
    continued = bool(asked.continue_final_message)
    if continued and (messages[-1].role != "assistant" or not plain[-1]["content"]):
        raise FieldRefused(
            "continue_final_message",
            "continue_final_message needs text of the assistant as the last message",
        )
    if continued and asked.add_generation_prompt:
        raise FieldRefused(
            "add_generation_prompt",
            "add_generation_prompt is given beside continue_final_message; leave one out",
        )
    follows = not continued and asked.add_generation_prompt is not False
    plain_tools = [tool.plain() for tool in shown]
    return ChatConversation(plain, plain_tools, variables, answer_follows=follows, continued=continued)


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as a chat template takes them. Raises FieldRefused where messages do not fit together."""
    called: set[str] = set()
    for place, message in enumerate(messages):
        _check_message(f"messages[{place}]", message, called)
        called.update(call.id for call in message.tool_calls or ())
    return [_plain(f"messages[{place}]", message) for place, message in enumerate(messages)]


def _check_message(place: str, message: Message, called: set[str]) -> None:
    if message.content is None and not message.tool_calls:
        if "content" not in message.model_fields_set:
            raise FieldRefused(f"{place}.content", f"{place}.content is missing")
        raise FieldRefused(
            f"{place}.content",
            f"{place}.content is null: it must be a string, or a list of parts of type text",
        )
    if message.tool_calls and message.role != "assistant":
        raise FieldRefused(
            f"{place}.tool_calls", f"{place} has tool_calls, but only role assistant calls tools"
        )
    name = f"{place}.tool_call_id"
    if message.role != "tool":
        if message.tool_call_id is not None:
            raise FieldRefused(name, f"{place} has tool_call_id, but its role is {message.role}")
    elif message.tool_call_id is None:
        raise FieldRefused(name, f"{name} is missing: a tool message answers a call")
    elif message.tool_call_id not in called:
        raise FieldRefused(
            name,
            f"{name} is {quoted(message.tool_call_id)}, but no call in the messages before has this id",
        )


def _plain(place: str, message: Message) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "role": message.role,
        "content": "" if message.content is None else joined(message.content),
    }
    thought = message.reasoning if message.reasoning_content is None else message.reasoning_content
    named = {"name": message.name, "reasoning_content": thought, "tool_call_id": message.tool_call_id}
    plain |= {name: value for name, value in named.items() if value is not None}
    if message.tool_calls:
        plain["tool_calls"] = [
            _plain_call(f"{place}.tool_calls[{number}]", call)
            for number, call in enumerate(message.tool_calls)
        ]
    return plain


def _plain_call(place: str, call: ToolCall) -> dict[str, Any]:
    """The call with its arguments as an object: templates write them as JSON."""
    field_ = f"{place}.function.arguments"
    try:
        arguments = finite_object(call.function.arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise FieldRefused(
            field_, f"{field_} is {quoted(call.function.arguments)}, which cannot be read as JSON: {error}"
        ) from None
    if arguments is None:
        raise FieldRefused(field_, f"{field_} is {quoted(call.function.arguments)}; give a JSON object")
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _check_tools(tools: Sequence[Tool]) -> None:
    names: set[str] = set()
    for number, tool in enumerate(tools):
        place, name = f"tools[{number}].function", tool.function.name
        if name in names:
            raise FieldRefused(f"{place}.name", f"{place}.name is {name!r}, an earlier tool's name")
        names.add(name)
        if tool.function.parameters:
            check_schema(f"{place}.parameters", tool.function.parameters)
