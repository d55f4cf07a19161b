"""Reads answers by the formats of families, and says which answers a grammar allows."""

import json
from collections.abc import Sequence

from orchestrator.front.http.chat.families import CallFormat, format_named
from orchestrator.front.http.chat.output_parser import Parsed
from orchestrator.front.http.chat.schema_view import with_types
from orchestrator.front.http.chat.tool_grammar import CalledFunction
from orchestrator.front.http.templated.known_templates import KNOWN
from orchestrator.front.http.templated.parse_order import parse_order
from orchestrator.front.http.templated.template_parser import TemplateParser
from outrider.tokens import TokenTable
from speculative.grammar import Grammar, GrammarKind
from verifier_service.grammar.library import MatcherFactory

END = 1
"""The id that ends a text."""


def known(name: str) -> CallFormat:
    format_ = format_named(name)
    assert format_ is not None
    return format_


class Judge:
    """Says which texts a grammar allows as a whole."""

    def __init__(self, factory: MatcherFactory, table: TokenTable, grammar: str) -> None:
        self._factory, self._table, self._grammar = factory, table, Grammar(GrammarKind.LARK, grammar)

    def __call__(self, text: str) -> bool:
        found = self._factory.matcher(self._grammar, ())
        for id_ in self._table.encode(text, add_special=False):
            if not found.allowed(())[id_]:
                return False
            found.commit([id_])
        return bool(found.allowed(())[END])


def read_by(
    name: str, text: str, functions: Sequence[CalledFunction], *, prompt: str = "", size: int = 0
) -> Parsed:
    """The answer as the response template of a format reads it.

    Args:
        prompt: what stands before the answer.
        size: characters of the pieces in which the answer comes; 0: it comes as a whole.
    """
    tools = [
        {"type": "function", "function": {"name": it.name, "parameters": with_types(it.name, it.parameters)}}
        for it in functions
    ]
    parser = TemplateParser(parse_order(json.dumps(KNOWN[name]), prompt, tools, None))
    step = size or len(text) or 1
    parts = [parser.feed(text[at : at + step], last=False) for at in range(0, len(text), step)]
    parts.append(parser.feed("", last=True))
    return Parsed(
        "".join(part.content for part in parts),
        "".join(part.reasoning for part in parts),
        tuple(call for part in parts for call in part.calls),
    )
