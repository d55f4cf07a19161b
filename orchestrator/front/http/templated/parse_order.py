"""What a process is told about an answer that it is to parse by a checkpoint's response template. Pure."""

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

PREFIX = 16_384
"""Characters of the prompt's end that go along: an answer begins behind the last mark of a turn in it."""
MOST_TOOLS = 1 << 16
"""Characters of the tools' schemas; larger ones stay behind, and arguments keep the types that they have."""
REASONING = frozenset({"reasoning_content", "reasoning", "thinking"})
"""Fields of templates that hold reasoning; text of all other fields but the calls is content."""


def parse_order(
    template: str, prompt: str, tools: Sequence[dict[str, Any]], allowed: Sequence[str] | None
) -> str:
    """The order to parse one answer, as JSON.

    Args:
        template: the response template as JSON.
        prompt: the rendered conversation.
        tools: the functions with their schemas, as the chat template has them.
        allowed: names of the functions that the answer may call; None: any.
    """
    known = tools if len(json.dumps(tools)) <= MOST_TOOLS else []
    order = {"template": template, "prompt": prompt[-PREFIX:], "tools": known, "allowed": allowed}
    return json.dumps(order, ensure_ascii=False)


@lru_cache(maxsize=8)
def marks_of(template: str) -> str:
    """The texts in a response template that may be marks, one after the other and without escapes."""
    return "\n".join(_strings(json.loads(template))).replace("\\", "")


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)
