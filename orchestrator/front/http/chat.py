"""Renders conversations as prompts: a tokenizer's chat template, run in a sandbox and with a time limit.

Templates come with models. The sandbox keeps a template from everything but the messages, and a template that
does not end in time is stopped.
"""

import asyncio
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache
from types import FrameType
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from orchestrator.fleet.target_model import TargetModel
from orchestrator.front.http.errors import FieldRefused
from outrider.tokens import ChatTemplate

LONGEST_S = 2.0
MOST_CHARACTERS = 1 << 24


async def render_conversation(
    target: TargetModel,
    messages: Sequence[Mapping[str, str]],
    *,
    add_generation_prompt: bool = True,
    longest_s: float = LONGEST_S,
) -> str:
    """The conversation as the target's prompt.

    Raises FieldRefused where the target has no template, or its template cannot take these messages.
    """
    if target.chat is None or target.tokens is None:
        raise FieldRefused(
            "messages", f"model {target.name!r} has no chat template: ask /v1/completions with a prompt"
        )
    return await asyncio.to_thread(_render, target.chat, messages, add_generation_prompt, longest_s)


def _render(
    chat: ChatTemplate, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool, longest_s: float
) -> str:
    pieces, length = [], 0
    try:
        with _no_longer_than(longest_s):
            for piece in _compiled(chat.source).generate(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                **chat.tokens,
            ):
                pieces.append(piece)
                if (length := length + len(piece)) > MOST_CHARACTERS:
                    raise jinja2.TemplateError(f"it makes more than {MOST_CHARACTERS} characters")
    except jinja2.TemplateError as error:
        raise FieldRefused("messages", f"the chat template cannot take these messages: {error}") from error
    except Exception as error:  # a template is a program that came with a model
        raise FieldRefused(
            "messages", f"the chat template failed: {type(error).__name__}: {error}"
        ) from error
    return "".join(pieces)


@contextmanager
def _no_longer_than(seconds: float) -> Iterator[None]:
    """Stops the Python code inside after this many seconds.

    Every line of that code looks at the clock, because a thread cannot be stopped from outside.
    """
    deadline, before = time.monotonic() + seconds, sys.gettrace()

    def look(frame: FrameType, event: str, argument: object) -> Any:
        if time.monotonic() > deadline:
            raise jinja2.TemplateError(f"it did not end within {seconds:g} s")
        return look

    sys.settrace(look)
    try:
        yield
    finally:
        sys.settrace(before)


class _Sandbox(ImmutableSandboxedEnvironment):
    """A sandbox in which no single step can make a huge string, either."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Evaluates `*` and `**` of a template."""
        if operator == "**":
            raise jinja2.TemplateError("** is not possible here")
        for one, other in ((left, right), (right, left)):
            if isinstance(one, Sized) and isinstance(other, int) and len(one) * other > MOST_CHARACTERS:
                raise jinja2.TemplateError(f"it makes more than {MOST_CHARACTERS} characters")
        return super().call_binop(context, operator, left, right)


@lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    """The compiled template, with the filters and functions that templates of published tokenizers expect."""
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], autoescape=False)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
