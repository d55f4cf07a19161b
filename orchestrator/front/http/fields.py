"""What may stand in a request's body, by name and kind; whatever else stands there is refused.

Ranges that depend on the target, or that requests over gRPC have too, are checked where those are.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from outrider.wire.codec import MAX_CHOICES
from speculative.logprobs import MAX_TOP_LOGPROBS


def _writable(text: str) -> str:
    """JSON can name halves of characters, which no text has."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"it has half a character at {error.start}") from error
    return text


def _truth(value: Any) -> Any:
    """A Literal compares, and to Python 0 is False and 1 is True; in JSON they are not."""
    if not isinstance(value, bool):
        raise ValueError("it is neither true nor false")
    return value


def _whole(value: Any) -> Any:
    """The same the other way round, and as elsewhere 1.0 is no whole number."""
    if type(value) is not int:
        raise ValueError("it is no whole number")
    return value


Text = Annotated[str, AfterValidator(_writable)]
Whole = Annotated[int, Field(ge=0, lt=2**31)]
Id = Annotated[int, Field(ge=0, lt=2**32)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
Top = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
OnlyTrue = Annotated[Literal[True], BeforeValidator(_truth)]
OnlyFalse = Annotated[Literal[False], BeforeValidator(_truth)]
OnlyOne = Annotated[Literal[1], BeforeValidator(_whole)]


class Fields(BaseModel):
    """Base of all bodies: nothing unknown, and no kind taken for another."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


class StreamOptions(Fields):
    """What a stream tells beside the answer."""

    include_usage: bool | None = None
    """Whether one more event with the usage comes before the end."""


class SpeculationFields(Fields):
    """How the request is drafted for; the text is the same in any case."""

    enabled: bool | None = None
    """Default true."""
    sources: list[Text] | None = None
    """Names of the sources to draft from; default all."""
    nodes: Whole | None = None
    """The most drafted nodes in one round; 0 is plain decoding."""
    learn: bool | None = None
    """Whether the answer may be kept to draft from, for the same tenant; default true."""
    corpora: list[Text] | None = None
    """Names of the corpora to draft from; default all."""


class JsonSchema(Fields):
    """A schema by name."""

    name: str
    """For the reader; it changes nothing."""
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    """What the text has to be."""
    strict: OnlyTrue | None = None
    """The schema is enforced in any case."""


class TextFormat(Fields):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Fields):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(Fields):
    """JSON that a schema allows."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(Fields):
    """What the text has to be, in vLLM's words; one of these."""

    json_: Annotated[Text | dict[str, Any] | None, Field(alias="json")] = None
    """A schema, as an object or as text."""
    regex: Text | None = None
    """Matched by the text as a whole."""
    json_object: OnlyTrue | None = None


class TextPart(Fields):
    """A piece of a message, or of a prediction."""

    type: Literal["text"]
    text: Text


class Prediction(Fields):
    """What the answer may resemble; it is drafted from, and changes nothing."""

    type: Literal["content"]
    content: Text | list[TextPart]
    """Parts are joined by line ends."""

    def plain(self) -> str:
        """As one text."""
        return joined(self.content)


def joined(content: str | Sequence[TextPart]) -> str:
    """Parts as one text."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


class Generation(Fields):
    """What both kinds of completion take."""

    model: Text | None = None
    """May be left out where one model is served."""
    max_tokens: Whole | None = None
    """The most ids to generate; default: the server's."""
    temperature: Number | None = None
    """Default 1; 0 is greedy."""
    top_p: Number | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    """0 and -1 keep all."""
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: dict[Annotated[str, Field(pattern=r"^\d{1,10}$")], Number] | None = None
    """Token id, as a string, to a number that is added to its logit."""
    min_tokens: Whole | None = None
    ignore_eos: bool | None = None
    stop: Text | list[Text] | None = None
    """At most 16, which the text leaves out."""
    stop_token_ids: list[Id] | None = None
    seed: Seed | None = None
    """The same request with the same seed has the same answer; default: drawn, and told in the answer."""
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    """The same for what response_format has no name for; give one of them."""
    prediction: Prediction | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculation: SpeculationFields | None = None
    return_token_ids: bool | None = None
    """Whether the ids of prompt and answer are told."""
    per_request_spec_decode_metrics: Literal["none", "summary", "detailed"] | None = None
    """How much of `metrics.speculative_decoding` is told; default none."""


class CompletionRequest(Generation):
    """Body of /v1/completions."""

    prompt: Text | list[Text] | list[Id] | list[list[Id]]
    """A text, several, a text's ids, or those of several."""
    logprobs: Top | None = None
    """How many of the likeliest ids are told beside each generated one."""
    echo: OnlyFalse | None = None
    best_of: OnlyOne | None = None


class Message(Fields):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart]
    """Parts are joined by line ends."""
    name: Text | None = None
    """For templates that use it."""

    def plain(self) -> dict[str, str]:
        """As a template takes it."""
        named = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": joined(self.content), **named}


class ChatRequest(Generation):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Whole | None = None
    """The same as max_tokens; give one of them."""
    logprobs: bool | None = None
    top_logprobs: Top | None = None
    """Needs logprobs."""


class TokenizeRequest(Fields):
    """Body of /tokenize: either a text or a conversation."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds what it adds to a prompt; default true, with messages false."""
    add_generation_prompt: bool | None = None
    """With messages: whether an answer is to follow; default true."""
    return_token_strs: bool | None = None


class DetokenizeRequest(Fields):
    """Body of /detokenize."""

    model: Text | None = None
    tokens: list[Id]
