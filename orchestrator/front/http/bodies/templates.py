"""Renders conversations as prompts, by the chat templates of the served models. Pure.

A template is a program that came with a model. The sandbox keeps a template from everything but the messages;
the process around this module bounds its time and its memory, and may be killed.
"""

import json
from collections.abc import Mapping, Sequence, Sized
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from orchestrator.front.http.field_faults import FieldRefused

MOST_CHARACTERS = 1 << 24


def render_conversation(
    source: str,
    tokens: Mapping[str, str],
    messages: Sequence[Mapping[str, str]],
    *,
    add_generation_prompt: bool = True,
) -> str:
    """The conversation as a prompt. Raises FieldRefused where the template cannot take these messages.

    Args:
        source: the template.
        tokens: the text of special tokens, by the names that the template may use.
    """
    pieces, length = [], 0
    try:
        for piece in _compiled(source).generate(
            messages=[dict(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
            **tokens,
        ):
            pieces.append(piece)
            if (length := length + len(piece)) > MOST_CHARACTERS:
                raise jinja2.TemplateError(f"it makes more than {MOST_CHARACTERS} characters")
    except jinja2.TemplateError as error:
        raise FieldRefused("messages", f"the chat template cannot take these messages: {error}") from error
    except MemoryError:
        raise
    except Exception as error:
        raise FieldRefused(
            "messages", f"the chat template failed: {type(error).__name__}: {error}"
        ) from error
    return "".join(pieces)


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
