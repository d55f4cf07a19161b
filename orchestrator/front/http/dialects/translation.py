"""A body of another API as the body of a chat completion. Pure.

Everything behind the translation belongs to chat: the checks, the template, the grammar and the parser. A
refusal names a field of the chat body, so a translation says which field of the client's body that is.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Discriminator
from pydantic_core import PydanticCustomError

from orchestrator.front.http.field_faults import FieldRefused, not_supported
from orchestrator.front.http.fields import TAKES, DecodingFields, Name

DECODING = frozenset(DecodingFields.model_fields)
"""Names of the fields that are the same in every API."""


class ForeignTool(BaseModel):
    """A tool of a kind that this server does not have: skipped, and named in `skipped_tools`."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, use_attribute_docstrings=True)

    type: Name
    name: Any = None


@dataclass(frozen=True, slots=True)
class ChatTranslation:
    """The chat completion that stands for a body of another API."""

    body: Mapping[str, Any]
    """The body of the chat completion."""
    about: Mapping[str, Any]
    """What the answer repeats of the client's body; small."""
    places: Mapping[str, str]
    """Places in the client's body, by places in the chat body, such as `messages[0]`."""


def decoding_fields(request: DecodingFields) -> dict[str, Any]:
    """The fields of a body that are the same in a chat completion, as JSON has them."""
    return request.model_dump(include=set(DECODING), exclude_unset=True, by_alias=True)


def in_places(error: FieldRefused, places: Mapping[str, str]) -> FieldRefused:
    """The refusal with the place that the fault has in the client's body."""
    param = error.param
    if param is None:
        return error
    ends = [len(param), *(found.start() for found in reversed([*re.finditer(r"[.\[]", param)]))]
    old = next((param[:end] for end in ends if param[:end] in places), None)
    if old is None or (old == param and str(error) == str(not_supported(param))):
        return error  # the name is the client's own
    message = str(error)
    if re.match(re.escape(old) + r"(?![a-z_])", message):
        message = places[old] + message[len(old) :]
    return FieldRefused(places[old] + param[len(old) :], message)


def by_type(kinds: Iterable[str], default: str | None = None) -> Discriminator:
    """Chooses the model of a JSON object by its `type`; the models' tags are `of type TYPE`.

    The space in the tags keeps them out of the places that refusals name.

    Args:
        default: the type of objects that have a `role` and no `type`, or null; None: they are refused.
    """
    known = tuple(kinds)

    def tag(value: Any) -> str | None:
        if not isinstance(value, Mapping):
            found = getattr(value, "type", None)
        else:
            found = value.get("type")
            found = default if found is None and "role" in value else found
        return f"of type {found}" if isinstance(found, str) and found in known else None

    names = f"{', '.join(known[:-1])} or {known[-1]}" if len(known) > 1 else known[0]
    return Discriminator(tag, custom_error_type=TAKES, custom_error_message=f"give an object of type {names}")


def text_or(what: str, parts: str) -> Discriminator:
    """Chooses between the tags `one text` and `some parts`.

    Args:
        what: the text, as a refusal calls it.
        parts: the parts, as a refusal calls them.
    """

    def tag(value: Any) -> str | None:
        return "one text" if isinstance(value, str) else "some parts" if isinstance(value, list) else None

    message = f"give {what}, or a list of {parts}"
    return Discriminator(tag, custom_error_type=TAKES, custom_error_message=message)


def only(accepted: Iterable[Any], message: str) -> Callable[[Any], Any]:
    """A validator that takes null and these values alone.

    Args:
        message: what a refusal says of any other value.
    """
    values = [None, *accepted]

    def check(value: Any) -> Any:
        if not any(value is one or (type(value) is type(one) and value == one) for one in values):
            raise PydanticCustomError(TAKES, message)
        return value

    return check


def checked_type(type_: str, message: str) -> Callable[[Any], Any]:
    """A validator of JSON objects of one type, and of null.

    Args:
        message: what a refusal says of any other value.
    """

    def check(value: Any) -> Any:
        if value is not None and not (isinstance(value, Mapping) and value.get("type") == type_):
            raise PydanticCustomError(TAKES, message)
        return value

    return check
