"""Response templates of families whose checkpoints bring none, as a table; which template a model has.

Transformers' parser reads answers by these templates, as it does by a checkpoint's own.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from outrider.tokens import ChatTemplate

MOST_TEMPLATE = 1 << 16
"""Characters of a checkpoint's template; it goes along with every answer."""
_NAMED_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_THOUGHTS = {"open": "<think>", "close": "</think>"}


@dataclass(frozen=True, slots=True)
class KnownTemplate:
    """The response template of one family."""

    name: str
    shown_by: tuple[str, ...]
    """Texts that the family's chat template must all contain."""
    anchor: str | tuple[str, ...]
    """What the prompt has before an answer."""
    fields: Mapping[str, Any]

    def text(self) -> str:
        """The template as JSON."""
        return json.dumps({"start_anchor": self.anchor, "fields": self.fields})


KNOWN = (
    KnownTemplate(  # Qwen 3 Coder, Qwen 3.5, Nemotron 3
        name="qwen_function",
        shown_by=("<tool_call>", "<function=", "<parameter=", "<|im_start|>"),
        anchor="<|im_start|>assistant\n",
        fields={
            "reasoning_content": _THOUGHTS,
            "tool_calls": {
                "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
                "close_pattern": r"</function>\s*</tool_call>",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"
                },
                "transform": _NAMED_CALL,
            },
            "content": {},
        },
    ),
    KnownTemplate(  # GLM 4.5 and later
        name="glm",
        shown_by=("<tool_call>", "<arg_key>", "<arg_value>", "<|assistant|>"),
        anchor="<|assistant|>",
        fields={
            "reasoning_content": _THOUGHTS,
            "tool_calls": {
                "open_pattern": r"\s*<tool_call>\s*(?P<name>[\w.-]+)\s",
                "close": "</tool_call>",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
                },
                "transform": _NAMED_CALL,
            },
            "content": {},
        },
    ),
    KnownTemplate(
        name="gemma4",
        shown_by=("<|tool_call>", "<tool_call|>", "<|turn>"),
        anchor=("<|turn>model\n", "<tool_response|>"),
        fields={
            "reasoning_content": {"open": "<|channel>thought\n", "close": "<channel|>"},
            "tool_calls": {
                "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
                "close": "<tool_call|>",
                "repeats": True,
                "content": "json",
                "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
                "transform": _NAMED_CALL,
            },
            "content": {"close": ["<turn|>", "<|tool_response>"]},
        },
    ),
)
"""Families whose calls the table of formats does not know."""


def response_template(chat: ChatTemplate) -> str:
    """A model's response template as JSON: the checkpoint's own, else the family's.

    Empty: there is none, or it is too long.
    """
    if len(chat.response) > MOST_TEMPLATE:
        return ""
    return chat.response or _of_family(chat.source)


@lru_cache(maxsize=16)
def _of_family(chat_template: str) -> str:
    for known in KNOWN:
        if all(text in chat_template for text in known.shown_by):
            return known.text()
    return ""
