"""Answers are parsed by the response template that a checkpoint brings, in a process of their own."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_parsing import parse_response

from orchestrator.front.http.chat.output_parser import Parsed, ParsedCall
from orchestrator.front.http.templated.known_templates import KNOWN, response_template
from orchestrator.front.http.templated.parse_order import marks_of, parse_order
from orchestrator.front.http.templated.response_parsers import MODULE, ChoiceParser, ResponseParsers
from orchestrator.front.http.templated.template_parser import TemplateParser
from outrider.tokens import ChatTemplate
from tests.orchestrator.fronts import soon
from tests.processes import own_children_running

GLM, GEMMA, QWEN = (json.loads(json.dumps(KNOWN[name])) for name in ("glm", "gemma4", "qwen_function"))
ENDLESS = {
    "start_anchor": "a:",
    "fields": {"content": {}, "tool_calls": {"open_pattern": "(?:x|xx|xxx|y?x+y?)+z", "content": "json"}},
}
TOOL = {"function": {"name": "look", "parameters": {"properties": {"days": {"type": "integer"}}}}}
PROMPT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
OSLO = "<tool_call>\n<function=look>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
LOOK = ParsedCall("look", '{"city": "Oslo"}')

RECORDED: dict[str, tuple[dict[str, Any], str, str, Parsed]] = {
    "words, then a call": (QWEN, PROMPT, f"I look.\n{OSLO}", Parsed("I look.", "", (LOOK,))),
    "thoughts that the prompt began": (
        QWEN,
        PROMPT + "<think>\n",
        f"Hm <b>.\n</think>\n\n{OSLO}\n{OSLO}",
        Parsed("", "Hm <b>.", (LOOK, LOOK)),
    ),
    "arguments of the types in the schema": (
        QWEN,
        PROMPT,
        OSLO.replace("city", "days").replace("Oslo", "3"),
        Parsed(calls=(ParsedCall("look", '{"days": 3}'),)),
    ),
    "gemma": (
        GEMMA,
        "<|turn>user\nhi<turn|>\n<|turn>model\n",
        '<|channel>thought\nHm.<channel|><|tool_call>call:look{city:<|"|>Oslo<|"|>}<tool_call|><turn|>',
        Parsed("", "Hm.", (LOOK,)),
    ),
    "glm": (
        GLM,
        "[gMASK]<sop><|user|>\nhi<|assistant|>\n",
        "<think>Hm.</think>\nI look.\n<tool_call>look\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
        "</tool_call>",
        Parsed("I look.", "Hm.", (LOOK,)),
    ),
    "text alone": (QWEN, PROMPT, "a < b\n\nc", Parsed("a < b\n\nc")),
}


def order(template: dict[str, Any], prompt: str = PROMPT, allowed: list[str] | None = None) -> str:
    return parse_order(json.dumps(template), prompt, [TOOL], allowed)


def joined(parts: list[Parsed]) -> Parsed:
    return Parsed(
        "".join(part.content for part in parts),
        "".join(part.reasoning for part in parts),
        tuple(call for part in parts for call in part.calls),
    )


def parsed(text: str, size: int, asked: str) -> Parsed:
    parser = TemplateParser(asked)
    parts = [parser.feed(text[at : at + size], last=False) for at in range(0, len(text), size)]
    return joined([*parts, parser.feed("", last=True)])


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("name", RECORDED)
def test_an_answer_is_parsed_as_transformers_parses_it_however_it_is_cut(name: str, size: int) -> None:
    template, prompt, text, expected = RECORDED[name]
    assert parsed(text, size, order(template, prompt)) == expected
    message = parse_response(text, template, prefix=prompt, tools=[TOOL])
    assert message.get("content", "") == expected.content
    assert message.get("reasoning_content", "") == expected.reasoning
    calls = [json.dumps(call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    assert calls == [call.arguments for call in expected.calls]


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ('<|tool_call>call:look{city:"Oslo}<tool_call|> Yes.', '{city:"Oslo}Yes.'),
        ("<|tool_call>call:look{city", "{city"),
        ("<|tool_call>call:other{}<tool_call|>Yes.", "{}Yes."),
        ("<|tool_call>call:look[]<tool_call|>", "[]"),
    ],
)
def test_a_call_that_cannot_be_read_or_is_not_allowed_stays_content(text: str, content: str) -> None:
    for size in (1, 1000):
        assert parsed(text, size, order(GEMMA, allowed=["look"])) == Parsed(content)


def test_what_the_prompt_has_of_an_answer_is_not_said_again() -> None:
    assert parsed(" you.", 2, order(QWEN, PROMPT + "How are")) == Parsed(" you.")


def test_a_checkpoint_s_own_template_goes_before_its_family_s() -> None:
    source = "<|im_start|> <tool_call> <function= <parameter="
    assert json.loads(response_template(ChatTemplate(source))) == QWEN
    assert response_template(ChatTemplate(source, response="{}")) == "{}"
    assert response_template(ChatTemplate("<tool_call> </tool_call> arguments")) == ""


def test_marks_are_found_in_literals_and_patterns() -> None:
    marks = marks_of(json.dumps(GEMMA))
    assert all(mark in marks for mark in ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>"))
    assert "<pad>" not in marks


@pytest.fixture
async def parsers() -> AsyncIterator[ResponseParsers]:
    made = ResponseParsers()
    yield made
    await made.stop()
    assert not workers()


def workers() -> list[int]:
    """Process ids of the parsers among the children of this process."""
    return own_children_running(MODULE)


def about(pid: int, what: str) -> str:
    return Path(f"/proc/{pid}/{what}").read_text()


async def fed(parser: ChoiceParser, *texts: str) -> Parsed:
    return joined([await parser.feed(text, last=text == texts[-1]) for text in texts])


async def test_the_process_has_no_torch_and_parses_several_choices_at_once(parsers: ResponseParsers) -> None:
    halves = [(text[:9], text[9:]) for _, _, text, _ in RECORDED.values()]
    choices = [parsers.parser(order(template, prompt)) for template, prompt, _, _ in RECORDED.values()]
    found = await asyncio.gather(*map(lambda it, texts: fed(it, *texts), choices, halves))
    assert found == [expected for *_, expected in RECORDED.values()]
    (pid,) = workers()
    assert "libtorch" not in about(pid, "maps")
    assert "HOME=" not in about(pid, "environ")


async def test_a_killed_process_loses_no_text_and_no_call(parsers: ResponseParsers) -> None:
    one = parsers.parser(order(QWEN))
    first = [await one.feed(f"I look.\n{OSLO[:40]}", last=False)]
    process = await parsers.process()
    os.kill(workers()[0], signal.SIGKILL)

    async def noticed() -> bool:
        return not process.usable

    await soon(noticed)
    first.append(await one.feed(OSLO[40:] + " Yes.", last=True))
    assert joined(first) == Parsed("I look.Yes.", "", (LOOK,))


async def test_a_choice_whose_client_leaves_amid_the_first_piece_is_forgotten(
    parsers: ResponseParsers,
) -> None:
    process, told, is_told = await parsers.process(), list[dict[str, Any]](), asyncio.Event()
    tell = process.tell

    def record(message: dict[str, Any]) -> None:
        told.append(message)
        tell(message)
        is_told.set()

    process.tell = record  # type: ignore[method-assign]
    one = parsers.parser(order(QWEN))
    feeding = asyncio.create_task(one.feed("I look.", last=False))
    await is_told.wait()
    feeding.cancel()
    await asyncio.gather(feeding, return_exceptions=True)
    one.close()
    assert [message.get("text") for message in told] == ["I look.", None]
    assert await fed(parsers.parser(order(QWEN)), "x", "y") == Parsed("xy")


async def test_a_template_that_transformers_refuses_leaves_text(parsers: ResponseParsers) -> None:
    broken = parsers.parser(order({"fields": {"content": {}}}))
    assert await fed(broken, "<think>", "x") == Parsed("<think>x")


@pytest.mark.slow
async def test_a_pattern_that_never_ends_costs_its_own_choice_alone(parsers: ResponseParsers) -> None:
    good, bad = parsers.parser(order(QWEN)), parsers.parser(order(ENDLESS, "a:"))
    said = await good.feed("I look.", last=False)
    endless, rest = await asyncio.gather(fed(bad, "x" * 4000, "!z"), good.feed(f"\n{OSLO}", last=True))
    assert endless == Parsed("x" * 4000 + "!z")
    assert joined([said, rest]) == Parsed("I look.", "", (LOOK,))
