"""Plans the answer to a conversation: from the request, the chat template and the rendered prompt. Pure."""

from dataclasses import dataclass

from orchestrator.front.http.chat.chat_fields import ConversationFields
from orchestrator.front.http.chat.families import (
    THOUGHT_BEGIN,
    THOUGHT_END,
    CallFormat,
    format_of,
    has_thoughts,
)
from orchestrator.front.http.chat.plan import ChatPlan, Thought
from orchestrator.front.http.chat.tool_choice import Calling, ChosenTools, chosen_tools
from orchestrator.front.http.chat.tool_grammar import CalledFunction, calls_grammar
from orchestrator.front.http.field_faults import FieldRefused
from orchestrator.front.http.templated.parse_order import parse_order


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as a prompt."""

    text: str
    template: str = ""
    """The template that rendered the prompt."""
    response: str = ""
    """The checkpoint's response template as JSON; empty: it has none that can be used here."""


def planned(asked: ConversationFields, rendered: Rendered) -> tuple[str, ChatPlan]:
    """The prompt, and the plan of its answer.

    Raises FieldRefused for fields that the model's chat template cannot use.
    """
    template = rendered.template
    if not template:  # no such model is served, which the admission tells
        return rendered.text, ChatPlan()
    effort = asked.reasoning_effort
    if effort not in (None, "none") and not ("reasoning_effort" in template or "enable_thinking" in template):
        raise FieldRefused(
            "reasoning_effort", "reasoning_effort cannot be used: the model's chat template knows no effort"
        )
    thought = _thought(asked, rendered)
    chosen = chosen_tools(asked)
    if rendered.response and chosen.calling is not Calling.SURELY:
        return rendered.text, ChatPlan(thought=thought, order=_order(chosen, rendered))
    if chosen.calling is Calling.NEVER:
        return rendered.text, ChatPlan(thought=thought)
    format_ = format_of(template)
    if chosen.calling is Calling.MAYBE:
        allowed = tuple(tool.function.name for tool in chosen.callable) if chosen.narrowed else ()
        return rendered.text, ChatPlan("" if format_ is None else format_.name, thought, allowed=allowed)
    if format_ is None:
        raise FieldRefused(
            "tool_choice",
            "tool_choice cannot ask for a call: the format of this model's tool calls is not known here; "
            "leave it out, and the answer is text",
        )
    several = not chosen.named and asked.parallel_tool_calls is not False
    return _required(chosen, several, rendered.text, format_, thought)


def _order(chosen: ChosenTools, rendered: Rendered) -> str:
    tools = [tool.plain() for tool in chosen.callable]
    narrows = chosen.narrowed or chosen.calling is Calling.NEVER
    allowed = [tool.function.name for tool in chosen.callable] if narrows else None
    return parse_order(rendered.response, rendered.text, tools, allowed)


def _required(
    chosen: ChosenTools, several: bool, prompt: str, format_: CallFormat, thought: Thought
) -> tuple[str, ChatPlan]:
    functions = [CalledFunction(tool.function.name, tool.function.parameters) for tool in chosen.callable]
    if format_.special:
        prompt, thought = prompt + format_.begin, Thought.NONE
    grammar = calls_grammar(format_, functions, thought, several=several)
    plan = ChatPlan(format_.name, thought, called=format_.special, named=chosen.named, grammar=grammar)
    return prompt, plan


def _thought(asked: ConversationFields, rendered: Rendered) -> Thought:
    if not has_thoughts(rendered.template) or asked.continue_final_message:
        return Thought.NONE
    end = rendered.text[-64:].rstrip()
    if end.endswith(THOUGHT_BEGIN):
        return Thought.OPEN
    return Thought.NONE if end.endswith(THOUGHT_END) else Thought.POSSIBLE
