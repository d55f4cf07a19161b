"""The fields of a body of /v1/responses, with their types; every other field is refused."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from orchestrator.front.http.chat.chat_fields import MAX_TOOLS, MAX_VARIABLES, FunctionName
from orchestrator.front.http.dialects.translation import ForeignTool, by_type, only, text_or
from orchestrator.front.http.fields import (
    TAKES,
    UNTIL_FAULT,
    DecodingFields,
    Fields,
    Ignored,
    JsonObjectFormat,
    Name,
    Names,
    OnlyNothing,
    Stops,
    Text,
    TextFormat,
    Whole,
)

LOGPROBS = "message.output_text.logprobs"
NO_LOGPROBS = "/v1/responses has no log-probabilities; ask /v1/chat/completions for them"
_NO_TRUNCATION = "this server truncates no conversation; leave it out"
_STATELESS = "this server keeps no responses; send the earlier items in input"
_CHOICE = 'it must be auto, none, required, {"type": "function", "name"}, or an object of type allowed_tools'


class ItemText(Fields):
    """A piece of text in an item."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: Text
    annotations: Ignored = None
    logprobs: Ignored = None
    prompt_cache_breakpoint: Ignored = None


class ItemRefusal(Fields):
    """A piece of a message in which another model refused to answer."""

    type: Literal["refusal"]
    refusal: Text


ItemPart = Annotated[
    Annotated[ItemText, Tag("of type input_text")]
    | Annotated[ItemText, Tag("of type output_text")]
    | Annotated[ItemText, Tag("of type text")]
    | Annotated[ItemRefusal, Tag("of type refusal")],
    by_type(("input_text", "output_text", "text", "refusal")),
]
ItemContent = Annotated[
    Annotated[Text, Tag("one text")] | Annotated[list[ItemPart], UNTIL_FAULT, Tag("some parts")],
    text_or("a string", "parts of type input_text or output_text"),
]
"""A string, or a list of parts of type `input_text` or `output_text`, which are joined by line ends."""


class InputMessage(Fields):
    """An item of the input: a message."""

    type: Literal["message"] | None = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: ItemContent
    id: Ignored = None
    status: Ignored = None
    phase: Ignored = None


class InputCall(Fields):
    """An item of the input: a call that the model made in an earlier turn."""

    type: Literal["function_call"]
    call_id: Name
    """The name by which the item with the output refers to the call."""
    name: FunctionName
    arguments: Text
    """A JSON object, as text."""
    id: Ignored = None
    status: Ignored = None
    caller: Ignored = None
    namespace: OnlyNothing = None


class InputCallOutput(Fields):
    """An item of the input: the output of a function that the model called."""

    type: Literal["function_call_output"]
    call_id: Name
    output: ItemContent
    id: Ignored = None
    status: Ignored = None
    caller: Ignored = None
    name: Ignored = None
    namespace: OnlyNothing = None


class InputReasoning(Fields):
    """An item of the input: reasoning of an earlier turn, for chat templates that use reasoning."""

    type: Literal["reasoning"]
    content: Annotated[list[ItemText], UNTIL_FAULT] | None = None
    summary: Annotated[list[ItemText], UNTIL_FAULT] | None = None
    """Stands in for content that is missing."""
    encrypted_content: Ignored = None
    id: Ignored = None
    status: Ignored = None


InputItem = Annotated[
    Annotated[InputMessage, Tag("of type message")]
    | Annotated[InputCall, Tag("of type function_call")]
    | Annotated[InputCallOutput, Tag("of type function_call_output")]
    | Annotated[InputReasoning, Tag("of type reasoning")],
    by_type(("message", "function_call", "function_call_output", "reasoning"), default="message"),
]
Input = Annotated[
    Annotated[Text, Tag("one text")]
    | Annotated[list[InputItem], Field(min_length=1), UNTIL_FAULT, Tag("some parts")],
    text_or("a string", "items"),
]
"""A string, or a list of items of type `message`, `function_call`, `function_call_output` or `reasoning`."""


class FunctionTool(Fields):
    """A function that the model may call."""

    type: Literal["function"]
    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    """The JSON schema of the arguments; default: the function takes none."""
    strict: bool | None = None
    """Changes nothing: required and named calls always follow the schema."""
    defer_loading: Ignored = None
    allowed_callers: Ignored = None
    output_schema: Ignored = None


def _kind_of_tool(value: Any) -> str | None:
    type_ = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return None if not isinstance(type_, str) else "a function" if type_ == "function" else "another tool"


