"""Grammars of calls between tags: texts stand bare, and all other arguments are JSON. Pure.

An argument that may be a text is any text by its schema's pattern and lengths, because a parser turns a text
into another type only where the schema names that type, too.
"""

import json
from collections.abc import Mapping
from typing import Any

from orchestrator.front.http.chat.families import CallFormat
from orchestrator.front.http.chat.grammar_writer import GrammarWriter
from orchestrator.front.http.chat.schema_view import NARROWS, SchemaView, listed
from orchestrator.front.http.chat.text_patterns import text_patterns
from orchestrator.front.http.field_faults import FieldRefused


class TaggedCalls:
    """Writes the rules of calls whose layout is TAGGED."""

    def __init__(self, format_: CallFormat, writer: GrammarWriter) -> None:
        assert format_.tags is not None
        self._format = format_
        self._tags = format_.tags
        self._writer = writer

    def call(self, name: str, parameters: Mapping[str, Any]) -> str:
        """The rule of a call of one function. Raises FieldRefused where the format cannot say its schema."""
        view, writer = SchemaView(name, parameters), self._writer
        root = view.plain(parameters)
        view.refuse("their top level", root, NARROWS["object"] | {"anyOf", "oneOf"})
        properties: Mapping[str, Any] = root.get("properties", {})
        required = root.get("required", ())
        parts = [writer.literal(f"{self._format.begin}{name}{self._tags.named}")]
        for argument in dict.fromkeys((*properties, *required)):
            rule = self._argument(view, argument, properties.get(argument, True))
            parts.append(rule if argument in required else f"{rule}?")
        return writer.rule(" ".join([*parts, writer.literal(self._format.end)]))

    def _argument(self, view: SchemaView, name: str, schema: object) -> str:
        begin, end = self._tags.key
        if not name or name != name.strip() or any(mark in name for mark in (">", "<", "\n", end[:1])):
            raise FieldRefused(
                "tools",
                f"an argument has the name {json.dumps(name)[:80]}, which the format of this model's calls "
                "cannot write: use letters, digits and underscores",
            )
        writer = self._writer
        value = self._value(view, name, view.plain(schema))
        return writer.rule(f"{writer.literal(begin + name + end)} {value} {writer.literal(self._tags.value)}")

    def _value(self, view: SchemaView, place: str, schema: Mapping[str, Any]) -> str:
        """The expression of a value and the mark behind it."""
        writer, mark = self._writer, self._tags.text
        types = view.types(schema)
        if types and "string" not in types:
            return f"{writer.json(view.with_home(schema))} {writer.literal(mark)}"
        if (values := listed(schema)) is not None:
            texts = [one if isinstance(one, str) else json.dumps(one) for one in values]
            return f"({' | '.join(map(writer.literal, texts))}) {writer.literal(mark)}"
        view.refuse(place, schema, NARROWS["string"])
        for word in ("anyOf", "oneOf"):
            if word in schema:
                narrowed = {name: value for name, value in schema.items() if name not in (word, "type")}
                some = [self._value(view, place, {**narrowed, **view.plain(one)}) for one in schema[word]]
                return f"({' | '.join(some)})"
        return writer.closed(text_patterns(schema), mark, without=[self._format.end.splitlines()[-1]])
