"""Renders conversations as prompts, by the chat templates of the served models. Pure.

A template is a program that came with a model, written for transformers: it finds the filters, functions and
tags here that transformers offers. The sandbox keeps a template from everything but the messages; the process
around this module bounds its time and its memory, and may be killed.
"""

import json
from collections.abc import Mapping, Sized
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from orchestrator.front.http.chat.conversation import ChatConversation
from orchestrator.front.http.chat.earlier_calls import earlier_calls
from orchestrator.front.http.field_faults import FieldRefused

MOST_CHARACTERS = 1 << 24
_CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "
"""Mark at the end of a message to continue; a template that trims messages removes the mark's space."""


def render_conversation(
    source: str,
    tokens: Mapping[str, str],
    conversation: ChatConversation,
) -> str:
    """The conversation as a prompt. Raises FieldRefused where the template cannot take the conversation.

    Args:
        source: the template.
        tokens: the text of special tokens, by the names that the template may use.
    """
    knows_developers = "'developer'" in source or '"developer"' in source
    messages = [
        _with_reasoning(message if knows_developers else _without_developer(message))
        for message in earlier_calls(conversation.messages, source)
    ]
    if conversation.continued:
        messages[-1]["content"] += _CONTINUED
    pieces, length = [], 0
    try:
        for piece in _compiled(source).generate(
            messages=messages,
            tools=list(conversation.tools) or None,
            documents=None,
            add_generation_prompt=conversation.answer_follows,
            **{**conversation.variables, **tokens},
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
    text = "".join(pieces)
    return _until_continued(text) if conversation.continued else text


def _until_continued(text: str) -> str:
    """The text up to the end of the message that is to be continued. Raises FieldRefused."""
    mark = _CONTINUED.strip()
    if mark not in text:
        raise FieldRefused(
            "continue_final_message", "the chat template leaves out the last message, or changes its end"
        )
    at = text.rindex(mark)
    return text[:at] if text.startswith(_CONTINUED, at) else text[:at].rstrip()


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


class _Generation(Extension):
    """The tags `generation` and `endgeneration`, around what an assistant wrote: they change no text."""

    tags = {"generation"}  # noqa: RUF012  # the library's own type

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    def _inside(self, caller: Macro) -> str:
        return str(caller())


class _Namespace(Namespace):
    """A namespace of a template's variables, whose names cannot reach into Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, args = args[0], args[1:]  # a variable may be called self
        variables = dict(*args, **kwargs)
        for name in variables:
            _check_variable(name)
        Namespace.__init__(self, variables)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_variable(name)
        super().__setitem__(name, value)


class _Dict:
    """The function `dict` of templates, without the type's other attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """A dict with these keys and one value."""
        return dict.fromkeys(*args)


@lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    """The compiled template, with the filters, functions and tags that transformers offers."""
    extensions = [_Generation, loopcontrols]
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=extensions, autoescape=False)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment.from_string(source)


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message, with its reasoning also under the second name that published templates read."""
    reasoning = message.get("reasoning_content")
    return dict(message) if reasoning is None else {"thinking": reasoning, **message}


def _without_developer(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message under a role that templates know: most leave a developer's out, or refuse it."""
    return {**message, "role": "system"} if message["role"] == "developer" else message


def _check_variable(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"a namespace has no variable {name!r}: no name begins with an underscore")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
