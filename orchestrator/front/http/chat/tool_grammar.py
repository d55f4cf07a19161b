"""Grammars that make a model call tools, in the format in which the model writes calls anyway. Pure.

A grammar is written in Lark's language as llguidance reads it, with a JSON schema for the arguments of each
function. JSON is spaced as models were trained to write it: free white space would be a trap for weak models.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from orchestrator.front.http.chat.families import THOUGHT_BEGIN, THOUGHT_END, CallFormat, Layout
from orchestrator.front.http.chat.plan import Thought

_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


class CalledFunction(NamedTuple):
    """A function that may be called."""

    name: str
    parameters: Mapping[str, Any] | None
    """The JSON schema of the function's arguments; None: the function takes no arguments."""


def calls_grammar(
    format_: CallFormat, functions: Sequence[CalledFunction], thought: Thought, *, several: bool
) -> str:
    """The grammar of an answer that calls one of these functions, or several.

    Args:
        thought: the reasoning that may stand before the calls.
        several: whether the answer may have more than one call.
    """
    lines = [f"call: {' | '.join(f'call_{number}' for number in range(len(functions)))}"]
    for number, function in enumerate(functions):
        head = f'{{"name": {json.dumps(function.name)}, "{format_.arguments}": '
        if format_.layout is Layout.EACH:
            head = f"{format_.begin}\n{head}"
        tail = f"}}\n{format_.end}" if format_.layout is Layout.EACH else "}"
        lines.append(f"call_{number}: {json.dumps(head)} arguments_{number} {json.dumps(tail)}")
        lines.append(f"arguments_{number}: %json {_schema(function.parameters)}")
    match format_.layout:
        case Layout.EACH:
            calls = r'call ("\n" call)*' if several else "call"
        case Layout.LIST:
            calls = '" "? "[" call (", " call)* "]"' if several else '" "? "[" call "]"'
        case Layout.BARE:
            calls = "call"  # the template says that one call may be made at a time
    before = {Thought.NONE: "", Thought.POSSIBLE: f'("{THOUGHT_BEGIN}" thought)? ', Thought.OPEN: "thought "}
    lines.insert(0, f"start: {before[thought]}{calls}")
    if thought is not Thought.NONE:
        end = THOUGHT_END.replace("/", r"\/")
        lines.append(f"thought: reasoning /\\n{{0,2}}/\nreasoning[lazy]: /(?s:.*){end}/")
    return "\n".join(lines)


def _schema(parameters: Mapping[str, Any] | None) -> str:
    """The schema of a function's arguments as JSON that may stand in a grammar."""
    given = {"type": "object", **parameters} if parameters else _NO_ARGUMENTS
    text = json.dumps(given | {"x-guidance": _SPACING})
    return text.replace("%llguidance", r"\u0025llguidance")  # within a string: nothing else in JSON has it
