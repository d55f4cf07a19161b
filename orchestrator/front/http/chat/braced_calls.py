"""Grammars of calls whose arguments are JSON with bare names in order, and with marks around texts. Pure."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.front.http.chat.families import CallFormat
from orchestrator.front.http.chat.grammar_writer import GrammarWriter
from orchestrator.front.http.chat.schema_view import NARROWS, TYPES, SchemaView, listed
from orchestrator.front.http.chat.text_patterns import text_patterns

_BARE = re.compile(r"\w+", re.ASCII)
_NUMBERS = frozenset(("integer", "number"))


class BracedCalls:
    """Writes the rules of calls whose layout is BRACED."""

    def __init__(self, format_: CallFormat, writer: GrammarWriter) -> None:
        assert format_.tags is not None
        self._format = format_
        self._mark = format_.tags.text
        self._writer = writer
        self._known: dict[tuple[str, str], str] = {}
        """Rules by schema, and by the function whose references it has: schemas may contain themselves."""

    def call(self, name: str, parameters: Mapping[str, Any]) -> str:
        """The rule of a call of one function. Raises FieldRefused where the format cannot say its schema."""
        view = SchemaView(name, parameters)
        root = {"properties": {}, **view.plain(parameters), "type": "object"}
        view.refuse("their top level", root, frozenset(("anyOf", "oneOf")))
        arguments = self._value(view, name, "the arguments", root)
        writer = self._writer
        head, tail = writer.literal(self._format.begin + name), writer.literal(self._format.end)
        return writer.rule(f"{head} {arguments} {tail}")

    def _value(self, view: SchemaView, function: str, place: str, schema: object) -> str:
        """The name of the rule of a schema's values."""
        plain = view.plain(schema)
        text = json.dumps(plain, sort_keys=True)
        key = function if '"$ref"' in text else "", text
        if key not in self._known:
            name = self._known[key] = self._writer.name("value")
            self._writer.rule(self._expression(view, function, place, plain), name)
        return self._known[key]

    def _expression(self, view: SchemaView, function: str, place: str, schema: Mapping[str, Any]) -> str:
        if (values := listed(schema)) is not None:
            return " | ".join(self._writer.literal(self._written(value)) for value in values)
        for word in ("anyOf", "oneOf"):
            if word in schema:
                rest = {name: value for name, value in schema.items() if name not in (word, "type")}
                some = ({**rest, **view.plain(one)} for one in schema[word])
                return " | ".join(self._value(view, function, place, one) for one in some)
        types = view.types(schema) or TYPES
        for name in types:
            view.refuse(place, schema, NARROWS.get(name, NARROWS["string"]))
        return " | ".join(self._of_type(view, function, place, schema, name) for name in types)

    def _of_type(
        self, view: SchemaView, function: str, place: str, schema: Mapping[str, Any], name: str
    ) -> str:
        match name:
            case "string":
                return self._text(schema)
            case "array":
                item = self._value(view, function, f"the items of {place}", schema.get("items", True))
                return self._list(item, schema.get("minItems", 0), schema.get("maxItems"))
            case "object" if "properties" in schema:
                return self._object(view, function, schema)
            case "object" if schema.get("additionalProperties") is False:
                return '"{}"'
            case "object":
                value = self._value(
                    view, function, f"the values of {place}", schema.get("additionalProperties", True)
                )
                pair = self._writer.rule(f'{self._text({"minLength": 1})} ":" {value}')
                return f'"{{" ({pair} ("," {pair})*)? "}}"'
        numbers = {word: value for word, value in schema.items() if name in _NUMBERS and word != "type"}
        return self._writer.json({**numbers, "type": name})

    def _text(self, schema: Mapping[str, Any]) -> str:
        writer = self._writer
        return f"{writer.literal(self._mark)} " + writer.closed(
            text_patterns(schema), self._mark, without=[self._format.end]
        )

    def _list(self, item: str, least: int, most: int | None) -> str:
        if most == 0:
            return '"[]"'
        more = f'("," {item}){{{max(0, least - 1)},{"" if most is None else most - 1}}}'
        filled = f'"[" {item} {more} "]"'
        return filled if least else f'"[]" | {filled}'

    def _object(self, view: SchemaView, function: str, schema: Mapping[str, Any]) -> str:
        """An object whose members stand in the order of their names, as the family's template has them."""
        properties, required = schema["properties"], schema.get("required", ())
        names = sorted(dict.fromkeys((*properties, *required)), key=lambda name: (name.lower(), name))
        # From the last member on: the rest of an object, behind a first member and without one.
        behind = first = '"}"'
        for name in reversed(names):
            value = self._value(view, function, name, properties.get(name, True))
            pair = self._writer.rule(f"{self._name(name)} {value}")
            more, begun = f'"," {pair} {behind}', f"{pair} {behind}"
            if name not in required:
                more, begun = f"{more} | {behind}", f"{begun} | {first}"
            behind, first = self._writer.rule(more), self._writer.rule(begun)
        return f'"{{" {first}'

    def _name(self, name: str) -> str:
        return self._writer.literal(
            f"{name}:" if _BARE.fullmatch(name) else f"{self._mark}{name}{self._mark}:"
        )

    def _written(self, value: Any) -> str:
        """A value as the family writes it."""
        if isinstance(value, str):
            return f"{self._mark}{value}{self._mark}"
        if isinstance(value, Sequence):
            return f"[{','.join(map(self._written, value))}]"
        if isinstance(value, Mapping):
            pairs = (f"{self._mark}{name}{self._mark}:{self._written(value[name])}" for name in sorted(value))
            return f"{{{','.join(pairs)}}}"
        return json.dumps(value)
