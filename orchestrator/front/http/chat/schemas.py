"""Checks that a tool's parameters are a JSON schema, as far as that shows without a compiler. Pure.

Only a required call compiles the schema, as a part of a grammar. Without these checks a faulty schema would
be refused with one value of `tool_choice` and accepted with another.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from orchestrator.front.http.field_faults import FieldRefused, quoted

_PLACE = re.compile("0|[1-9][0-9]{0,8}")
"""A place in a list, as a reference may name it: Python reads no number of thousands of digits."""
_TYPES = frozenset(("null", "boolean", "object", "array", "number", "string", "integer"))
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_ONE = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_SOME = ("anyOf", "oneOf", "allOf", "prefixItems")
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def check_schema(place: str, schema: Mapping[str, Any]) -> None:
    """Raises FieldRefused for parameters that are no JSON schema of an object."""
    if schema.get("type", "object") != "object":
        raise FieldRefused(place, f"{place}.type is {quoted(schema['type'])}; arguments are an object")
    if "x-guidance" in schema:
        raise FieldRefused(place, f"{place} has x-guidance, which is not part of JSON Schema; leave it out")
    left: list[tuple[str, Any]] = [(place, schema)]
    while left:
        at, found = left.pop()
        if isinstance(found, bool):
            continue
        if not isinstance(found, Mapping):
            raise FieldRefused(at, f"{at} is {quoted(found)}; a schema is an object, true or false")
        _check_words(at, found)
        if "$ref" in found:
            _check_reference(at, found["$ref"], schema)
        left.extend(reversed(list(_inner(at, found))))  # faults are found in the order of the schema


def _check_words(at: str, schema: Mapping[str, Any]) -> None:
    types = schema.get("type", [])
    for name in types if isinstance(types, list) else [types]:
        if not isinstance(name, str) or name not in _TYPES:
            raise FieldRefused(at, f"{at}.type is {quoted(types)}; JSON has {', '.join(sorted(_TYPES))}")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise FieldRefused(at, f"{at}.required is {quoted(required)}; give a list of names")
    for word in _COUNTS:
        count = schema.get(word, 0)
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise FieldRefused(at, f"{at}.{word} is {quoted(count)}; give a whole number from 0 on")
    if "pattern" in schema and not isinstance(schema["pattern"], str):
        raise FieldRefused(at, f"{at}.pattern is {quoted(schema['pattern'])}; give a regular expression")
    if "enum" in schema and not (isinstance(schema["enum"], list) and schema["enum"]):
        raise FieldRefused(at, f"{at}.enum is {quoted(schema['enum'])}; give a list of values")


def _inner(at: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas within a schema, with their places. Raises FieldRefused where there is another thing."""
    for word in _ONE:
        if word in schema:
            yield f"{at}.{word}", schema[word]
    for word in _SOME:
        if word in schema:
            if not isinstance(schema[word], list) or not schema[word]:
                raise FieldRefused(at, f"{at}.{word} is {quoted(schema[word])}; give a list of schemas")
            yield from ((f"{at}.{word}[{number}]", inner) for number, inner in enumerate(schema[word]))
    for word in _BY_NAME:
        if word in schema:
            if not isinstance(schema[word], Mapping):
                raise FieldRefused(at, f"{at}.{word} is {quoted(schema[word])}; give schemas by name")
            yield from ((f"{at}.{word}.{name:.80}", inner) for name, inner in schema[word].items())


def _check_reference(at: str, reference: object, root: Mapping[str, Any]) -> None:
    """Raises FieldRefused unless a reference leads, maybe through others, to a schema of the same tool."""
    passed: list[object] = []
    while True:
        if reference in passed:
            raise FieldRefused(at, f"{at}.$ref is {quoted(reference)}, which leads back to itself")
        if len(passed) == 32:
            raise FieldRefused(at, f"{at}.$ref leads through more than {len(passed)} references")
        passed.append(reference)
        found = _referred(reference, root)
        if not isinstance(found, Mapping | bool):
            raise FieldRefused(
                at, f"{at}.$ref is {quoted(reference)}, which refers to no schema of this tool"
            )
        if isinstance(found, bool) or "$ref" not in found:
            return
        reference = found["$ref"]


def _referred(reference: object, root: Mapping[str, Any]) -> object:
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    found: Any = root
    for part in reference.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            found = found.get(name)
        elif isinstance(found, list) and _PLACE.fullmatch(name) and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found
