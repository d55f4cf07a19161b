"""Faults of a body's fields, as refusals that name the field. Pure."""

import re
from collections.abc import Mapping, Sequence
from reprlib import Repr
from typing import Any

from pydantic import ValidationError

from orchestrator.front.http.fields import NOT_SUPPORTED, TAKES, TOO_MANY, UNKNOWN_FIELD
from orchestrator.front.http.strict_json import MOST_QUOTED
from speculative.errors import InvalidRequest

# What a field of several types takes; the library reports a fault for each of the types.
_TAKES = {
    "prompt": "a string, a list of strings, a list of token ids or a list of such lists, and no list empty",
    "stop": "a string or a list of strings, of at most 256 bytes each",
    "content": "a string, or a list of parts of type text",
    "best_of": "1",
    "json_object": "true",
    "tool_choice": 'auto, none, required, {"type": "function", "function": {"name"}}, or an object of type '
    "allowed_tools",
}
_OF_PYTHON = re.compile("a valid dictionary( or (instance of [A-Za-z]+|object to extract fields from))?")
"""What the library calls a JSON object."""
_TRIED = {"str", "int", "bool", "float", "dict", "list", "text_"}


class FieldRefused(InvalidRequest):
    """A refused body; `param` names the field that is wrong, or is None where the body as a whole is."""

    def __init__(self, param: str | None, message: str) -> None:
        super().__init__(message)
        self.param = param


def field_refused(error: ValidationError) -> FieldRefused:
    """The refusal for the first fault that pydantic found."""
    fault = error.errors(include_url=False)[0]
    return _refused(
        fault["type"], _without_tags(fault["loc"]), fault["input"], fault["msg"], fault.get("ctx", {})
    )


def quoted(value: object) -> str:
    """A client's value as a reader of JSON knows it, cut to some 80 characters without writing all of it."""
    text = _QUOTES.repr(value)
    return text if len(text) <= MOST_QUOTED else f"{text[:MOST_QUOTED]}..."


def _refused(
    kind: str, parts: Sequence[str | int], value: object, why: str, details: Mapping[str, Any]
) -> FieldRefused:
    if kind == UNKNOWN_FIELD:
        name = _shortened(details["name"])
        return not_supported(f"{place}.{name}" if (place := _place(parts)) else name)
    place = _place(parts)
    if kind == NOT_SUPPORTED:
        return not_supported(place)
    if not parts:
        return FieldRefused(None, "the body must be a JSON object, sent as application/json")
    if kind == "missing":
        return FieldRefused(place, f"{place} is missing")
    if kind in (TOO_MANY, "too_long") and isinstance(value, list | dict):
        return FieldRefused(place, f"{place} has {len(value)} entries; give at most {details['max_length']}")
    if kind == "too_long" and isinstance(value, str):
        return FieldRefused(
            place, f"{place} has {len(value)} characters; give at most {details['max_length']}"
        )
    last = re.sub(r"\[\d+\]", "", place).rpartition(".")[2]
    says_itself = kind in (TAKES, "string_too_long")
    wanted = _OF_PYTHON.sub("an object", why)
    if not says_itself and last in _TAKES:
        wanted = f"it must be {_TAKES[last]}"
    return FieldRefused(place, f"{place} is {quoted(value)}: {wanted}")


def not_supported(place: str) -> FieldRefused:
    """The refusal of a field that no body of its kind has."""
    return FieldRefused(place, f"{place or 'a field without a name'} is not supported here; leave it out")


def _without_tags(parts: Sequence[str | int]) -> list[str | int]:
    """The path without the type of a response_format, which the library inserts as a step of its own."""
    return [part for at, part in enumerate(parts) if at != 1 or parts[0] != "response_format"]


def _place(parts: Sequence[str | int]) -> str:
    """A path such as `messages[0].content`, without the types that the library tried."""
    place = ""
    for part in parts:
        if isinstance(part, int):
            place += f"[{part}]"
        elif re.fullmatch(r"[a-z][a-z_]*", part) and part not in _TRIED:
            place += f".{part}" if place else part
    return place


def _shortened(name: str) -> str:
    """A field's name, which a client may have made of any length."""
    return name if len(name) <= MOST_QUOTED else f"{name[:MOST_QUOTED]}..."


class _JsonWords(Repr):
    """Writes values with JSON's words for what Python calls None, True and False."""

    def repr_NoneType(self, value: None, level: int) -> str:  # the library calls it by the type
        return "null"

    def repr_bool(self, value: bool, level: int) -> str:
        return "true" if value else "false"


def _quotes() -> Repr:
    made = _JsonWords()
    made.maxlevel, made.maxstring, made.maxother, made.maxlong = 3, MOST_QUOTED, MOST_QUOTED, MOST_QUOTED
    return made


_QUOTES = _quotes()
