"""Parses one answer by a checkpoint's response template, with transformers' own parser.

Patterns of a template may take any time, so this module belongs to a process that the kernel may end.
"""

import json
from functools import lru_cache
from typing import Any

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import ResponseTemplate, load_response_template

from orchestrator.front.http.chat.output_parser import Parsed, ParsedCall, parsed_call
from orchestrator.front.http.templated.parse_order import REASONING

CALLS = "tool_calls"
"""The field of a template that holds the calls."""
_UNREADABLE = "unreadable"


class _Lenient(ResponseParser):
    """Transformers' parser, going on behind a region that it cannot read."""

    @property
    def waiting(self) -> int:
        """Characters of output that may belong to a mark."""
        return len(self._buffer) - self._pos

    def _close_current(self, events: list[dict[str, Any]]) -> None:
        field, body = self._current, self._body
        try:
            super()._close_current(events)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            events.append({"type": _UNREADABLE, "field": field, "text": body})
            self._reset_to_implicit()


class TemplateParser:
    """Parses the output of one choice: `feed` every piece in order, the last with `last`.

    Raises ValueError for a response template that transformers refuses.

    Args:
        order: what `parse_order` made.
    """

    def __init__(self, order: str) -> None:
        asked = json.loads(order)
        self._template = _loaded(asked["template"])
        anchored = self._template.start_anchor_re.search(asked["prompt"]) is not None
        prefix = asked["prompt"] if anchored else ""
        self._parser = _Lenient(self._template, prefix, tools=asked["tools"])
        self._allowed: list[str] | None = asked["allowed"]
        self._held: list[str] = []
        """Text of the open region, if the whole region must be read first."""
        self._begun = False
        """Whether the open region has had more than white space."""
        self._space = ""
        """White space that is content only if more text of the region follows."""
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ParsedCall] = []
        for event in self._parser.initial_events:  # what the prompt itself has of the answer
            self._begun = event["type"] == "region_chunk" and (self._begun or not event["text"].isspace())

    @property
    def held(self) -> int:
        """Characters at the end of the output that no answer to `feed` has had yet."""
        return self._parser.waiting + sum(map(len, self._held)) + len(self._space)

    def feed(self, text: str, *, last: bool) -> Parsed:
        """Parses a further piece of output; returns what the piece adds to the answer."""
        events = self._parser.feed(text)
        if last:
            events += self._parser.finalize()[1]
        for event in events:
            self._take(event)
        found = Parsed("".join(self._content), "".join(self._reasoning), tuple(self._calls))
        self._content, self._reasoning, self._calls = [], [], []
        return found

    def _take(self, event: dict[str, Any]) -> None:
        field = event["field"]
        match event["type"]:
            case "region_open":
                self._held, self._begun, self._space = [], False, ""
            case "region_chunk" if event["dirty"] or field == CALLS:
                self._held.append(event["text"])
            case "region_chunk":
                self._say(field, event["text"])
            case kind:
                if field == CALLS and kind != _UNREADABLE:
                    self._call(event["value"])
                else:  # unreadable, or a structure that answers have no field for
                    self._content += self._held
                self._held, self._space = [], ""

    def _call(self, value: Any) -> None:
        try:
            values = value if isinstance(value, list) else [value]
            calls = [parsed_call(_function(one), "arguments") for one in values]
        except (ValueError, RecursionError):
            calls = []
        allowed = self._allowed is None or all(call.name in self._allowed for call in calls)
        if calls and allowed:
            self._calls += calls
        else:
            self._content += self._held

    def _say(self, field: str, text: str) -> None:
        if self._template.fields[field].content_args.get("strip", True):
            text = self._space + (text if self._begun else text.lstrip())
            bare = text.rstrip()
            self._space, text = text[len(bare) :], bare
        if text:
            self._begun = True
            (self._reasoning if field in REASONING else self._content).append(text)


@lru_cache(maxsize=8)
def _loaded(template: str) -> ResponseTemplate:
    loaded = load_response_template(json.loads(template))
    for field in loaded.fields.values():
        field.optional = True  # an answer that was cut off lacks fields, and is an answer all the same
    return loaded


def _function(value: Any) -> Any:
    """The function that a call names. Raises ValueError for arguments that are text, but no JSON."""
    function = value.get("function", value) if isinstance(value, dict) else value
    if isinstance(function, dict) and isinstance(function.get("arguments"), str):
        return function | {"arguments": json.loads(function["arguments"])}
    return function
