"""The fields of bodies of /v1/messages and /v1/messages/count_tokens; every other field is refused."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from orchestrator.front.http.chat.chat_fields import MAX_TOOLS, MAX_VARIABLES, FunctionName
from orchestrator.front.http.dialects.translation import ForeignTool, by_type, checked_type, text_or
from orchestrator.front.http.fields import (
    TAKES,
    UNTIL_FAULT,
    DecodingFields,
    Fields,
    Ignored,
    Name,
    OnlyNothing,
    Stop,
    Text,
    Whole,
)
from speculative.stop import MAX_STOPS


class BlockText(Fields):
    """A block of text."""

    type: Literal["text"]
    text: Text
    cache_control: Ignored = None
    citations: OnlyNothing = None


class BlockThinking(Fields):
    """A block of reasoning of an earlier turn, for chat templates that use reasoning."""

    type: Literal["thinking"]
    thinking: Text
    signature: Ignored = None


class BlockRedacted(Fields):
    """Reasoning that only another server can read: left out of the prompt."""

    type: Literal["redacted_thinking"]
    data: Ignored = None


class BlockToolUse(Fields):
    """A call that the model made in an earlier turn."""

    type: Literal["tool_use"]
    id: Name
    """The name by which the block with the result refers to the call."""
    name: FunctionName
    input: dict[str, Any]
    """The arguments."""
    cache_control: Ignored = None
    caller: Ignored = None


_RESULT = "a string", "blocks of type text"
Texts = Annotated[
    Annotated[Text, Tag("one text")]
    | Annotated[
        list[Annotated[Annotated[BlockText, Tag("of type text")], by_type(("text",))]],
        UNTIL_FAULT,
        Tag("some parts"),
    ],
    text_or(*_RESULT),
]
"""A string, or a list of blocks of type `text`, which are joined by line ends."""


class BlockToolResult(Fields):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: Texts | None = None
    is_error: Ignored = None
    """Accepted and ignored: chat templates have no such field, so the content has to name the error."""
    cache_control: Ignored = None


Block = Annotated[
    Annotated[BlockText, Tag("of type text")]
    | Annotated[BlockThinking, Tag("of type thinking")]
    | Annotated[BlockRedacted, Tag("of type redacted_thinking")]
    | Annotated[BlockToolUse, Tag("of type tool_use")]
    | Annotated[BlockToolResult, Tag("of type tool_result")],
    by_type(("text", "thinking", "redacted_thinking", "tool_use", "tool_result")),
]


class MessageTurn(Fields):
    """One turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Annotated[Text, Tag("one text")] | Annotated[list[Block], UNTIL_FAULT, Tag("some parts")],
        text_or("a string", "blocks of type text, thinking, tool_use or tool_result"),
    ]
    """A string, or a list of blocks of type `text`, `thinking`, `tool_use` or `tool_result`."""


class ClientTool(Fields):
    """A function that the model may call."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: Text | None = None
    input_schema: dict[str, Any]
    """The JSON schema of the arguments."""
    strict: bool | None = None
    """Changes nothing: calls that tool_choice asks for always follow the schema."""
    cache_control: Ignored = None
    allowed_callers: Ignored = None
    defer_loading: Ignored = None
    eager_input_streaming: Ignored = None
    input_examples: OnlyNothing = None


def _kind_of_tool(value: Any) -> str | None:
    type_ = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if not isinstance(value, dict | Fields | ForeignTool):
        return None
    return "a function" if type_ in (None, "custom") else "another tool"


class ToolSelection(Fields):
    """Whether the model calls tools, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    """Type tool: the function to call."""
    disable_parallel_tool_use: bool | None = None
    """Whether the answer has at most one call, where a call is asked for."""


class ThinkingConfig(Fields):
    """Whether the model reasons before it answers, for chat templates with `enable_thinking`."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: Ignored = None
    """Accepted and ignored: max_tokens alone bounds the reasoning."""
    display: Ignored = None


class SchemaFormat(Fields):
    """JSON that a schema allows."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    """The schema that the text has to match."""


class OutputConfig(Fields):
    """How the answer is made."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """Amount of reasoning, for chat templates that use it."""
    format: (
        Annotated[
            SchemaFormat, BeforeValidator(checked_type("json_schema", "give an object of type json_schema"))
        ]
        | None
    ) = None


class TurnFields(Fields):
    """Fields from which a prompt is rendered."""

    messages: Annotated[list[MessageTurn], Field(min_length=1), UNTIL_FAULT]
    """The turns so far. If the last turn is the assistant's, the answer continues that turn."""
    system: Texts | None = None
    """A system message before the turns."""
    tools: (
        Annotated[
            list[
                Annotated[
                    Annotated[ClientTool, Tag("a function")] | Annotated[ForeignTool, Tag("another tool")],
                    Discriminator(
                        _kind_of_tool, custom_error_type=TAKES, custom_error_message="give an object"
                    ),
                ]
            ],
            Field(max_length=MAX_TOOLS),
            UNTIL_FAULT,
        ]
        | None
    ) = None
    """Functions that the model may call; tools of other types are skipped, and named in `skipped_tools`."""
    tool_choice: ToolSelection | None = None
    """auto (default), any, tool or none."""
    thinking: ThinkingConfig | None = None
    """Default disabled."""
    output_config: OutputConfig | None = None
    chat_template_kwargs: Annotated[dict[Name, Any], Field(max_length=MAX_VARIABLES - 1)] | None = None
    """Variables for the chat template, beside `enable_thinking`."""
    cache_control: Ignored = None
    """Accepted and ignored, also in blocks and tools: prompts are cached by what they hold."""
    speed: Ignored = None
    user_profile_id: Ignored = None
    workspace_id: Ignored = None
    mcp_servers: OnlyNothing = None
    context_management: OnlyNothing = None


class MessagesRequest(TurnFields, DecodingFields):
    """Body of /v1/messages."""

    max_tokens: Annotated[Whole, Field(ge=1)]
    """The most tokens of the answer, reasoning included; the context may have room for fewer."""
    stop_sequences: Annotated[list[Stop], Field(max_length=MAX_STOPS), UNTIL_FAULT] | None = None
    """At most 16 stop strings; the text leaves them out."""
    inference_geo: Ignored = None
    diagnostics: Ignored = None
    container: OnlyNothing = None


class CountRequest(TurnFields):
    """Body of /v1/messages/count_tokens."""

    model: Name | None = None
    """Name of the model; may be left out where one model is served."""
