"""Reads a body: from bytes of JSON to checked fields, and its prompts apart from them. Pure.

Counts are checked on what JSON became, before any of it is converted, and the first fault ends the reading.
Small bodies are read on the event loop, large ones and conversations in a process of their own, which hands
back the prompts in packed form and the other fields, few bytes, as JSON.
"""

import json
import sys
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

from pydantic import ValidationError

from orchestrator.front.http.bodies.bounds import LOOP_BYTES, BodyBounds, BodyKind
from orchestrator.front.http.bodies.tokenize_fields import (
    DetokenizeFields,
    DetokenizeRequest,
    TokenizeFields,
    TokenizeRequest,
)
from orchestrator.front.http.chat.chat_fields import CONVERSATION, ChatFields, ChatRequest
from orchestrator.front.http.chat.conversation import ChatConversation, chat_conversation, plain_messages
from orchestrator.front.http.chat.plan import ChatPlan
from orchestrator.front.http.chat.planning import Rendered, planned
from orchestrator.front.http.dialects.messages_fields import CountRequest, MessagesRequest
from orchestrator.front.http.dialects.messages_translation import messages_as_chat
from orchestrator.front.http.dialects.responses_fields import ResponsesRequest
from orchestrator.front.http.dialects.responses_translation import response_as_chat
from orchestrator.front.http.dialects.translated_fields import TranslatedFields
from orchestrator.front.http.dialects.translation import ChatTranslation, in_places
from orchestrator.front.http.field_faults import FieldRefused, field_refused
from orchestrator.front.http.fields import (
    IGNORED,
    CompletionFields,
    CompletionRequest,
    Fields,
    GenerationFields,
    JsonSchemaFormat,
)
from orchestrator.front.http.strict_json import NotStrict, strict_value
from outrider.wire.names import MAX_REFERENCES
from speculative.request_bounds import MAX_SCHEMA_BYTES

Prompt: TypeAlias = "str | array[int]"
"""A text, or token ids packed as 32-bit numbers."""
Request = (
    ResponsesRequest
    | MessagesRequest
    | CountRequest
    | CompletionRequest
    | ChatRequest
    | TokenizeRequest
    | DetokenizeRequest
)
BodyFields = CompletionFields | ChatFields | TokenizeFields | DetokenizeFields
Render = Callable[[str | None, ChatConversation], Rendered]
"""Makes a prompt of a conversation, by the template of the model that the body names. Raises FieldRefused."""

Model = TypeVar("Model", bound=Fields)

_REQUESTS: dict[BodyKind, type[Request]] = {
    BodyKind.COMPLETION: CompletionRequest,
    BodyKind.CHAT: ChatRequest,
    BodyKind.TOKENIZE: TokenizeRequest,
    BodyKind.DETOKENIZE: DetokenizeRequest,
    BodyKind.RESPONSES: ResponsesRequest,
    BodyKind.MESSAGES: MessagesRequest,
    BodyKind.COUNT: CountRequest,
}
_FIELDS: dict[BodyKind, type[BodyFields]] = {
    BodyKind.COMPLETION: CompletionFields,
    BodyKind.CHAT: ChatFields,
    BodyKind.TOKENIZE: TokenizeFields,
    BodyKind.DETOKENIZE: DetokenizeFields,
    BodyKind.RESPONSES: TranslatedFields,
    BodyKind.MESSAGES: TranslatedFields,
    BodyKind.COUNT: TranslatedFields,
}
_APART = (
    frozenset(("prompt", "messages", "tokens", "prediction", "references", "suffix")) | CONVERSATION | IGNORED
)
"""Fields kept out of the small fields that are handed on: they are handed on apart, or ignored."""


@dataclass(frozen=True, slots=True)
class ReadBody:
    """A body whose fields are valid, each by itself; the target model has not been asked."""

    fields: BodyFields
    prompts: tuple[Prompt, ...]
    prediction: str = ""
    """Text that the answer may resemble; empty: the client predicts nothing."""
    references: tuple[str, ...] = ()
    """Texts that the answer may copy from."""
    suffix: str = ""
    """Text that follows the answer; empty: none does."""
    rendered: bool = False
    """Whether the prompt is a conversation, rendered by the model's chat template."""
    chat: ChatPlan | None = None
    """How the answer to a conversation is constrained and parsed; None: the body asks for no such answer."""
    body: Mapping[str, Any] | None = None
    """The chat completion that stands for the body; None: the body is of no other API."""


