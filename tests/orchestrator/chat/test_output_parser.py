"""The output of models becomes content, reasoning and calls, however it is cut and whatever it holds."""

import json
import time
from typing import Any

import pytest

from orchestrator.front.http.chat.output_parser import OutputParser, Parsed, ParsedCall
from orchestrator.front.http.chat.plan import ChatPlan, Thought
from tests.in_time import in_time

QWEN = ChatPlan("hermes", Thought.POSSIBLE)
MISTRAL = ChatPlan("mistral")
LLAMA = ChatPlan("llama3_json")
PARIS = ParsedCall("get_weather", '{"city": "Paris"}')
ROME = ParsedCall("get_weather", '{"city": "Rome", "unit": "c"}')

# Outputs as the models' own cards and templates show them.
RECORDED: dict[str, tuple[ChatPlan, str, Parsed]] = {
    "qwen": (
        QWEN,
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        Parsed(calls=(PARIS,)),
    ),
    "qwen, thinking, with words before two calls": (
        QWEN,
        "<think>\nThe user wants <both>.\n</think>\n\nLet me look.\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "unit": "c"}}\n</tool_call>',
        Parsed("Let me look.", "The user wants <both>.", (PARIS, ROME)),
    ),
    "qwen, with empty thoughts": (QWEN, "<think>\n\n</think>\n\nHello.", Parsed("Hello.")),
    "a prompt that opened the thoughts": (
        ChatPlan(thought=Thought.OPEN),
        "Okay.\n</think>\n\nHello, <you>.\n",
        Parsed("Hello, <you>.\n", "Okay."),
    ),
    "thoughts without an end": (ChatPlan(thought=Thought.OPEN), "Okay. </thi", Parsed("", "Okay. </thi")),
    "hermes, a string with the end mark": (
        QWEN,
        '<tool_call>{"name": "f", "arguments": {"x": "\\"</tool_call>\\\\"}}</tool_call>',
        Parsed(calls=(ParsedCall("f", '{"x": "\\"</tool_call>\\\\"}'),)),
    ),
    "hermes, cut before the end mark": (
        QWEN,
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n',
        Parsed(calls=(PARIS,)),
    ),
    "mistral": (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}, '
        '{"name": "get_weather", "arguments": {"city": "Rome", "unit": "c"}}]',
        Parsed(calls=(PARIS, ROME)),
    ),
    "mistral, where the prompt has the mark": (
        ChatPlan("mistral", called=True),
        '[{"name": "get_weather", "arguments": {"city": "Paris"}}]',
        Parsed(calls=(PARIS,)),
    ),
    "llama": (LLAMA, '{"name": "get_weather", "parameters": {"city": "Paris"}}', Parsed(calls=(PARIS,))),
    "llama, two calls": (
        LLAMA,
        '{"name": "get_weather", "parameters": {"city": "Paris"}}; '
        '{"name": "get_weather", "parameters": {"city": "Rome", "unit": "c"}}',
        Parsed(calls=(PARIS, ROME)),
    ),
    "llama, an answer in words": (LLAMA, 'It is {"warm"}.\n', Parsed('It is {"warm"}.\n')),
}
IN_TEXT = [
    (QWEN, '<tool_call>\n{"name": "f", "arguments": {"a": }}\n</tool_call> then'),
    (QWEN, '<tool_call>{"name": "f", "arguments": "a"}</tool_call>'),
    (QWEN, '<tool_call>{"name": "f f", "arguments": {}}</tool_call>'),
    (QWEN, '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
    (QWEN, '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>'),
    (QWEN, '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>'),
    (QWEN, '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 9_000 + "}</tool_call>"),
    (QWEN, "<tool_call>" + "9" * 9_000 + "</tool_call>"),
    (QWEN, '  <thin <tool_ca \\ " </tool_call> <think>\n'),
    (QWEN, '<tool_call>"\\'),
    (QWEN, "  \n"),
    (MISTRAL, '[TOOL_CALLS] {"name": "f", "arguments": {}}'),
    (MISTRAL, "a [TOOL_CALLS][1, 2"),
    (ChatPlan("mistral", called=True), "[{"),
    (LLAMA, '{"name": "f", "parameters": {}} {"name": "g", "parameters": {}}'),
    (LLAMA, '{"answer": 4}\n'),
    (ChatPlan(), '<think></think><tool_call>{"name": "f", "arguments": {}}</tool_call>'),
]


def parsed(plan: ChatPlan, text: str, size: int) -> Parsed:
    parser = OutputParser(plan)
    parts = [parser.feed(text[at : at + size]) for at in range(0, len(text), size)] + [parser.finish()]
    return Parsed(
        "".join(part.content for part in parts),
        "".join(part.reasoning for part in parts),
        tuple(call for part in parts for call in part.calls),
    )


@pytest.mark.parametrize("size", [1, 2, 7, 9_999])
@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_output_is_read_however_it_is_cut(name: str, size: int) -> None:
    plan, text, expected = RECORDED[name]
    assert parsed(plan, text, size) == expected


@pytest.mark.parametrize("size", [1, 2, 9_999])
@pytest.mark.parametrize(
    ("written", "content"),
    [("\n\n yes", " yes"), ("\n\tyes\n", "\tyes\n"), (" \nyes", " \nyes"), ("\n\n\n", "\n"), ("\n", "")],
)
def test_content_in_a_client_s_format_keeps_its_white_space(size: int, written: str, content: str) -> None:
    plan = ChatPlan(thought=Thought.OPEN, preamble="start: /x/")
    assert parsed(plan, f"hm\n</think>{written}", size) == Parsed(content, "hm")
    possible = ChatPlan(thought=Thought.POSSIBLE, preamble="start: /x/")
    assert parsed(possible, f"<think>hm</think>{written}", size) == Parsed(content, "hm")
    assert parsed(possible, written, size) == Parsed(written)


@pytest.mark.parametrize("size", [1, 3, 99_999])
@pytest.mark.parametrize(("plan", "text"), IN_TEXT, ids=[text[:30] for _, text in IN_TEXT])
def test_what_is_no_call_stays_content_to_the_letter(plan: ChatPlan, text: str, size: int) -> None:
    assert parsed(plan, text, size) == Parsed(text)


def test_content_streams_until_it_may_be_a_call() -> None:
    parser = OutputParser(QWEN)
    assert [parser.feed(text).content for text in ("Let", " me <", "b> look <tool", "_box>")] == [
        "Let",
        " me",
        " <b> look",
        " <tool_box>",
    ]


@pytest.mark.parametrize(
    "unit", ['<tool_call>{"', "<tool_call></tool_call>", '"\\"', "<", " ", "<think>", "[TOOL_CALLS]", '{"a":']
)
@pytest.mark.parametrize("plan", [QWEN, MISTRAL, LLAMA])
def test_time_is_linear_in_the_output(plan: ChatPlan, unit: str) -> None:
    def seconds(count: int) -> float:
        text, best = "<tool_call>" + unit * (count // len(unit)), 9.0
        for _ in range(2):
            began = time.process_time()
            assert not parsed(plan, text, count).calls
            best = min(best, time.process_time() - began)
        return best

    in_time(seconds(80_000) < 8 * seconds(20_000) + 0.02)


def test_arguments_are_json_whatever_the_output_had(recwarn: Any) -> None:
    text = '<tool_call>{"arguments": {"é": [1.50, true, null]}, "name": "f"}</tool_call>'
    (call,) = parsed(QWEN, text, 5).calls
    assert json.loads(call.arguments) == {"é": [1.5, True, None]}
