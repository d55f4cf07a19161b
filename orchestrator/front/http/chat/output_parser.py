"""Parses a model's output, as it streams, into content, reasoning and tool calls. Pure.

The time is linear in the length of the output, whatever the model writes, and no output raises an error: what
is no call stays content. A call is reported once it is complete, so that content which looks like a call at
first is never taken back.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from orchestrator.front.http.chat.families import (
    CallFormat,
    Layout,
    format_named,
)
from orchestrator.front.http.chat.plan import LINE_ENDS, ChatPlan, Thought
from orchestrator.front.http.strict_json import STRICT

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_IN_STRING = re.compile(r'["\\]')
_SLICE = 1024
"""Characters of a slice: each step copies the rest of its slice, so a slice bounds the step's time."""


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A tool call that a model wrote."""

    name: str
    arguments: str
    """A JSON object as text."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a piece of output adds to the answer."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ParsedCall, ...] = ()


class _State(Enum):
    START = auto()
    """Whether the content so far is only white space."""
    TEXT = auto()
    THOUGHT = auto()
    CALL = auto()


class OutputParser:
    """Parses the output of one choice: `feed` every piece in order, then `finish`."""

    def __init__(self, plan: ChatPlan) -> None:
        self._format: CallFormat | None = format_named(plan.format)
        self._allowed = plan.allowed
        self._marks = plan.marks
        self._may_think = plan.thought is Thought.POSSIBLE
        self._state = _State.START
        self._rest = ""
        """Text that may be the beginning of a mark; shorter than any mark."""
        self._body: list[str] = []
        """Parts of the call that is being read, without its begin mark."""
        self._in_string = False
        """Whether the body ends within a JSON string."""
        self._space: list[str] = []
        """White space that is dropped if a call or the end of reasoning follows, and content otherwise."""
        self._trimming = False
        """Whether white space is dropped until other text follows."""
        self._keeps_space = bool(plan.preamble)
        """Whether only the line ends of the preamble are dropped behind the reasoning: a client's format may
        begin with white space."""
        self._line_ends = 0
        """How many line ends may still be dropped."""
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ParsedCall] = []
        self._begin = "" if self._format is None else self._format.begin
        if plan.thought is Thought.OPEN:
            self._state, self._trimming = _State.THOUGHT, True
        elif plan.called:
            self._state, self._begin = _State.CALL, ""

    def feed(self, text: str) -> Parsed:
        """Parses a further piece of output; returns what the piece adds to the answer."""
        steps: dict[_State, Callable[[str], str | None]] = {
            _State.START: self._at_start,
            _State.TEXT: self._in_text,
            _State.THOUGHT: self._in_thought,
            _State.CALL: self._in_call,
        }
        for start in range(0, len(text), _SLICE):
            left: str | None = self._rest + text[start : start + _SLICE]
            self._rest = ""
            while left:
                left = steps[self._state](left)
        return self._taken()

    def finish(self) -> Parsed:
        """Ends the output; returns text that was held back, or a call without its end mark."""
        if self._state is _State.CALL:
            self._body.append(self._rest)
            self._end_call("")
        else:
            self._say(self._rest)
        self._rest = ""
        self._flush_space()
        return self._taken()

    def _taken(self) -> Parsed:
        parsed = Parsed("".join(self._content), "".join(self._reasoning), tuple(self._calls))
        self._content, self._reasoning, self._calls = [], [], []
        return parsed

    def _at_start(self, text: str) -> str | None:
        text = self._without_line_ends(text)
        bare = text.lstrip()
        self._say(text[: len(text) - len(bare)])
        if not bare:
            return None
        if self._may_think:
            if bare.startswith(self._marks.begin):
                self._may_think = False
                self._space.clear()
                self._state, self._trimming = _State.THOUGHT, True
                return bare[len(self._marks.begin) :]
            if self._marks.begin.startswith(bare):
                self._rest = bare
                return None
        is_call = self._format is not None and self._format.layout is Layout.BARE and bare[0] == "{"
        self._state = _State.CALL if is_call else _State.TEXT
        return bare

    def _without_line_ends(self, text: str) -> str:
        while self._line_ends and text.startswith("\n"):
            text, self._line_ends = text[1:], self._line_ends - 1
        if text:
            self._line_ends = 0
        return text

    def _in_text(self, text: str) -> str | None:
        before, found, after = self._until(text, self._begin)
        self._say(before)
        if not found:
            return None
        self._state = _State.CALL
        return after

    def _in_thought(self, text: str) -> str | None:
        before, found, after = self._until(text, self._marks.end)
        self._say(before)
        if not found:
            return None
        self._space.clear()
        self._state, self._may_think = _State.START, False
        self._trimming, self._line_ends = not self._keeps_space, LINE_ENDS if self._keeps_space else 0
        return after

    def _in_call(self, text: str) -> str | None:
        assert self._format is not None
        if not self._format.end:  # the calls go on to the end of the output
            self._body.append(text)
            return None
        if self._in_string:
            return self._in_call_string(text)
        quote = text.find('"')
        outside = text if quote < 0 else text[: quote + 1]
        before, found, after = self._until(outside, self._format.end)
        self._body.append(before)
        if found:
            self._end_call(self._format.end)
            return after + text[len(outside) :]
        if quote < 0:
            return None
        self._in_string = True
        return text[quote + 1 :]

    def _in_call_string(self, text: str) -> str | None:
        found = _IN_STRING.search(text)
        if found is None:
            self._body.append(text)
            return None
        after = found.end()
        if found[0] == "\\":
            if after == len(text):
                self._body.append(text[:-1])
                self._rest = "\\"
                return None
            after += 1
        else:
            self._in_string = False
        self._body.append(text[:after])
        return text[after:]

    def _until(self, text: str, mark: str) -> tuple[str, bool, str]:
        """The text before a mark, whether the mark is there, and the text behind it.

        The end of a text that may be the beginning of the mark waits for the next piece.
        """
        if not mark:
            return text, False, ""
        at = text.find(mark)
        if at >= 0:
            return text[:at], True, text[at + len(mark) :]
        for size in range(min(len(mark) - 1, len(text)), 0, -1):
            if text.endswith(mark[:size]):
                self._rest = text[-size:]
                return text[:-size], False, ""
        return text, False, ""

    def _end_call(self, end: str) -> None:
        body = "".join(self._body)
        self._body.clear()
        self._in_string = False
        self._state = _State.TEXT
        assert self._format is not None
        calls = _calls(body, self._format)
        if self._allowed and any(call.name not in self._allowed for call in calls):
            calls = []
        if calls:
            self._space.clear()
            self._calls += calls
            self._trimming = True
        else:
            self._say(self._begin + body + end)
        self._begin = self._format.begin

    def _say(self, text: str) -> None:
        """Adds text to the reasoning or to the content; trailing white space waits for the text that
        follows."""
        if self._trimming:
            text = text.lstrip()
        if not text:
            return
        self._trimming = False
        if bare := text.rstrip():
            self._flush_space()
            self._channel().append(bare)
        self._space.append(text[len(bare) :])

    def _flush_space(self) -> None:
        self._channel().extend(self._space)
        self._space.clear()

    def _channel(self) -> list[str]:
        return self._reasoning if self._state is _State.THOUGHT else self._content


