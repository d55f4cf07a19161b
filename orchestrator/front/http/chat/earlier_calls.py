"""Earlier calls of a conversation as a family's chat template takes them. Pure."""

import json
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from orchestrator.front.http.chat.families import format_of


class Arguments(dict[str, Any]):
    """The arguments of a call: an object for templates that write JSON, and text for those that join texts.

    Transformers' templates get objects; DeepSeek's own, which are older than that, join the text that
    OpenAI's clients send.
    """

    def __add__(self, behind: str) -> str:
        return json.dumps(self, ensure_ascii=False) + behind

    def __radd__(self, before: str) -> str:
        return before + json.dumps(self, ensure_ascii=False)


def earlier_calls(messages: Sequence[Mapping[str, Any]], template: str) -> list[dict[str, Any]]:
    """Copies of the messages whose calls are as the chat template needs them.

    Args:
        template: the chat template.
    """
    format_ = format_of(template)
    expected = "" if format_ is None else format_.earlier_ids
    ids: dict[str, str] = {}
    numbers = count()  # not by `ids`: some clients begin anew with "call_0" in every turn
    shown = []
    for message in messages:
        copy = dict(message)
        if calls := message.get("tool_calls"):
            for call in calls:
                name = call["function"]["name"]
                ids[call["id"]] = expected.format(name=name, number=next(numbers)) or call["id"]
            copy["tool_calls"] = [_shown(call, ids[call["id"]]) for call in calls]
            if format_ is not None and format_.null_content:
                copy["content"] = message["content"] or None
        elif "tool_call_id" in message:
            copy["tool_call_id"] = ids.get(message["tool_call_id"], message["tool_call_id"])
        shown.append(copy)
    return shown


def _shown(call: Mapping[str, Any], id_: str) -> dict[str, Any]:
    function = call["function"]
    return {**call, "id": id_, "function": {**function, "arguments": Arguments(function["arguments"])}}
