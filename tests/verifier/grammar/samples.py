"""Grammars for the tests of matchers, and of how matchers are come by."""

import json

from speculative.grammar import Grammar, GrammarKind

EOS, WIDTH = 1, 320
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bb", "ccc"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
OBJECT = Grammar(GrammarKind.JSON_OBJECT)


def schema(of: object) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(of, separators=(",", ":")))


def regex(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text)


def lark(text: str) -> Grammar:
    return Grammar(GrammarKind.LARK, text)


SUM = lark("""
start: sum
sum: term (("+" | "-") term)*
term: NUMBER | "(" sum ")"
NUMBER: /[1-9][0-9]{0,2}/
""")
# As the front writes it: a mark may open it, another one closes it, and line ends may follow.
THOUGHT = r"""
start: ("<t>" rule_2)?
reasoning_1[lazy]: /(?s:.*)<\/t>/
rule_2: reasoning_1 /\n{0,2}/
"""
COLOURS = Grammar.one_of(["red", "reddish", "red wine", 'a "quoted" one', "naïve\n"])
