"""Scenarios of programs that use the Responses API with the openai client.

Importing this module adds its scenarios to those of `openai_scenarios`.
"""

import json
from typing import Any, Literal

import openai
from pydantic import BaseModel

from benchmarks.http.openai_scenarios import Call, Steps, refused, scenario
from benchmarks.http.tool_scenarios import DRAFTED, PARAMETERS, PLAIN

TOOLS: list[Any] = [
    {"type": "function", "name": name, "parameters": PARAMETERS, "strict": True} for name in ("warm", "cold")
]
NAMED = {"type": "function", "name": "cold"}


class YesOrNo(BaseModel):
    """What the structured output is."""

    verdict: Literal["yes", "no"]


FORMAT = {"type": "json_schema", "name": "verdict", "schema": YesOrNo.model_json_schema()}


def respond(model: str, path: str = "responses.create", **more: Any) -> Call:
    """A call for a response, greedy and of 16 tokens unless `more` says otherwise."""
    return Call(path, {"model": model, "input": "hi", "max_output_tokens": 16, "temperature": 0} | more)


@scenario
def a_response_goes_on_turn_after_turn(model: str) -> Steps:
    turns: list[Any] = [{"role": "user", "content": "hi"}]
    for _ in range(3):
        answer = yield respond(model, instructions="Be brief.", input=turns, store=False)
        assert answer.output_text
        assert 0 < answer.usage.output_tokens <= 16
        assert (answer.status == "incomplete") == (answer.incomplete_details is not None)
        turns += answer.output
        turns.append({"role": "user", "content": "go on"})


@scenario
def a_streamed_response_is_the_whole_one(model: str) -> Steps:
    whole = yield respond(model)
    events = yield respond(model, stream=True)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == events[-1].response.output_text
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens


@scenario
def the_helper_for_streams_collects_a_response(model: str) -> Steps:
    how: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    kinds, final = yield respond(model, "responses.stream", max_output_tokens=200, **how)
    assert kinds[-1] == "response.completed"
    (call,) = final.output
    assert 0 <= call.parsed_arguments["digit"] <= 9


@scenario
def a_response_has_the_same_ids_with_and_without_drafts(model: str) -> Steps:
    hows: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0},
        {"tools": TOOLS, "tool_choice": "required", "max_output_tokens": 200},
        {"text": {"format": FORMAT}, "temperature": 1.0, "max_output_tokens": 200},
    ]
    for how in hows:
        said = []
        for extra in (PLAIN, DRAFTED):
            answer = yield respond(model, extra_body=extra | {"seed": 5}, **how)
            said.append(answer.model_extra["token_ids"])
            events = yield respond(model, extra_body=extra | {"seed": 5}, stream=True, **how)
            said.append(events[-1].response.model_extra["token_ids"])
        assert said[0]
        assert all(ids == said[0] for ids in said)


@scenario
def a_response_calls_a_function_and_reads_its_output(model: str) -> Steps:
    turns: list[Any] = [{"role": "user", "content": "hi"}]
    how: dict[str, Any] = {"tools": TOOLS, "tool_choice": NAMED, "max_output_tokens": 200}
    answer = yield respond(model, input=turns, **how)
    (call,) = answer.output
    assert (call.type, call.name, call.status) == ("function_call", "cold", "completed")
    assert list(json.loads(call.arguments)) == ["digit"]
    turns += [*answer.output, {"type": "function_call_output", "call_id": call.call_id, "output": "21"}]
    events = yield respond(model, input=turns, stream=True, **how)
    kinds = [event.type for event in events]
    assert kinds.count("response.function_call_arguments.done") == 1
    last = yield respond(model, input=turns, tools=[*TOOLS, {"type": "web_search"}], tool_choice="none")
    assert last.output_text
    assert last.model_extra["skipped_tools"] == [{"index": 2, "type": "web_search"}]


@scenario
def a_response_can_be_parsed(model: str) -> Steps:
    answer = yield respond(model, "responses.parse", text_format=YesOrNo, max_output_tokens=200)
    assert answer.output_parsed.verdict in ("yes", "no")


@scenario
def a_response_of_a_state_is_refused(model: str) -> Steps:
    error = yield respond(model, previous_response_id="resp_1")
    refused(error, openai.BadRequestError, "previous_response_id")
    error = yield respond(model, text={"format": FORMAT | {"schema": {"type": 5}}})
    refused(error, openai.BadRequestError, "text.format")


@scenario
def a_stream_of_a_response_can_be_left(model: str) -> Steps:
    left = yield Call("responses.create", {"model": model, "input": "hi", "stream": True}, leave_after=6)
    assert len(left) == 6
