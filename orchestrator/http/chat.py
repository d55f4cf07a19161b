"""Conversations to prompts: a tokenizer's chat template, run in a sandbox and for so long only.

Templates come with models. The sandbox keeps them from everything but the messages; one that does not come to
an end is given up, and not run again.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from orchestrator.http.errors import FieldRefused
from orchestrator.requests import Target
from outrider.tokens import ChatTemplate

LONGEST_S = 5.0
MOST_CHARACTERS = 1 << 24


class Templates:
    """Renders; knows which templates did not end."""

    def __init__(self, longest_s: float = LONGEST_S) -> None:
        self._longest_s = longest_s
        self._endless: set[str] = set()

    async def prompt(
        self, target: Target, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> str:
        """The conversation as the target reads it.

        Raises FieldRefused where there is no template, or where it cannot take these messages.
        """
        chat = target.chat
        if chat is None or target.tokens is None:
            raise FieldRefused(
                "messages", f"model {target.name!r} has no chat template: ask /v1/completions with a prompt"
            )
        if chat.source in self._endless:
            raise self._endless_error(target)
        render = asyncio.to_thread(_render, chat, messages, add_generation_prompt)
        try:
            async with asyncio.timeout(self._longest_s):
                return await render
        except TimeoutError as error:  # its thread goes on, the only one that ever will
            self._endless.add(chat.source)
            raise self._endless_error(target) from error

    def _endless_error(self, target: Target) -> FieldRefused:
        return FieldRefused(
            "messages",
            f"the chat template of {target.name!r} did not end within {self._longest_s:g} s; it is not used "
            "again: ask /v1/completions with a prompt",
        )


def _render(chat: ChatTemplate, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> str:
    try:
        pieces, length = [], 0
        for piece in _compiled(chat.source).generate(
            messages=[dict(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
            **chat.tokens,
        ):
            pieces.append(piece)
            length += len(piece)
            if length > MOST_CHARACTERS:
                raise FieldRefused(
                    "messages", f"the chat template makes more than {MOST_CHARACTERS} characters"
                )
        return "".join(pieces)
    except jinja2.TemplateError as error:
        raise FieldRefused("messages", f"the chat template cannot take these messages: {error}") from error
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise FieldRefused(
            "messages", f"the chat template failed: {type(error).__name__}: {error}"
        ) from error


@lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    """With what templates of published tokenizers expect beside the language itself."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], autoescape=False
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
