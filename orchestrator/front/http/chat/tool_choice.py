"""Which tools an answer may call, and whether it has to, by the request's `tool_choice`. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from orchestrator.front.http.chat.chat_fields import AllowedChoice, ConversationFields, NamedTool, Tool
from orchestrator.front.http.field_faults import FieldRefused


class Calling(Enum):
    """Whether an answer calls tools."""

    NEVER = auto()
    """The model hears of no tools."""
    MAYBE = auto()
    """The model decides."""
    SURELY = auto()
    """A grammar makes the model call."""


@dataclass(frozen=True, slots=True)
class ChosenTools:
    """What a request's choice of tools comes to."""

    calling: Calling
    shown: Sequence[Tool] = ()
    """Tools that the prompt has."""
    callable: Sequence[Tool] = ()
    """Tools that the answer may call, all of them shown."""
    named: bool = False
    """Whether the client named the only function to call."""
    narrowed: bool = False
    """Whether the request has further tools, which the prompt leaves out and the answer must not call."""


def chosen_tools(asked: ConversationFields) -> ChosenTools:
    """The tools of a request, as its `tool_choice` narrows them down.

    Raises FieldRefused for a choice of tools that the request does not have.
    """
    tools, choice = asked.tools or [], asked.tool_choice
    if not tools and choice not in (None, "none", "auto"):
        says = "allows tools" if _may(choice) else "asks for a call"
        raise FieldRefused("tool_choice", f"tool_choice {says}, but tools is missing")
    if isinstance(choice, NamedTool):
        if asked.continue_final_message:
            raise FieldRefused(
                "continue_final_message", "continue_final_message is given beside tool_choice; leave one out"
            )
        return ChosenTools(Calling.SURELY, tools, _named_tools(tools, [choice]), named=True)
    if isinstance(choice, AllowedChoice):
        allowed = choice.allowed_tools
        found = _named_tools(tools, allowed.tools)
        calling = Calling.SURELY if allowed.mode == "required" else Calling.MAYBE
        return ChosenTools(calling, found, found, narrowed=len(found) < len(tools))
    if not tools or choice == "none":
        return ChosenTools(Calling.NEVER)
    return ChosenTools(Calling.SURELY if choice == "required" else Calling.MAYBE, tools, tools)


def _may(choice: object) -> bool:
    """Whether a choice of tools leaves it to the model to call one."""
    return isinstance(choice, AllowedChoice) and choice.allowed_tools.mode == "auto"


def _named_tools(tools: Sequence[Tool], named: Sequence[NamedTool]) -> list[Tool]:
    """The tools of these names, in the order of `tools`. Raises FieldRefused for a name that no tool has."""
    known = {tool.function.name for tool in tools}
    names = {tool.function.name for tool in named}
    if unknown := [tool.function.name for tool in named if tool.function.name not in known]:
        raise FieldRefused("tool_choice", f"tool_choice names {unknown[0]!r}, but no tool has this name")
    return [tool for tool in tools if tool.function.name in names]