def _calls(body: str, format_: CallFormat) -> list[ParsedCall]:
    """The calls that a body of JSON contains; no calls if the body is anything else."""
    try:
        match format_.layout:
            case Layout.EACH:
                values: Any = [STRICT.decode(body)]
            case Layout.LIST:
                values = STRICT.decode(body)
            case Layout.BARE:
                values = list(_bare_values(body))
        if not isinstance(values, list):
            return []
        return [parsed_call(value, format_.arguments) for value in values]
    except (ValueError, RecursionError):
        return []


def _bare_values(body: str) -> list[Any]:
    """JSON values that semicolons separate. Raises ValueError for anything else."""
    values, at, end = [], 0, len(body.rstrip())
    while at < end:
        value, at = STRICT.raw_decode(body, at)
        values.append(value)
        separator = _SEPARATOR.match(body, at)
        assert separator is not None
        if at < end and ";" not in separator[0]:
            raise ValueError("no semicolon between two calls")
        at = separator.end()
    return values


def parsed_call(value: Any, key: str) -> ParsedCall:
    """The call that a JSON value describes. Raises ValueError for any other value.

    Args:
        key: the name of the value's arguments.
    """
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str):
        raise ValueError("no call")
    arguments = value.get(key, {})
    if not isinstance(arguments, dict) or not _NAME.fullmatch(name):
        raise ValueError("no call")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    text.encode()  # half a character of UTF-16, which JSON can name, cannot be sent
    return ParsedCall(name, text)


_SEPARATOR = re.compile(r"\s*;?\s*")
