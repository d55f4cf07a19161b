"""Reads a body: from bytes of JSON to checked fields, and its prompts apart from them. Pure.

Counts are checked on what JSON became, before any of it is converted, and the first fault ends the reading.
Small bodies are read on the event loop, large ones and conversations in a process of their own, which hands
back the prompts in packed form and the other fields, few bytes, as JSON.
"""

import json
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from pydantic import ValidationError

from orchestrator.front.http.bodies.bounds import LOOP_BYTES, BodyBounds, BodyKind
from orchestrator.front.http.field_faults import FieldRefused, field_refused
from orchestrator.front.http.fields import (
    IGNORED,
    ChatFields,
    ChatRequest,
    CompletionFields,
    CompletionRequest,
    DetokenizeFields,
    DetokenizeRequest,
    Fields,
    GenerationFields,
    JsonSchemaFormat,
    Message,
    TokenizeFields,
    TokenizeRequest,
)
from speculative.request_bounds import MAX_SCHEMA_BYTES

Prompt: TypeAlias = "str | array[int]"
"""A text, or token ids packed as 32-bit numbers."""
Request = CompletionRequest | ChatRequest | TokenizeRequest | DetokenizeRequest
BodyFields = CompletionFields | ChatFields | TokenizeFields | DetokenizeFields
Render = Callable[[str | None, Sequence[Mapping[str, str]], bool], str]
"""Makes a prompt of a conversation, by the template of the model that the body names. Raises FieldRefused."""

Model = TypeVar("Model", bound=Fields)

_REQUESTS: dict[BodyKind, type[Request]] = {
    BodyKind.COMPLETION: CompletionRequest,
    BodyKind.CHAT: ChatRequest,
    BodyKind.TOKENIZE: TokenizeRequest,
    BodyKind.DETOKENIZE: DetokenizeRequest,
}
_FIELDS: dict[BodyKind, type[BodyFields]] = {
    BodyKind.COMPLETION: CompletionFields,
    BodyKind.CHAT: ChatFields,
    BodyKind.TOKENIZE: TokenizeFields,
    BodyKind.DETOKENIZE: DetokenizeFields,
}
_APART = frozenset(("prompt", "messages", "tokens", "prediction", "suffix")) | IGNORED
"""Fields kept out of the small fields that are handed on: they are handed on apart, or ignored."""


@dataclass(frozen=True, slots=True)
class ReadBody:
    """A body whose fields are valid, each by itself; the target model has not been asked."""

    fields: BodyFields
    prompts: tuple[Prompt, ...]
    prediction: str = ""
    """Text that the answer may resemble; empty: the client predicts nothing."""
    suffix: str = ""
    """Text that follows the answer; empty: none does."""
    rendered: bool = False
    """Whether the prompt is a conversation, rendered by the model's chat template."""


def needs_process(kind: BodyKind, size: int) -> bool:
    """Whether a body is read in a process of its own: it may take long, or a template is to be rendered."""
    return size > LOOP_BYTES or kind in (BodyKind.CHAT, BodyKind.TOKENIZE)


def parse_json(data: bytes | bytearray) -> object:
    """The value that a body holds as JSON. Raises FieldRefused."""
    try:
        return json.loads(data)
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
    if isinstance(request, TokenizeRequest):
        return _tokenize(request, bounds, render)
    if isinstance(request, DetokenizeRequest):
        return ReadBody(request, (array("I", request.tokens),))
    _check_schema(request)
    prediction = "" if request.prediction is None else request.prediction.plain()
    check_text("prediction", "prediction", prediction, bounds)
    if isinstance(request, ChatRequest):
        text = _rendered(request.model, request.messages, True, bounds, render)
        return ReadBody(request, (text,), prediction, rendered=True)
    suffix = request.suffix or ""
    check_text("suffix", "suffix", suffix, bounds)
    return ReadBody(request, _prompts(request.prompt, bounds), prediction, suffix)


def small_fields(value: object) -> bytes:
    """The JSON of a body that `read_value` took, without its prompts and its prediction."""
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
    elif kind is BodyKind.DETOKENIZE:
        _check_length("tokens", body.get("tokens"), bounds.context)
    else:
        _check_length("messages", messages := body.get("messages"), bounds.context)
        for place, message in enumerate(messages if isinstance(messages, list) else ()):
            if isinstance(message, dict):
                _check_length(f"messages[{place}].content", message.get("content"), bounds.context)
    prediction = body.get("prediction")
    if isinstance(prediction, dict):
        _check_length("prediction.content", prediction.get("content"), bounds.context)


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
        text = _rendered(request.model, request.messages, follows, bounds, render)
        return ReadBody(request, (text,), rendered=True)
    if request.prompt is None:
        raise FieldRefused("prompt", "prompt is missing; give it, or messages")
    if request.add_generation_prompt is not None:
        raise FieldRefused("add_generation_prompt", "add_generation_prompt is given without messages")
    return ReadBody(request, _prompts(request.prompt, bounds))


def _rendered(
    model: str | None, messages: Sequence[Message], follows: bool, bounds: BodyBounds, render: Render
) -> str:
    text = render(model, [message.plain() for message in messages], follows)
    check_text("messages", "the prompt's text", text, bounds)
    return text