class NamedFunctionTool(Fields):
    """The function that the model has to call."""

    type: Literal["function"]
    name: FunctionName


class AllowedFunctions(Fields):
    """The functions that the model may call, among those of the request."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    """auto: the model decides whether to call one; required: it has to."""
    tools: Annotated[list[NamedFunctionTool], Field(min_length=1, max_length=MAX_TOOLS), UNTIL_FAULT]


class NamedFormat(Fields):
    """JSON that a schema allows."""

    type: Literal["json_schema"]
    name: Name
    """A name for readers; it changes nothing."""
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    """The schema that the text has to match."""
    strict: bool | None = None
    """Changes nothing: the schema is always enforced."""
    description: Ignored = None


class TextConfig(Fields):
    """How the text is formatted."""

    format: (
        Annotated[
            Annotated[TextFormat, Tag("of type text")]
            | Annotated[JsonObjectFormat, Tag("of type json_object")]
            | Annotated[NamedFormat, Tag("of type json_schema")],
            by_type(("text", "json_object", "json_schema")),
        ]
        | None
    ) = None
    verbosity: OnlyNothing = None


class ReasoningConfig(Fields):
    """How much the model reasons."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """Amount of reasoning, for chat templates that use it; none also sets `enable_thinking` to false."""
    summary: Ignored = None
    """Accepted and ignored: the answer has the whole reasoning."""
    generate_summary: Ignored = None
    context: Ignored = None


class ResponseStreamOptions(Fields):
    """Options of a stream of events."""

    include_obfuscation: Ignored = None


ResponseTool = Annotated[
    Annotated[FunctionTool, Tag("a function")] | Annotated[ForeignTool, Tag("another tool")],
    Discriminator(
        _kind_of_tool, custom_error_type=TAKES, custom_error_message="give an object with the tool's type"
    ),
]


def _kind_of_choice(value: Any) -> str | None:
    if isinstance(value, str):
        return "a word" if value in ("auto", "none", "required") else None
    type_ = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return {"function": "one function", "allowed_tools": "some functions"}.get(str(type_))


FunctionChoice = Annotated[
    Annotated[Literal["auto", "none", "required"], Tag("a word")]
    | Annotated[NamedFunctionTool, Tag("one function")]
    | Annotated[AllowedFunctions, Tag("some functions")],
    Discriminator(_kind_of_choice, custom_error_type=TAKES, custom_error_message=_CHOICE),
]


class ResponsesRequest(DecodingFields):
    """Body of /v1/responses."""

    input: Input
    """A string, or the items of the conversation so far."""
    instructions: Text | None = None
    """A system message before the input."""
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS), UNTIL_FAULT] | None = None
    """Functions that the model may call; tools of other types are skipped, and named in `skipped_tools`."""
    tool_choice: FunctionChoice | None = None
    """auto (default), none, required, the function to call, or the functions that may be called."""
    parallel_tool_calls: bool | None = None
    """Whether a required answer may have several calls; default true. With auto the model decides."""
    max_output_tokens: Whole | None = None
    """The most tokens of the answer, reasoning included; default: as many as the context leaves."""
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: Names | None = None
    """Accepted and ignored, except `message.output_text.logprobs`, which is refused."""
    truncation: Annotated[Any, BeforeValidator(only(("disabled",), _NO_TRUNCATION))] = None
    """Only `disabled`: a conversation that is too long is refused."""
    background: Annotated[Any, BeforeValidator(only((False,), "it must be false"))] = None
    previous_response_id: Annotated[Any, BeforeValidator(only((), _STATELESS))] = None
    """Refused: the server keeps no responses."""
    conversation: Annotated[Any, BeforeValidator(only((), _STATELESS))] = None
    """Refused: the server keeps no conversations."""
    top_logprobs: Annotated[Any, BeforeValidator(only((0,), NO_LOGPROBS))] = None
    prompt: OnlyNothing = None
    context_management: OnlyNothing = None
    moderation: OnlyNothing = None
    stream_options: ResponseStreamOptions | None = None
    max_tool_calls: Ignored = None
    """Accepted and ignored: bounds calls of tools that the server itself would run."""
    client_metadata: Ignored = None
    stop: Stops | None = None
    """At most 16 stop strings; the text leaves them out."""
    chat_template_kwargs: Annotated[dict[Name, Any], Field(max_length=MAX_VARIABLES)] | None = None
    """Variables for the chat template."""
