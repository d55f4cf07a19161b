"""The fields that a request's body may have, with their types; every other field is refused.

Ranges that depend on the target, or that requests over gRPC have too, are checked by the admission.

Validation reports the first fault and ends there: the items of a list are checked until one is wrong, the
kind of a prompt follows from its first item, and a table with too many entries is refused unread. So a body
costs no more to refuse than to accept.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    FailFast,
    Field,
    Tag,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from outrider.wire.names import MAX_REFERENCES
from speculative.params import MAX_BIAS_ENTRIES, MAX_STOP_IDS
from speculative.request_bounds import (
    MAX_CHOICE_BYTES,
    MAX_CHOICE_TEXTS,
    MAX_LARK_BYTES,
    MAX_REGEX_BYTES,
    MAX_SCHEMA_BYTES,
    MAX_TOP_LOGPROBS,
)
from speculative.stop import MAX_STOP_BYTES, MAX_STOPS

MAX_NAME = 256
"""The most characters of a name in a body: of a model, a source, a corpus, a schema."""
MAX_NAMES = 64
"""The most names in a list of names."""


class _UntilFault(FailFast):
    """The library's mark for lists that are checked until an item is wrong, fit to stand in a union."""

    def __hash__(self) -> int:
        return hash(type(self))


UNTIL_FAULT = _UntilFault()
UNKNOWN_FIELD = "unknown_field"
NOT_SUPPORTED = "not_supported"
TOO_MANY = "too_many"
TAKES = "takes"
"""The kind of a fault whose message says what the field takes."""


def _writable(text: str) -> str:
    """The text, if it can be written as UTF-8: JSON can name halves of characters."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"it has half a character at {error.start}") from error
    return text


def _truth(value: Any) -> Any:
    """The value, if it is true or false.

    A Literal compares, and for Python 0 equals False and 1 equals True.
    """
    if not isinstance(value, bool):
        raise ValueError("it is neither true nor false")
    return value


def _whole(value: Any) -> Any:
    """The value, if it is a whole number, which neither true nor 1.0 is."""
    if type(value) is not int:
        raise ValueError("it is no whole number")
    return value


def _nothing(value: Any) -> None:
    """None, if the value asks for nothing: null, or an empty list."""
    if value is not None and value != []:
        raise PydanticCustomError(NOT_SUPPORTED, "not supported")


def _few_biases(value: Any) -> Any:
    """The table of biases, unless an entry is written so that two entries could name one token.

    Refuses a table with too many entries at once: the library would check each entry.
    """
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_BIAS_ENTRIES:
        raise PydanticCustomError(TOO_MANY, "too many entries", {"max_length": MAX_BIAS_ENTRIES})
    for name in value:
        if name.startswith("0") and name != "0":
            raise ValueError("give token ids without leading zeros")
    return value


def _kind_of_prompt(value: Any) -> str | None:
    """The tag of the only kind of prompt that this value may be, found from its first item."""
    if isinstance(value, str):
        return "one text"
    if not isinstance(value, list):
        return None
    first = value[0] if value else None
    return (
        "some texts"
        if isinstance(first, str)
        else "lists of ids"
        if isinstance(first, list)
        else "list of ids"
    )


Text = Annotated[str, AfterValidator(_writable)]
Name = Annotated[Text, Field(max_length=MAX_NAME)]
Names = Annotated[list[Name], Field(max_length=MAX_NAMES), UNTIL_FAULT]
Stop = Annotated[Text, Field(max_length=MAX_STOP_BYTES)]
Whole = Annotated[int, Field(ge=0, lt=2**31)]
Id = Annotated[int, Field(ge=0, lt=2**32)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
Top = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
OnlyTrue = Annotated[Literal[True], BeforeValidator(_truth)]
OnlyOne = Annotated[Literal[1], BeforeValidator(_whole)]
OnlyNothing = Annotated[
    None,
    BeforeValidator(_nothing),
    WithJsonSchema({"anyOf": [{"type": "null"}, {"type": "array", "maxItems": 0}]}),
]
"""A field of OpenAI's that this server does not support: null or an empty list asks for nothing."""
Ignored = Annotated[Any, Field(description="Accepted and ignored.")]
"""A field that cannot change the text: the server does not look at the value."""


