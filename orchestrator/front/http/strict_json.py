"""Reads JSON strictly: Python's own reader takes NaN and Infinity, and the last of two equal names. Pure."""

import json
from collections import Counter
from typing import Any, NoReturn

MOST_QUOTED = 80
"""The most characters of a name that a refusal quotes."""


class NotStrict(ValueError):
    """A text that Python would read, but that is no JSON or has an object with a name twice."""


def _no_constant(name: str) -> NoReturn:
    raise NotStrict(f"{name} is no JSON")


def _named_once(members: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(members)
    if len(made) < len(members):
        counts = Counter(name for name, _ in members)
        (name, count), *_ = counts.most_common(1)
        raise NotStrict(f"an object has the name {name[:MOST_QUOTED]!r} {count} times; give it once")
    return made


STRICT = json.JSONDecoder(parse_constant=_no_constant)
"""Raises ValueError for what is no JSON."""


def strict_value(data: bytes | bytearray) -> object:
    """The value that a client sent.

    Raises NotStrict, and what Python's reader raises, for what is no JSON or names a member of an object
    twice.
    """
    return json.loads(data, parse_constant=_no_constant, object_pairs_hook=_named_once)


def finite_object(text: str) -> dict[str, Any] | None:
    """The JSON object in a text; None where the text holds another value.

    Raises ValueError for what is no JSON, or has a number that no double holds, and RecursionError for what
    is nested too deeply.
    """
    value = STRICT.decode(text)
    json.dumps(value, allow_nan=False)  # 1e999 is written like a number, and read as infinity
    return value if isinstance(value, dict) else None
