"""Plans the answer to a conversation: from the request, the chat template and the rendered prompt. Pure."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import lru_cache
from typing import Any

from orchestrator.front.http.chat.chat_fields import ChatRequest, ConversationFields
from orchestrator.front.http.chat.families import (
    THINK,
    CallFormat,
    ThoughtMarks,
    format_of,
)
from orchestrator.front.http.chat.plan import ChatPlan, Thought
from orchestrator.front.http.chat.schema_view import with_types
from orchestrator.front.http.chat.tool_choice import Calling, ChosenTools, chosen_tools
from orchestrator.front.http.chat.tool_grammar import CalledFunction, calls_grammar, thoughts_grammar
from orchestrator.front.http.field_faults import FieldRefused
from orchestrator.front.http.fields import JsonObjectFormat, JsonSchemaFormat
from orchestrator.front.http.templated.parse_order import REASONING, parse_order
from speculative.grammar import without_literals

_SPECIAL_ID = re.compile(r"<\[\d")


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as a prompt."""

    text: str
    template: str = ""
    """The template that rendered the prompt."""
    response: str = ""
    """The response template of the checkpoint or of its family as JSON; empty: none can be used here."""
    special: Mapping[str, int] = field(default_factory=dict)
    """Ids of the marks of the answer that are special tokens."""
    can_reason_before_format: bool = False
    """Whether the model's reasoning can precede an answer in the client's format."""


def planned(asked: ChatRequest, rendered: Rendered) -> tuple[str, ChatPlan]:
    """The prompt, and the plan of its answer.

    Raises FieldRefused for fields that the model's chat template cannot use.
    """
    try:
        return _planned(asked, rendered)
    except RecursionError:
        raise FieldRefused("tools", "the parameters of a function are nested too deeply") from None


def _planned(asked: ChatRequest, rendered: Rendered) -> tuple[str, ChatPlan]:
    template = rendered.template
    if not template:  # no such model is served, which the admission tells
        return rendered.text, ChatPlan()
    effort = asked.reasoning_effort
    if effort not in (None, "none") and not ("reasoning_effort" in template or "enable_thinking" in template):
        raise FieldRefused(
            "reasoning_effort", "reasoning_effort cannot be used: the model's chat template knows no effort"
        )
    marks = thought_marks(template, rendered.response)
    thought = Thought.NONE if marks is None else _thought(asked, rendered.text, marks)
    free = ChatPlan(thought=thought, marks=marks or THINK)
    chosen, format_ = chosen_tools(asked), format_of(template)
    form = _client_format(asked, free.marks)
    if chosen.calling is not Calling.SURELY and form in (_ClientFormat.JSON, _ClientFormat.OTHER):
        free = replace(free, preamble=_preamble(asked, free, format_, rendered))
        if form is _ClientFormat.JSON or thought is Thought.OPEN:
            return rendered.text, free if free.preamble else ChatPlan()
        calls = chosen.calling is not Calling.NEVER
        if free.preamble and rendered.response and not (calls and _named_marks(rendered.response)):
            # The response template would trim the content, or leave the reasoning in it.
            return rendered.text, free
    if rendered.response and chosen.calling is not Calling.SURELY:
        return rendered.text, replace(free, order=_order(chosen, rendered))
    if chosen.calling is Calling.NEVER:
        return rendered.text, free
    if chosen.calling is Calling.MAYBE:
        allowed = tuple(tool.function.name for tool in chosen.callable) if chosen.narrowed else ()
        return rendered.text, replace(free, format="" if format_ is None else format_.name, allowed=allowed)
    if format_ is None or (format_.tags is not None and not rendered.response):
        raise FieldRefused(
            "tool_choice",
            "tool_choice cannot ask for a call: the format of this model's tool calls is not known here; "
            "leave it out, and the answer is text",
        )
    several = not chosen.named and asked.parallel_tool_calls is not False
    return _required(chosen, several, rendered, format_, free)


class _ClientFormat(Enum):
    """The format in which the client wants the answer."""

    NONE = auto()
    JSON = auto()
    """JSON: neither reasoning nor calls can stand in it."""
    OTHER = auto()
    """A format of which the reasoning is no part."""
    WITH_REASONING = auto()
    """A format that writes the end mark of the reasoning itself."""


