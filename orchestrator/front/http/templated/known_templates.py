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
_DEEPSEEK_ANCHOR = "<｜Assistant｜>(?:</think>)?|<｜tool▁outputs?▁end｜>"
_HARMONY_HEADER = r"(?:<\|start\|>assistant)?"


def _nothing(mark: str) -> dict[str, Any]:
    """A field that is a mark alone, so that the mark is part of no other field.

    A pattern may not end in something optional: where the output is cut there, the parser goes without it.
    """
    return {"open_pattern": mark, "close_pattern": ""}


def _mistral(behind_name: str) -> dict[str, Any]:
    """The template of Mistral's calls of a name and JSON.

    Args:
        behind_name: the pattern between them.
    """
    return {
        "start_anchor": ("[/INST]", "[/TOOL_RESULTS]"),
        "fields": {
            "reasoning_content": {"open": "[THINK]", "close": "[/THINK]"},
            "tool_calls": {
                "open_pattern": rf"\s*\[TOOL_CALLS\]\s*(?P<name>[\w.-]+){behind_name}",
                "close_pattern": r"(?=\[TOOL_CALLS\])",
                "repeats": True,
                "content": "json",
                "transform": _NAMED_CALL,
            },
            "content": {},
        },
    }


def _deepseek(head: str, behind_json: str) -> dict[str, Any]:
    """The template of DeepSeek's calls of a name and JSON.

    Args:
        head: the pattern from the begin mark of a call to its JSON.
        behind_json: the pattern between the JSON and the end mark of the call.
    """
    return {
        "start_anchor_pattern": _DEEPSEEK_ANCHOR,
        "fields": {
            "reasoning_content": _THOUGHTS,
            "tool_calls": {
                "open_pattern": rf"\s*(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>{head}",
                "close_pattern": rf"{behind_json}<｜tool▁call▁end｜>",
                "repeats": True,
                "content": "json",
                "transform": _NAMED_CALL,
            },
            "end": _nothing(r"\s*<｜tool▁calls▁end｜>"),
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
    "mistral_args": _mistral(r"\[ARGS\]"),
    "mistral_id": _mistral(r"(?:\[CALL_ID\]\s*\w*\s*)?\[ARGS\]"),
    "deepseek": _deepseek(r"function<｜tool▁sep｜>(?P<name>[\w.-]+)\s*```json\s", r"\s```"),
    "deepseek_v31": _deepseek(r"(?P<name>[\w.-]+)<｜tool▁sep｜>", ""),
    "kimi_k2": {
        "start_anchor": "<|im_assistant|>assistant<|im_middle|>",
        "fields": {
            "reasoning_content": _THOUGHTS,
            "tool_calls": {
                "open_pattern": (
                    r"\s*(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*"
                    r"(?:functions\.)?(?P<name>[\w.-]+):\d+\s*<\|tool_call_argument_begin\|>"
                ),
                "close": "<|tool_call_end|>",
                "repeats": True,
                "content": "json",
                "transform": _NAMED_CALL,
            },
            "end": _nothing(r"\s*<\|tool_calls_section_end\|>"),
            "content": {},
        },
    },
    "harmony": {
        "start_anchor": "<|start|>assistant",
        "fields": {
            "reasoning_content": {
                "open": [
                    "<|channel|>analysis<|message|>",
                    "<|start|>assistant<|channel|>analysis<|message|>",
                ],
                "close": "<|end|>",
            },
            # The name of the function stands before the channel or behind it.
            "tool_calls": {
                "open_pattern": (
                    rf"{_HARMONY_HEADER}(?:\s*to=functions\.(?P<name>[\w.-]+)\s*<\|channel\|>\w+"
                    r"|<\|channel\|>\w+\s+to=functions\.(?P<name>[\w.-]+))"
                    r"\s*(?:<\|constrain\|>)?\s*\w*\s*<\|message\|>"
                ),
                "close": ["<|call|>", "<|end|>"],
                "repeats": True,
                "content": "json",
                "transform": _NAMED_CALL,
            },
            "content": {
                "open_pattern": (
                    rf"{_HARMONY_HEADER}<\|channel\|>(?:final|commentary)(?!\s*to=functions\.)[^<]*"
                    r"(?:<\|constrain\|>[^<]*)?<\|message\|>"
                ),
                "close": ["<|end|>", "<|return|>"],
            },
            "text": {},  # without a header, as a grammar of the client's may have it
        },
    },
    "minimax_m2": {
        "start_anchor": "]~b]ai\n",
        "fields": {
            "reasoning_content": _THOUGHTS,
            "tool_calls": {
                "open_pattern": r'\s*(?:<minimax:tool_call>\s*)?<invoke name="(?P<name>[^"\n]+)">',
                "close": "</invoke>",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": r'<parameter name="(?P<key>[^"\n]+)">(?P<value>.*?)</parameter>'
                },
                "transform": _NAMED_CALL,
            },
            "end": _nothing(r"\s*</minimax:tool_call>"),
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
