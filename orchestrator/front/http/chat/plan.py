"""The plan of a conversation's answer: format of calls, place of reasoning, grammar."""

from dataclasses import dataclass
from enum import StrEnum

from orchestrator.front.http.chat.families import THINK, ThoughtMarks

LINE_ENDS = 2
"""Line ends that may stand between the end of the reasoning and a text that a grammar describes."""


class Thought(StrEnum):
    """Where an answer's reasoning is."""

    NONE = "none"
    """The answer has no reasoning."""
    POSSIBLE = "possible"
    """The answer may begin with reasoning between marks."""
    OPEN = "open"
    """The prompt ends with the begin mark, so the answer begins within the reasoning."""


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """How the answer to one conversation is constrained and parsed."""

    format: str = ""
    """Name of the format of tool calls; empty: calls in the answer stay text."""
    thought: Thought = Thought.NONE
    marks: ThoughtMarks = THINK
    """The marks around the answer's reasoning."""
    called: bool = False
    """Whether the prompt ends with the begin mark of the calls."""
    named: bool = False
    """Whether the client named the function to call."""
    allowed: tuple[str, ...] = ()
    """Names of the functions that the answer may call; empty: calls of any name are parsed."""
    grammar: str = ""
    """The grammar of the answer in Lark's language; empty: the answer is free."""
    preamble: str = ""
    """The grammar, in Lark's language, of the reasoning before an answer in the client's own format.
    Empty: no reasoning precedes the answer, or the client asks for no format."""
    order: str = ""
    """How to parse the answer by the checkpoint's response template, as `parse_order` has it; empty: by the
    format."""
