"""Recognises bodies of OpenAI's API that a device can draft for, and reads their fields; pure.

A body with any other field, or with a value of another type, is the cloud's alone: the endpoint passes the
body on as it came, so that an answer or a refusal is always the cloud's own.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from outrider.client.options import Options

PATHS = {"/v1/chat/completions": True, "/v1/completions": False}
"""Paths of the API that a device drafts for; True for conversations."""
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_WHOLE = ("top_k", "min_tokens", "max_tokens", "max_completion_tokens", "seed", "n")
_FLAGS = ("ignore_eos", "stream")
_TEXTS = ("model", "user")
_OTHERS = ("stop", "stop_token_ids", "logit_bias", "stream_options", "prompt", "messages")
_KNOWN = frozenset((*_NUMBERS, *_WHOLE, *_FLAGS, *_TEXTS, *_OTHERS))
_SAMPLING = (*_NUMBERS, "top_k", "min_tokens", "ignore_eos")


@dataclass(frozen=True, slots=True)
class AskedBody:
    """A body that a device can draft for."""

    model: str
    """Name of the model; empty: the only one."""
    prompt: str | tuple[int, ...]
    """The prompt as text or token ids; empty for a conversation."""
    messages: tuple[Any, ...]
    """The conversation's turns; empty for a completion."""
    options: Options
    """Options of the request, apart from the prompt."""
    stream: bool
    usage: bool
    """Whether a stream is to end with the usage."""


def read_body(data: bytes, *, chat: bool) -> AskedBody | None:
    """The body's request; None if the cloud must answer the body without the device.

    Args:
        chat: whether the body is a conversation.
    """
    try:
        read = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(read, dict):
        return None
    body = {name: value for name, value in read.items() if value is not None}
    if not body.keys() <= _KNOWN or not _fits(body) or ("messages" in body) is not chat:
        return None
    prompt, usage = _prompt(body.get("prompt", "")), _wants_usage(body)
    options = _options(body)
    if prompt is None or usage is None or options is None or chat is bool(prompt):
        return None
    messages = body.get("messages", [])
    if not isinstance(messages, list) or chat is not bool(messages):
        return None
    stream = bool(body.get("stream"))
    return AskedBody(body.get("model", ""), prompt, tuple(messages), options, stream, usage)


def with_defaults(options: Options, defaults: Mapping[str, Any], max_tokens: int | None) -> Options:
    """The options, completed by the model's sampling parameters and this token limit."""
    merged = {name: value for name, value in defaults.items() if name in _SAMPLING}
    if max_tokens is not None:
        merged["max_tokens"] = max_tokens
    return cast(Options, merged | dict(options))


def _fits(body: Mapping[str, Any]) -> bool:
    """Whether all plain values have their types."""
    kinds = ((_NUMBERS, (int, float)), (_WHOLE, (int,)), (_FLAGS, (bool,)), (_TEXTS, (str,)))
    return all(
        isinstance(body[name], types) and isinstance(body[name], bool) is (bool in types)
        for names, types in kinds
        for name in names
        if name in body
    )


def _prompt(given: object) -> str | tuple[int, ...] | None:
    if isinstance(given, str):
        return given
    if isinstance(given, list) and all(type(id_) is int for id_ in given):
        return tuple(given)
    return None


def _wants_usage(body: Mapping[str, Any]) -> bool | None:
    """Whether a stream is to end with the usage; None where other options of streams are given."""
    asked = body.get("stream_options", {})
    if (
        not isinstance(asked, dict)
        or not asked.keys() <= {"include_usage"}
        or (asked and not body.get("stream"))
    ):
        return None
    wanted = asked.get("include_usage") or False
    return wanted if isinstance(wanted, bool) else None


def _options(body: Mapping[str, Any]) -> Options | None:
    """The body's fields as a client's options; None if a device cannot draft for such a body."""
    limits = {body[name] for name in ("max_tokens", "max_completion_tokens") if name in body}
    stop, stop_ids, bias = body.get("stop", []), body.get("stop_token_ids", []), body.get("logit_bias", {})
    stops = [stop] if isinstance(stop, str) else stop
    if len(limits) > 1 or min(limits, default=1) < 1 or body.get("n", 1) != 1:
        return None
    if not isinstance(stops, list) or not all(isinstance(one, str) for one in stops):
        return None
    if not isinstance(stop_ids, list) or not all(type(id_) is int for id_ in stop_ids):
        return None
    if not isinstance(bias, dict) or not all(
        id_.isascii() and id_.isdigit() and type(value) in (int, float) for id_, value in bias.items()
    ):
        return None
    options: dict[str, Any] = {name: body[name] for name in (*_SAMPLING, "seed") if name in body}
    if "top_k" in options:
        options["top_k"] = max(0, options["top_k"])
    if limits:
        options["max_tokens"] = limits.pop()
    options |= {"stop": stops, "stop_ids": stop_ids, "logit_bias": {int(id_): bias[id_] for id_ in bias}}
    return cast(Options, options)