def _client_format(asked: ChatRequest, marks: ThoughtMarks) -> _ClientFormat:
    structured = asked.structured_outputs
    if structured is None:
        is_json = isinstance(asked.response_format, JsonObjectFormat | JsonSchemaFormat)
        return _ClientFormat.JSON if is_json else _ClientFormat.NONE
    regex, grammar = structured.regex or "", structured.grammar or ""
    written = "\n".join((regex, grammar, *(structured.choice or ())))
    if not written.strip():
        return _ClientFormat.JSON
    by_text, by_id = marks.end in written.replace("\\", ""), _SPECIAL_ID.search(without_literals(grammar))
    return _ClientFormat.WITH_REASONING if by_text or by_id else _ClientFormat.OTHER


def _preamble(asked: ChatRequest, free: ChatPlan, format_: CallFormat | None, rendered: Rendered) -> str:
    """The grammar of the reasoning before the client's own format.

    Empty if the model cannot reason before a format, or if the client turned reasoning off, which some
    templates ignore. Empty too if reasoning is a message of its own: a message header would have to follow.
    """
    if not rendered.can_reason_before_format or asked.variables().get("enable_thinking") is False:
        return ""
    tags = None if format_ is None else format_.tags
    if tags is not None and tags.thought:
        return ""
    lead = "" if tags is None else tags.lead
    return thoughts_grammar(free.thought, free.marks, rendered.special, lead)


def _order(chosen: ChosenTools, rendered: Rendered) -> str:
    tools = [_typed(tool.plain()) for tool in chosen.callable]
    narrows = chosen.narrowed or chosen.calling is Calling.NEVER
    allowed = [tool.function.name for tool in chosen.callable] if narrows else None
    return parse_order(rendered.response, rendered.text, tools, allowed)


def _typed(tool: dict[str, Any]) -> dict[str, Any]:
    """The tool with the types of its function's arguments, by which the parser reads bare text."""
    function = tool["function"]
    if not function.get("parameters"):
        return tool
    return {
        **tool,
        "function": {**function, "parameters": with_types(function["name"], function["parameters"])},
    }


def _required(
    chosen: ChosenTools, several: bool, rendered: Rendered, format_: CallFormat, free: ChatPlan
) -> tuple[str, ChatPlan]:
    functions = [CalledFunction(tool.function.name, tool.function.parameters) for tool in chosen.callable]
    prompt, thought = rendered.text, free.thought
    if format_.special:
        prompt, thought = prompt + format_.begin, Thought.NONE
    grammar = calls_grammar(
        format_, functions, thought, several=several, marks=free.marks, special=rendered.special
    )
    plan = replace(free, thought=thought, named=chosen.named, grammar=grammar)
    if format_.tags is not None:
        return prompt, replace(plan, order=_order(chosen, rendered))
    return prompt, replace(plan, format=format_.name, called=format_.special)


def parses_answers(template: str, response: str) -> bool:
    """Whether an answer may be more than its text though no tools are given: some of it can be reasoning.

    Args:
        template: the model's chat template.
        response: its response template as JSON; empty: there is none.
    """
    return bool(response) or thought_marks(template, response) is not None


@lru_cache(maxsize=16)
def thought_marks(template: str, response: str) -> ThoughtMarks | None:
    """The marks around reasoning, by the response template or else the usual ones; None: a chat template that
    has no such marks."""
    marks = _named_marks(response) or THINK
    return marks if marks.end in template else None


def _named_marks(response: str) -> ThoughtMarks | None:
    """The marks around reasoning that a response template names; None: it names none."""
    fields = json.loads(response).get("fields", {}) if response else {}
    named = [fields[name] for name in fields if name in REASONING]
    opens, closes = ([_first(field_.get(key)) for field_ in named] for key in ("open", "close"))
    return ThoughtMarks(opens[0], closes[0]) if named and opens[0] and closes[0] else None


def _first(mark: object) -> str:
    """A mark, or the first of a list of marks; empty where there is none."""
    found = mark[0] if isinstance(mark, list) and mark else mark
    return found if isinstance(found, str) else ""


def _thought(asked: ConversationFields, prompt: str, marks: ThoughtMarks) -> Thought:
    if asked.continue_final_message:
        return Thought.NONE
    end = prompt[-64:].rstrip()
    if end.endswith(marks.begin.rstrip()):
        return Thought.OPEN
    return Thought.NONE if end.endswith(marks.end) else Thought.POSSIBLE