Ids = Annotated[list[Id], UNTIL_FAULT]
# The tags hold spaces, as no field's name does.
Prompt = Annotated[
    Annotated[Text, Tag("one text")]
    | Annotated[list[Text], Field(min_length=1), UNTIL_FAULT, Tag("some texts")]
    | Annotated[Ids, Field(min_length=1), Tag("list of ids")]
    | Annotated[list[Ids], Field(min_length=1), UNTIL_FAULT, Tag("lists of ids")],
    Discriminator(_kind_of_prompt),
]
"""A text, several texts, token ids, or several lists of token ids."""


Stops = Annotated[
    Annotated[Stop, Tag("one string")]
    | Annotated[list[Stop], Field(max_length=MAX_STOPS), UNTIL_FAULT, Tag("some strings")],
    Discriminator(lambda value: "some strings" if isinstance(value, list) else "one string"),
]


class Fields(BaseModel):
    """Base of all bodies: unknown fields are refused, and no type is converted to another."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)
    names: ClassVar[frozenset[str]] = frozenset()
    """Names of the fields, as bodies have them."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        cls.names = frozenset(field.alias or name for name, field in cls.model_fields.items())

    @model_validator(mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        """Refuse the first unknown field; the library would report every one."""
        if isinstance(value, dict):
            for name in value:
                if name not in cls.names:  # of which the library takes no half characters
                    shown = name.encode("utf-8", "backslashreplace").decode()
                    raise PydanticCustomError(UNKNOWN_FIELD, "unknown field", {"name": shown})
        return value


class StreamOptions(Fields):
    """Options of a stream of events."""

    include_usage: bool | None = None
    """Whether one more event, with the usage, comes before the end of the stream."""
    continuous_usage_stats: bool | None = None
    """Whether every event has the usage up to this event."""
    include_obfuscation: Ignored = None


class SpeculationFields(Fields):
    """How sources draft for the request; its text is the same in any case, unless it names a criterion."""

    enabled: bool | None = None
    """Whether sources draft at all; default true."""
    sources: Names | None = None
    """Names of the sources to draft from, at most 16; default: the sources that the server chooses."""
    nodes: Whole | None = None
    """The most drafted tokens that one round verifies; 0 is plain decoding."""
    learn: bool | None = None
    """Whether the answer may be kept to draft from, for the same tenant; default true."""
    corpora: Names | None = None
    """Names of the corpora to draft from; default all."""
    edit: bool | None = None
    """Whether the answer may copy from the prompt's last document, as from a reference; default false."""
    criterion: dict[Name, dict[Name, Number]] | None = None
    """How drafted tokens are accepted: the name of a criterion and its parameters; default: none."""
    policy: Name | None = None
    """How far drafts go: a policy's name, or name:number; default: as each source's settings say."""


class JsonSchema(Fields):
    """A JSON schema with a name."""

    name: Name
    """A name for readers; it changes nothing."""
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    """The schema that the text has to match."""
    strict: bool | None = None
    """The schema is enforced in any case."""
    description: Ignored = None


class TextFormat(Fields):
    """Response format: any text."""

    type: Literal["text"]


class JsonObjectFormat(Fields):
    """Response format: any JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(Fields):
    """JSON that a schema allows."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(Fields):
    """What the text has to match, under vLLM's names; give one of these."""

    json_: Annotated[
        Annotated[Text, Field(max_length=MAX_SCHEMA_BYTES)] | dict[str, Any] | None, Field(alias="json")
    ] = None
    """A schema, as an object or as text."""
    regex: Annotated[Text, Field(max_length=MAX_REGEX_BYTES)] | None = None
    """A regular expression that the whole text has to match."""
    json_object: OnlyTrue | None = None
    choice: (
        Annotated[
            list[Annotated[Text, Field(max_length=MAX_CHOICE_BYTES)]],
            Field(max_length=MAX_CHOICE_TEXTS),
            UNTIL_FAULT,
        ]
        | None
    ) = None
    """Texts of which the whole output must be one."""
    grammar: Annotated[Text, Field(max_length=MAX_LARK_BYTES)] | None = None
    """A grammar in Lark's language that the whole output must follow."""


class TextPart(Fields):
    """A piece of a message, or of a prediction."""

    type: Literal["text"]
    text: Text


Content = Text | Annotated[list[TextPart], UNTIL_FAULT]


class Prediction(Fields):
    """Text that the answer may resemble; it serves as a draft, and does not change the answer."""

    type: Literal["content"]
    content: Content
    """Parts are joined by line ends."""

    def plain(self) -> str:
        """The predicted text."""
        return joined(self.content)


def joined(content: str | Sequence[TextPart]) -> str:
    """The content's parts as one text, joined by newlines."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


class IgnoredFields(Fields):
    """Fields that cannot change the text: programs send them to OpenAI, and the server ignores them."""

    user: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    """Accepted and ignored: the server stores no answers."""
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    """Accepted and ignored: prompts are cached by what they hold."""
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None


IGNORED = frozenset(IgnoredFields.names)
"""Names of the body's fields whose values nobody looks at."""


class DecodingFields(IgnoredFields):
    """Fields that every API which generates text has, under the same names."""

    model: Name | None = None
    """Name of the model; may be left out where one model is served."""
    temperature: Number | None = None
    """Default 1; 0 is greedy."""
    top_p: Number | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    """How many of the likeliest tokens to keep; 0 and -1 keep all."""
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[str, Field(pattern=r"^[0-9]{1,10}$")], Number],
            BeforeValidator(_few_biases),
            Field(max_length=MAX_BIAS_ENTRIES),
        ]
        | None
    ) = None
    """Numbers to add to the logits of tokens, by token id, which is written as a string."""
    contrast_strength: Number | None = None
    """Weight of the verifier's amateur against the target; default 0, no contrast."""
    contrast_plausibility: Number | None = None
    """With contrast_strength: tokens below this share of the likeliest are dropped; default 0.1."""
    min_tokens: Whole | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[Id], Field(max_length=MAX_STOP_IDS), UNTIL_FAULT] | None = None
    seed: Seed | None = None
    """The same request with the same seed has the same answer; default: drawn, and returned with the
    answer."""
    structured_outputs: StructuredOutputs | None = None
    """What the text has to match, where the API's own field has no name for it; give one of the two."""
    prediction: Prediction | None = None
    references: Annotated[list[Text], Field(max_length=MAX_REFERENCES), UNTIL_FAULT] | None = None
    """At most 16 texts that the answer may copy from; they serve as drafts, and do not change the answer."""
    stream: bool | None = None
    speculation: SpeculationFields | None = None
    return_token_ids: bool | None = None
    """Whether the answer holds the token ids of prompt and answer."""


