"""Writes a grammar in Lark's language as llguidance reads it, rule by rule. Pure.

Bare text ends at a mark: no value may contain the mark, and a mark that is a special token of the model's
tokenizer is named by its id, because no text stands for such a token.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.front.http.chat.plan import LINE_ENDS

SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Spaces of JSON as models were trained to write them: free white space would be a trap for weak models."""


class GrammarWriter:
    """Collects the rules of one grammar.

    Args:
        special: ids of the marks that are special tokens.
    """

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        self._rules: list[str] = []
        self._known: dict[str, str] = {}
        """Names of rules by what stands behind the name: tools repeat arguments of the same kind."""
        self._names = 0

    def text(self, start: str) -> str:
        """The grammar whose rule `start` this is."""
        return "\n".join([f"start: {start}", *self._rules])

    def rule(self, body: str, name: str = "") -> str:
        """Adds a rule, unless one of this body is there; returns its name."""
        if name:
            self._rules.append(f"{name}: {body}")
            return name
        return self._once("rule", f": {body}")

    def _once(self, kind: str, line: str) -> str:
        """The name of a rule, added unless it is there. `line` is what stands behind the name."""
        if line not in self._known:
            name = self._known[line] = self.name(kind)
            self._rules.append(name + line)
        return self._known[line]

    def name(self, kind: str) -> str:
        """A name that no rule has."""
        self._names += 1
        return f"{kind}_{self._names}"

    def literal(self, text: str) -> str:
        """The text, with ids in place of special tokens."""
        parts = [text]
        for mark in self._special:
            parts = [piece for part in parts for piece in _split(part, mark)]
        written = [
            f"<[{self._special[part]}]>" if part in self._special else json.dumps(part)
            for part in parts
            if part
        ]
        return " ".join(written) or '""'

    def closed(self, patterns: Sequence[str], mark: str, without: Sequence[str] = ()) -> str:
        """A rule for text of all these patterns up to a mark, and the mark.

        Args:
            without: further marks that the text does not contain.
        """
        forbidden = [f"~/(?s:.*){escaped(one.strip())}(?s:.*)/" for one in (mark, *without)]
        terminal = self._once("TEXT", f": {' & '.join([*(patterns or ['/(?s:.*)/']), *forbidden])}")
        if mark in self._special:
            return self._once("text", f": {terminal} {self.literal(mark)}")
        return self._once("text", f"[suffix={json.dumps(mark)}]: {terminal}")

    def thought(self, mark: str) -> str:
        """A rule for reasoning up to its end mark, the mark, and the line ends behind it."""
        if mark in self._special:
            return self.rule(rf"/(?s:.*)/ {self.literal(mark)} /\n{{0,{LINE_ENDS}}}/")
        name = self._once("reasoning", f"[lazy]: /(?s:.*){escaped(mark)}/")
        return self.rule(rf"{name} /\n{{0,{LINE_ENDS}}}/")

    def json(self, schema: Mapping[str, Any]) -> str:
        """A rule for JSON by a schema."""
        text = json.dumps({**schema, "x-guidance": SPACING})
        # Within a string, since nothing else in JSON has it.
        return self._once("json", ": %json " + text.replace("%llguidance", r"\u0025llguidance"))


def escaped(text: str) -> str:
    """A text as a part of a pattern between slashes."""
    return re.sub(r"[\\.+*?()|\[\]{}^$/]", lambda found: "\\" + found[0], text).replace("\n", r"\n")


def _split(text: str, mark: str) -> list[str]:
    """The text cut before and behind each of its marks."""
    parts: list[str] = []
    for number, part in enumerate(text.split(mark)):
        parts += [mark, part] if number else [part]
    return parts
