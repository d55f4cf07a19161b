"""A tool's JSON schema as grammars of bare text need it: references followed, types named. Pure.

A format that writes texts without JSON's quotes cannot leave its schema to a compiler of JSON schemas. The
schemas here have passed `check_schema`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.front.http.field_faults import FieldRefused

TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
"""All types of JSON."""
ABOUT_ALL = frozenset(("not", "if", "then", "else", "allOf"))
"""Words that narrow down values of every type, and that no grammar of text can say."""
NARROWS = {
    "string": ABOUT_ALL,
    "array": ABOUT_ALL | {"contains", "minContains", "maxContains", "uniqueItems", "prefixItems"},
    "object": ABOUT_ALL
    | {"patternProperties", "propertyNames", "minProperties", "maxProperties"}
    | {"dependentRequired", "dependentSchemas"},
}
"""Words that narrow down values of a type, and that no grammar of text can say."""
MOST_SCHEMAS = 4096
"""The most schemas of one function's arguments, each counted as often as something refers to it: schemas that
refer to the next one twice double the count at each step."""
_MOST_REFERENCES = 32
_HOME = ("#/$defs/", "#/definitions/")


class SchemaView:
    """The schema of one function's arguments.

    Args:
        function: the function's name, for refusals.
        root: the schema.
    """

    def __init__(self, function: str, root: Mapping[str, Any]) -> None:
        self._function = function
        self._root = root
        self._left = MOST_SCHEMAS

    def plain(self, schema: object) -> Mapping[str, Any]:
        """A schema without a reference of its own, and without an `allOf` of one schema.

        Raises FieldRefused where there are too many schemas.
        """
        self._left -= 1
        if self._left < 0:
            raise FieldRefused(
                "tools",
                f"the parameters of function {self._function!r} have more than {MOST_SCHEMAS} schemas, "
                "counted once for each reference to them: make them smaller",
            )
        found: Any = {} if schema is True else schema
        for _ in range(_MOST_REFERENCES):
            if found is False:
                found = {"not": {}}
            if "$ref" in found:
                found = {**_referred(found["$ref"], self._root), **_without(found, "$ref")}
            elif len(found.get("allOf", ())) == 1:
                (only,) = found["allOf"]
                found = {**({} if only is True else only or {"not": {}}), **_without(found, "allOf")}
            else:
                break
        assert isinstance(found, Mapping)
        return found

    def types(self, schema: Mapping[str, Any], depth: int = 0) -> tuple[str, ...]:
        """The types of the values that a plain schema allows, as far as the schema names them; empty: all."""
        if "type" in schema:
            named = schema["type"]
            return tuple(named) if isinstance(named, list) else (named,)
        if (values := listed(schema)) is not None:
            return tuple(dict.fromkeys(map(_type_of, values)))
        for word in ("anyOf", "oneOf"):
            if word in schema and depth < _MOST_REFERENCES:
                found = [self.types(self.plain(one), depth + 1) for one in schema[word]]
                return tuple(dict.fromkeys(name for one in found for name in one)) if all(found) else ()
        return tuple(dict.fromkeys(name for word, name in _SHOWS.items() if word in schema))

    def refuse(self, place: str, schema: Mapping[str, Any], words: frozenset[str]) -> None:
        """Raises FieldRefused where a schema has one of these words."""
        if found := sorted(words & schema.keys()):
            raise FieldRefused(
                "tools",
                f"the parameters of function {self._function!r} have {found[0]} at {place}, which the "
                f"format of this model's calls cannot enforce: leave {found[0]} out, or let the model "
                "choose to call",
            )

    def with_home(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """The schema as one of its own, with the definitions that its references name.

        Raises FieldRefused for references to other places of the arguments' schema.
        """
        text = json.dumps(schema)
        if '"$ref"' not in text:
            return dict(schema)
        homes = {name: self._root[name] for name in ("$defs", "definitions") if name in self._root}
        for reference in _references([schema, homes]):
            if not reference.startswith(_HOME):
                raise FieldRefused(
                    "tools",
                    f"the parameters of function {self._function!r} refer to {reference!r}: put that schema "
                    "into $defs, where the format of this model's calls can use it",
                )
        return {**schema, **homes}


def listed(schema: Mapping[str, Any]) -> Sequence[Any] | None:
    """The values that a schema lists; None: it lists none."""
    return [schema["const"]] if "const" in schema else schema.get("enum")


def with_types(function: str, parameters: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The schema of a function's arguments, with the type of each argument that leads to one said there.

    Parsers of bare text turn an argument into the type that stands beside its name.
    """
    if not parameters or not isinstance(properties := parameters.get("properties"), Mapping):
        return parameters
    view = SchemaView(function, parameters)
    said = {name: _said(view, schema) for name, schema in properties.items()}
    return {**parameters, "properties": said}


def _said(view: SchemaView, schema: object) -> object:
    if not isinstance(schema, Mapping) or "type" in schema:
        return schema
    types = view.types(view.plain(schema))
    return {**schema, "type": list(types)} if types else schema


_SHOWS = {"properties": "object", "items": "array", "pattern": "string", "minLength": "string"}
"""Words from which a schema without a type has one all the same."""


def _type_of(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
    return "array" if isinstance(value, list) else "object"


def _without(schema: Mapping[str, Any], word: str) -> dict[str, Any]:
    return {name: value for name, value in schema.items() if name != word}


def _referred(reference: str, root: Any) -> dict[str, Any]:
    found = root
    for part in reference.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        found = found[int(name)] if isinstance(found, list) else found[name]
    if isinstance(found, bool):
        return {} if found else {"not": {}}
    return dict(found)


def _references(value: object) -> list[str]:
    found: list[str] = []
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, Mapping):
            if isinstance(one.get("$ref"), str):
                found.append(one["$ref"])
            left.extend(one.values())
        elif isinstance(one, list):
            left.extend(one)
    return found