def needs_process(kind: BodyKind, size: int) -> bool:
    """Whether a body is read in a process of its own: it may take long, or a template is to be rendered."""
    return size > LOOP_BYTES or kind.translated or kind in (BodyKind.CHAT, BodyKind.TOKENIZE)


def parse_json(data: bytes | bytearray) -> object:
    """The value that a body holds as JSON. Raises FieldRefused."""
    try:
        return strict_value(data)
    except NotStrict as error:
        raise FieldRefused(None, f"the body cannot be read: {error}") from None
    except json.JSONDecodeError as error:
        raise FieldRefused(None, f"the body is not JSON: {error}") from None
    except RecursionError:
        raise FieldRefused(None, "the body is not JSON that can be read: it is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise FieldRefused(None, f"the body is not JSON: it is not UTF-8 at byte {error.start}") from None
    except ValueError:
        digits = sys.get_int_max_str_digits()
        raise FieldRefused(
            None, f"the body is not JSON that can be read: a number has more than {digits} digits"
        ) from None


def read_value(kind: BodyKind, value: object, bounds: BodyBounds, render: Render) -> ReadBody:
    """Check the value of a body, and take its prompts apart. Raises FieldRefused for the first fault."""
    if isinstance(value, dict):
        _check_counts(kind, value, bounds)
    request = _validated(_REQUESTS[kind], value)
    if isinstance(request, ResponsesRequest):
        return _translated(response_as_chat(request), bounds, render)
    if isinstance(request, MessagesRequest | CountRequest):
        return _translated(messages_as_chat(request), bounds, render)
    if isinstance(request, TokenizeRequest):
        return _tokenize(request, bounds, render)
    if isinstance(request, DetokenizeRequest):
        return ReadBody(request, (array("I", request.tokens),))
    _check_schema(request)
    prediction = "" if request.prediction is None else request.prediction.plain()
    check_text("prediction", "prediction", prediction, bounds)
    references = tuple(request.references or ())
    if bounds.text_bytes and (total := sum(map(len, references))) > bounds.text_bytes:
        raise FieldRefused(
            "references",
            f"references have {total} characters together, more than the context of {bounds.context} ids can "
            f"hold (at most {bounds.text_bytes} bytes)",
        )
    if isinstance(request, ChatRequest):
        conversation = chat_conversation(request.messages, request)
        text, plan = planned(request, _rendered(request.model, conversation, bounds, render))
        return ReadBody(request, (text,), prediction, references, rendered=True, chat=plan)
    suffix = request.suffix or ""
    check_text("suffix", "suffix", suffix, bounds)
    return ReadBody(request, _prompts(request.prompt, bounds), prediction, references, suffix)


def _translated(translation: ChatTranslation, bounds: BodyBounds, render: Render) -> ReadBody:
    try:
        read = read_value(BodyKind.CHAT, dict(translation.body), bounds, render)
    except FieldRefused as error:
        raise in_places(error, translation.places) from error
    return replace(read, body={**translation.body, "about": translation.about})


def small_fields(value: object) -> bytes:
    """The JSON of a body that `read_value` took, without its prompts and the texts to copy from."""
    assert isinstance(value, dict)
    return json.dumps({name: held for name, held in value.items() if name not in _APART}).encode()


def read_fields(kind: BodyKind, data: bytes) -> BodyFields:
    """The fields that `small_fields` kept. Raises FieldRefused."""
    return _validated(_FIELDS[kind], parse_json(data))


def check_text(field: str, what: str, text: str, bounds: BodyBounds) -> None:
    """Raises FieldRefused for text that no served model's context can hold."""
    if bounds.text_bytes and len(text) > bounds.text_bytes:
        raise FieldRefused(
            field,
            f"{what} has {len(text)} characters, more than the context of {bounds.context} ids can hold "
            f"(at most {bounds.text_bytes} bytes)",
        )


def _validated(model: type[Model], value: object) -> Model:
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise field_refused(error) from None


def _check_counts(kind: BodyKind, body: Mapping[str, Any], bounds: BodyBounds) -> None:
    """Raises FieldRefused for more entries of a list than any request may have."""
    if kind is BodyKind.COMPLETION:
        _check_prompts(body.get("prompt"), bounds)
    elif kind is BodyKind.RESPONSES:
        _check_parts("input", "content", body.get("input"), bounds)
    elif kind is BodyKind.DETOKENIZE:
        _check_length("tokens", body.get("tokens"), bounds.context)
    else:
        _check_parts("messages", "content", body.get("messages"), bounds)
    prediction = body.get("prediction")
    if isinstance(prediction, dict):
        _check_length("prediction.content", prediction.get("content"), bounds.context)
    references = body.get("references")
    if isinstance(references, list) and len(references) > MAX_REFERENCES:
        raise FieldRefused(
            "references", f"references has {len(references)} texts; at most {MAX_REFERENCES} are possible"
        )


def _check_parts(name: str, part: str, value: object, bounds: BodyBounds) -> None:
    """Raises FieldRefused for a conversation of too many messages, or a message of too many parts."""
    _check_length(name, value, bounds.context)
    for place, message in enumerate(value if isinstance(value, list) else ()):
        if isinstance(message, dict):
            _check_length(f"{name}[{place}].{part}", parts := message.get(part), bounds.context)
            for number, inner in enumerate(parts if isinstance(parts, list) else ()):
                if isinstance(inner, dict):  # a result of Anthropic's API has parts of its own
                    at = f"{name}[{place}].{part}[{number}].{part}"
                    _check_length(at, inner.get(part), bounds.context)


def _check_prompts(prompt: object, bounds: BodyBounds) -> None:
    if not isinstance(prompt, list) or not prompt:
        return
    if not isinstance(prompt[0], str | list):
        _check_length("prompt", prompt, bounds.context)
        return
    if len(prompt) > bounds.prompts:
        raise FieldRefused(
            "prompt", f"prompt has {len(prompt)} prompts; at most {bounds.prompts} are answered at once"
        )
    for place, ids in enumerate(prompt):
        _check_length(f"prompt[{place}]", ids, bounds.context)


def _check_length(place: str, value: object, most: int) -> None:
    if isinstance(value, list) and len(value) > most:
        raise FieldRefused(place, f"{place} has {len(value)} entries; the context holds {most} ids")


def _check_schema(request: GenerationFields) -> None:
    """Raises FieldRefused for a schema that is too large; as text, its field bounds it already."""
    wanted, structured = request.response_format, request.structured_outputs
    for field, schema in (
        ("response_format", wanted.json_schema.schema_ if isinstance(wanted, JsonSchemaFormat) else None),
        ("structured_outputs", structured.json_ if structured is not None else None),
    ):
        if isinstance(schema, dict) and (size := len(schema_text(field, schema))) > MAX_SCHEMA_BYTES:
            raise FieldRefused(field, f"the schema has {size} bytes; give at most {MAX_SCHEMA_BYTES}")


def schema_text(field: str, schema: Mapping[str, Any]) -> str:
    """A schema as JSON. Raises FieldRefused for a schema that is nested too deeply."""
    try:
        return json.dumps(schema)
    except RecursionError as error:
        raise FieldRefused(field, "the schema is nested too deeply") from error


def _prompts(prompt: str | list[str] | list[int] | list[list[int]], bounds: BodyBounds) -> tuple[Prompt, ...]:
    if isinstance(prompt, str):
        check_text("prompt", "the prompt's text", prompt, bounds)
        return (prompt,)
    if isinstance(prompt[0], int):
        return (array("I", prompt),)
    found: list[Prompt] = []
    for part in prompt:
        if isinstance(part, str):
            check_text("prompt", "the prompt's text", part, bounds)
            found.append(part)
        else:
            found.append(array("I", part))
    return tuple(found)


def _tokenize(request: TokenizeRequest, bounds: BodyBounds, render: Render) -> ReadBody:
    """The text to tokenize: given, or a conversation's."""
    if request.messages is not None:
        if request.prompt is not None:
            raise FieldRefused("prompt", "prompt is given beside messages; give one of them")
        follows = request.add_generation_prompt is not False
        conversation = ChatConversation(plain_messages(request.messages), answer_follows=follows)
        rendered = _rendered(request.model, conversation, bounds, render)
        return ReadBody(request, (rendered.text,), rendered=True)
    if request.prompt is None:
        raise FieldRefused("prompt", "prompt is missing; give it, or messages")
    if request.add_generation_prompt is not None:
        raise FieldRefused("add_generation_prompt", "add_generation_prompt is given without messages")
    return ReadBody(request, _prompts(request.prompt, bounds))


def _rendered(
    model: str | None, conversation: ChatConversation, bounds: BodyBounds, render: Render
) -> Rendered:
    rendered = render(model, conversation)
    check_text("messages", "the prompt's text", rendered.text, bounds)
    try:
        rendered.text.encode()
    except UnicodeEncodeError as error:  # JSON can name half a character within tools, arguments, variables
        raise FieldRefused(
            "messages",
            f"the prompt has half a character at {error.start}: look for \\u escapes in messages, "
            "tools and chat_template_kwargs",
        ) from error
    return rendered
