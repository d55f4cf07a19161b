"""Response templates of families whose checkpoints bring none, as a table; which template a model has.

Transformers' parser reads answers by these templates, as it does by a checkpoint's own.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from orchestrator.front.http.chat.families import format_of
from outrider.tokens import ChatTemplate

MOST_TEMPLATE = 1 << 16
"""Characters of a checkpoint's template; it goes along with every answer."""
_NAMED_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_THOUGHTS = {"open": "<think>", "close": "</think>"}


_GLM = {
    "start_anchor": "<|assistant|>",
    "fields": {
        "reasoning_content": _THOUGHTS,
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>\s*(?P<name>[\w.-]+)(?=[\s<])",
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
}
KNOWN: Mapping[str, Mapping[str, Any]] = {
    "qwen_function": {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "reasoning_content": _THOUGHTS,
            "tool_calls": {
                "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
                "close_pattern": r"</function>\s*</tool_call>",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
                },
                "transform": _NAMED_CALL,
            },
            "content": {},
        },
    },
    "mistral_args": {
        "start_anchor": ("[/INST]", "[/TOOL_RESULTS]"),
        "fields": {
            "reasoning_content": {"open": "[THINK]", "close": "[/THINK]"},
            "tool_calls": {
                "open_pattern": r"\s*\[TOOL_CALLS\]\s*(?P<name>[\w.-]+)\[ARGS\]",
                "close_pattern": r"(?=\[TOOL_CALLS\])",
                "repeats": True,
                "content": "json",
                "transform": _NAMED_CALL,
            },
            "content": {},
        },
    },
    "glm": _GLM,
    "glm_flat": _GLM,
    "gemma4": {
        "start_anchor": ("<|turn>model\n", "<tool_response|>"),
        "fields": {
            "reasoning_content": {"open": "<|channel>thought\n", "close": "<channel|>"},
            "tool_calls": {
                "open_pattern": r"<\|tool_call>call:(?P<name>[\w.-]+)",
                "close": "<tool_call|>",
                "repeats": True,
                "content": "json",
                "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
                "transform": _NAMED_CALL,
            },
            "content": {"close": ["<turn|>", "<|tool_response>"]},
        },
    },
}
"""Response templates by the name of a format of the table in `families`."""


def response_template(chat: ChatTemplate) -> str:
    """A model's response template as JSON: the checkpoint's own, else the family's.

    Empty: there is none, or it is too long.
    """
    if len(chat.response) > MOST_TEMPLATE:
        return ""
    return chat.response or _of_family(chat.source)


@lru_cache(maxsize=16)
def _of_family(chat_template: str) -> str:
    format_ = format_of(chat_template)
    known = None if format_ is None else KNOWN.get(format_.name)
    return "" if known is None else json.dumps(known)
