"""Grammars of reasoning, and of answers that call tools in the format that the model was trained in. Pure.

A grammar is written in Lark's language as llguidance reads it, with a JSON schema for the arguments of each
function.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from orchestrator.front.http.chat.braced_calls import BracedCalls
from orchestrator.front.http.chat.families import THINK, CallFormat, Layout, Tags, ThoughtMarks
from orchestrator.front.http.chat.grammar_writer import GrammarWriter
from orchestrator.front.http.chat.plan import Thought
from orchestrator.front.http.chat.tagged_calls import TaggedCalls

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_NO_IDS: Mapping[str, int] = {}


class CalledFunction(NamedTuple):
    """A function that may be called."""

    name: str
    parameters: Mapping[str, Any] | None
    """The JSON schema of the function's arguments; None: the function takes no arguments."""


def calls_grammar(
    format_: CallFormat,
    functions: Sequence[CalledFunction],
    thought: Thought,
    *,
    several: bool,
    marks: ThoughtMarks = THINK,
    special: Mapping[str, int] = _NO_IDS,
) -> str:
    """The grammar of an answer that calls one of these functions, or several.

    Raises FieldRefused for a schema that the format cannot enforce.

    Args:
        thought: the reasoning that may stand before the calls.
        several: whether the answer may have more than one call.
        marks: the marks around the reasoning.
        special: ids of the marks that are special tokens of the model's tokenizer.
    """
    writer = GrammarWriter(special)
    rule_of = _calls(format_, writer)
    written = [rule_of(function.name, _parameters(function)) for function in functions]
    call = writer.rule(" | ".join(written), "call")
    several = several and not format_.alone
    if (tags := format_.tags) is not None:
        thoughts = _thoughts(thought, marks, writer, behind=tags.thought)
        lead = f"{json.dumps(tags.lead)}? " if tags.lead else ""
        return writer.text(f"{lead}{thoughts}{_tagged_calls(tags, several, writer)}")
    if format_.layout is Layout.LIST:
        calls = '" "? "[" call (", " call)* "]"' if several else '" "? "[" call "]"'
    else:
        calls = r'call ("\n" call)*' if several else call
    return writer.text(f"{_thoughts(thought, marks, writer)}{calls}")


def thoughts_grammar(
    thought: Thought, marks: ThoughtMarks = THINK, special: Mapping[str, int] = _NO_IDS, lead: str = ""
) -> str:
    """The grammar of the reasoning at the beginning of an answer; empty for an answer that has none.

    Args:
        lead: text that may stand before the begin mark.
    """
    writer = GrammarWriter(special)
    thoughts = _thoughts(thought, marks, writer, lead=lead)
    return writer.text(thoughts.rstrip()) if thoughts else ""


def _tagged_calls(tags: Tags, several: bool, writer: GrammarWriter) -> str:
    """The calls of an answer, of which each is the rule `call`, and the texts around and between them."""
    between = f"{json.dumps(tags.between)} " if tags.between else ""
    calls = f"call ({between}call)*" if several else "call"
    before, behind = (writer.literal(text) if text else "" for text in tags.around)
    return f"{before} {calls} {behind}".strip()


def _parameters(function: CalledFunction) -> Mapping[str, Any]:
    return {"type": "object", **function.parameters} if function.parameters else _NO_ARGUMENTS


def _calls(format_: CallFormat, writer: GrammarWriter) -> Callable[[str, Mapping[str, Any]], str]:
    """What adds the rule of a call of one function, by its name and the schema of its arguments."""
    match format_.layout:
        case Layout.TAGGED:
            return TaggedCalls(format_, writer).call
        case Layout.BRACED:
            return BracedCalls(format_, writer).call
    return partial(_json_call, format_, writer)


def _json_call(format_: CallFormat, writer: GrammarWriter, name: str, parameters: Mapping[str, Any]) -> str:
    if (tags := format_.tags) is not None:
        parts = [writer.literal(f"{format_.begin}{name}{tags.named}")]
        if tags.id:
            parts += [f"/{tags.id}/", writer.literal(tags.identified)]
        parts.append(writer.json(parameters))
        if format_.end:
            parts.append(writer.literal(format_.end))
        return writer.rule(" ".join(parts))
    head, tail = f'{{"name": {json.dumps(name)}, "{format_.arguments}": ', "}"
    if format_.layout is Layout.EACH:
        head, tail = f"{format_.begin}\n{head}", f"{tail}\n{format_.end}"
    return writer.rule(f"{writer.literal(head)} {writer.json(parameters)} {writer.literal(tail)}")


def _thoughts(
    thought: Thought, marks: ThoughtMarks, writer: GrammarWriter, behind: str = "", lead: str = ""
) -> str:
    if thought is Thought.NONE:
        return ""
    rule = writer.thought(marks.end)
    if behind:
        rule = f"{rule} {writer.literal(behind)}"
    if thought is Thought.OPEN:
        return f"{rule} "
    before = f"{json.dumps(lead)}? " if lead else ""
    return f"({before}{writer.literal(marks.begin)} {rule})? "
