"""Scenarios of agents with the openai client: calls that are required, named, streamed and answered.

Importing this module adds its scenarios to those of `openai_scenarios`.
"""

import json
from typing import Any

import openai

from benchmarks.http.openai_scenarios import HI, Steps, chat, refused, scenario

PARAMETERS = {
    "type": "object",
    "properties": {"digit": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["digit"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("warm", "cold")
]
NAMED = {"type": "function", "function": {"name": "cold"}}
PLAIN = {"speculation": {"enabled": False}, "return_token_ids": True}
DRAFTED = {"return_token_ids": True}


def _checked(call: Any) -> str:
    """The name of a call whose arguments its schema allows."""
    arguments = json.loads(call.function.arguments)
    assert list(arguments) == ["digit"]
    assert 0 <= arguments["digit"] <= 9
    return str(call.function.name)


@scenario
def a_required_call_is_made_and_answered_turn_after_turn(model: str) -> Steps:
    messages: list[Any] = list(HI)
    for _ in range(2):
        answer = yield chat(
            model,
            messages=messages,
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=200,
        )
        (choice,) = answer.choices
        (call,) = choice.message.tool_calls
        assert _checked(call) in ("warm", "cold")
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "21"}]
    last = yield chat(model, messages=messages, tools=TOOLS, tool_choice="none")
    assert last.choices[0].message.tool_calls is None


@scenario
def what_the_client_parsed_of_an_answer_may_come_back(model: str) -> Steps:
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    asked: dict[str, Any] = {"tools": strict, "tool_choice": NAMED, "max_tokens": 200}
    answer = yield chat(model, "chat.completions.parse", **asked)
    message = answer.choices[0].message
    (call,) = message.tool_calls
    assert list(call.function.parsed_arguments) == ["digit"]
    messages = [*HI, message, {"role": "tool", "tool_call_id": call.id, "content": "21"}]
    again = yield chat(model, messages=messages)
    assert again.choices[0].message.content


@scenario
def a_named_call_has_the_same_ids_with_and_without_drafts(model: str) -> Steps:
    for temperature in (0.0, 1.0):
        said = []
        for extra in (PLAIN, DRAFTED):
            answer = yield chat(
                model,
                tools=TOOLS,
                tool_choice=NAMED,
                max_tokens=200,
                temperature=temperature,
                seed=5,
                extra_body=extra,
            )
            (choice,) = answer.choices
            (call,) = choice.message.tool_calls
            assert _checked(call) == "cold"
            assert choice.finish_reason == "stop"
            said.append(choice.model_extra["token_ids"])
        assert said[0] == said[1]


@scenario
def a_required_call_is_of_an_allowed_tool_with_and_without_drafts(model: str) -> Steps:
    said = []
    for extra in (PLAIN, DRAFTED):
        answer = yield chat(
            model,
            tools=TOOLS,
            tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}},
            parallel_tool_calls=False,
            max_tokens=200,
            seed=7,
            extra_body=extra,
        )
        (choice,) = answer.choices
        (call,) = choice.message.tool_calls
        assert _checked(call) == "cold"
        assert choice.finish_reason == "tool_calls"
        said.append(choice.model_extra["token_ids"])
    assert said[0] == said[1]


@scenario
def a_streamed_call_is_the_whole_one(model: str) -> Steps:
    how: dict[str, Any] = {
        "tools": TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 200,
    }
    whole = yield chat(model, **how)
    (call,) = whole.choices[0].message.tool_calls
    events = yield chat(model, stream=True, **how)
    deltas = [delta for e in events for c in e.choices for delta in c.delta.tool_calls or []]
    assert [delta.index for delta in deltas] == [0]
    assert deltas[0].function.name == call.function.name
    assert deltas[0].function.arguments == call.function.arguments
    assert "".join(c.delta.content or "" for e in events for c in e.choices) == ""
    assert [c.finish_reason for e in events for c in e.choices][-1] == "tool_calls"


@scenario
def tools_may_be_left_alone(model: str) -> Steps:
    answer = yield chat(model, tools=TOOLS, temperature=0)
    assert answer.choices[0].message.content is not None
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason in ("stop", "length")


@scenario
def a_schema_that_is_none_is_refused(model: str) -> Steps:
    loop: dict[str, Any] = {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": loop}}
    error = yield chat(model, tools=[tool])
    refused(error, openai.BadRequestError, "tools[0].function.parameters.properties.a")


@scenario
def the_last_message_can_be_continued(model: str) -> Steps:
    messages = [*HI, {"role": "assistant", "content": "def add"}]
    answer = yield chat(model, messages=messages, extra_body={"continue_final_message": True})
    assert answer.choices[0].message.content
    as_for_vllm = {"continue_final_message": True, "add_generation_prompt": False}
    same = yield chat(model, messages=messages, extra_body=as_for_vllm)
    assert same.choices[0].message.content == answer.choices[0].message.content