class GenerationFields(DecodingFields):
    """Fields of text and chat completions alike."""

    max_tokens: Whole | None = None
    """The most tokens to generate; default: the server's."""
    stop: Stops | None = None
    """At most 16 stop strings; the text leaves them out."""
    n: Annotated[Whole, Field(ge=1)] | None = None
    """Number of choices for each prompt, at most 16; default 1."""
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions | None = None
    return_token_sources: bool | None = None
    """Whether the answer names who drafted each token: `token_sources`, a list of text and source; `target`
    is the model itself."""
    per_request_spec_decode_metrics: Literal["none", "summary", "detailed"] | None = None
    """How much of `metrics.speculative_decoding` the answer holds; default none."""


class CompletionFields(GenerationFields):
    """Fields of /v1/completions beside the prompt."""

    logprobs: Top | None = None
    """How many of the likeliest tokens to return beside each generated token."""
    echo: bool | None = None
    """Whether the answer begins with the prompt; with logprobs, the prompt's tokens have theirs, too."""
    suffix: Text | None = None
    """Text that follows the answer: the model fills the gap between the prompt and this text."""
    best_of: OnlyOne | None = None


class CompletionRequest(CompletionFields):
    """Body of /v1/completions."""

    prompt: Prompt
    """A text, several texts, token ids, or several lists of token ids."""
