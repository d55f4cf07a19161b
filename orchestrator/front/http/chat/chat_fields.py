"""The fields of a chat completion's body, with their types; every other field is refused."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from orchestrator.front.http.fields import (
    NOT_SUPPORTED,
    UNTIL_FAULT,
    Content,
    Fields,
    GenerationFields,
    Ignored,
    Name,
    OnlyNothing,
    Text,
    Top,
    Whole,
)

MAX_TOOLS = 128
"""The most tools of a request, as at OpenAI."""
MAX_CALLS = 128
"""The most tool calls of a message."""
MAX_VARIABLES = 64
"""The most variables that a request may set for a chat template."""


def _text_alone(value: Any) -> Any:
    """The value, if it asks only for text; otherwise raises the error of an unsupported field."""
    if value not in (None, ["text"]):
        raise PydanticCustomError(NOT_SUPPORTED, "not supported")
    return value


FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
"""A function's name: letters, digits, underscores, dots and dashes."""


class FunctionCall(Fields):
    """The function that a tool call names, with its arguments."""

    name: FunctionName
    arguments: Text
    """A JSON object, as text."""
    parsed_arguments: Ignored = None


class ToolCall(Fields):
    """A call that the assistant made in an earlier turn."""

    id: Name
    """The name by which the message with the result refers to the call."""
    type: Literal["function"] | None = "function"
    function: FunctionCall
    index: Ignored = None


class Message(Fields):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    """Content of the message; parts are joined by line ends. Only a message with tool calls may lack
    content."""
    name: Text | None = None
    """Name of the author, for chat templates that use names."""
    reasoning_content: Text | None = None
    """The assistant's reasoning before the content, for chat templates that use reasoning."""
    reasoning: Text | None = None
    """The same by vLLM's name; left out of the prompt where `reasoning_content` is given."""
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS), UNTIL_FAULT] | None = None
    """The calls that the assistant made."""
    tool_call_id: Name | None = None
    """Role tool: the id of the call whose result this message has."""
    annotations: Ignored = None
    parsed: Ignored = None
    provider_specific_fields: Ignored = None
    refusal: OnlyNothing = None
    audio: OnlyNothing = None
    function_call: OnlyNothing = None


class ToolFunction(Fields):
    """A function that the model may call."""

    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    """The JSON schema of the arguments; default: the function takes none."""
    strict: bool | None = None
    """Whether calls must follow the schema; required and named calls always follow the schema."""


class Tool(Fields):
    """A tool that the model may call; every tool is a function."""

    type: Literal["function"]
    function: ToolFunction

    def plain(self) -> dict[str, Any]:
        """The tool as a chat template takes it, without the function's fields that are null."""
        function = {name: value for name, value in self.function.model_dump().items() if value is not None}
        return {"type": self.type, "function": function}


class NamedFunction(Fields):
    """The name of a function to call."""

    name: FunctionName


class NamedTool(Fields):
    """The tool that the model has to call."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Fields):
    """The tools that the model may call, among those of the request."""

    mode: Literal["auto", "required"]
    """auto: the model decides whether to call one; required: it has to."""
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS), UNTIL_FAULT]


class AllowedChoice(Fields):
    """A choice that narrows the request's tools down."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _kind_of_choice(value: Any) -> str:
    if isinstance(value, str):
        return "a word"
    type_ = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "some tools" if type_ == "allowed_tools" else "one tool"


Messages = Annotated[list[Message], Field(min_length=1), UNTIL_FAULT]
Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS), UNTIL_FAULT]
ToolChoice = Annotated[
    Annotated[Literal["auto", "none", "required"], Tag("a word")]
    | Annotated[NamedTool, Tag("one tool")]
    | Annotated[AllowedChoice, Tag("some tools")],
    Discriminator(_kind_of_choice),
]


class ChatFields(GenerationFields):
    """Fields of /v1/chat/completions beside the conversation."""

    max_completion_tokens: Whole | None = None
    """The most tokens of the answer, as max_tokens; give one of the two."""
    logprobs: bool | None = None
    top_logprobs: Top | None = None
    """Needs logprobs."""
    modalities: Annotated[list[Literal["text"]] | None, BeforeValidator(_text_alone)] = None
    """Kinds of output; only text is supported."""
    functions: OnlyNothing = None
    function_call: OnlyNothing = None
    audio: OnlyNothing = None
    verbosity: OnlyNothing = None
    web_search_options: OnlyNothing = None
    moderation: OnlyNothing = None


class ConversationFields(Fields):
    """Fields from which a prompt is rendered, apart from the messages."""

    tools: Tools | None = None
    """Functions that the model may call."""
    tool_choice: ToolChoice | None = None
    """auto (default), none, required, the function to call, or the functions that may be called."""
    parallel_tool_calls: bool | None = None
    """Whether a required answer may have several calls; default true. With auto the model decides."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """Amount of reasoning, for chat templates that use it; none also sets `enable_thinking` to false."""
    chat_template_kwargs: Annotated[dict[Name, Any], Field(max_length=MAX_VARIABLES)] | None = None
    """Variables for the chat template."""
    continue_final_message: bool | None = None
    """Whether the answer continues the last message, which must be the assistant's; default false."""
    add_generation_prompt: bool | None = None
    """Whether the prompt ends where an answer begins; default true, unless the answer continues a message."""

    def variables(self) -> Mapping[str, Any]:
        """The variables that the chat template finds beside the messages and the tools."""
        found: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            found["reasoning_effort"] = self.reasoning_effort
            if self.reasoning_effort == "none":
                found["enable_thinking"] = False
        return found | (self.chat_template_kwargs or {})


CONVERSATION = frozenset(ConversationFields.names)
"""Names of the fields that only affect how the prompt is rendered."""


class ChatRequest(ChatFields, ConversationFields):
    """Body of /v1/chat/completions."""

    messages: Messages
