"""Scenarios of programs that use the Messages API with the anthropic client.

`openai_scenarios` plays these, too, if it gets MESSAGE_SCENARIOS.
"""

from collections.abc import Callable
from functools import reduce
from typing import Any

import anthropic

from benchmarks.http.openai_scenarios import ERRORS, Call, Scenario, Steps
from benchmarks.http.tool_scenarios import DRAFTED, PARAMETERS, PLAIN

ERRORS.append(anthropic.AnthropicError)
MESSAGE_SCENARIOS: dict[str, Scenario] = {}
"""All scenarios of the Messages API by name; each takes the model's name."""
TOOLS: list[Any] = [{"name": name, "input_schema": PARAMETERS} for name in ("warm", "cold")]
ANY = {"type": "any", "disable_parallel_tool_use": True}
SCHEMA = {
    "type": "object",
    "properties": {"verdict": {"enum": ["yes", "no"]}},
    "required": ["verdict"],
    "additionalProperties": False,
}


def scenario(function: Callable[[str], Steps]) -> Scenario:
    """Adds a scenario to MESSAGE_SCENARIOS."""
    MESSAGE_SCENARIOS[function.__name__] = function
    return function


def say(model: str, path: str = "messages.create", **more: Any) -> Call:
    """A call for a message, greedy and of 16 tokens unless `more` says otherwise."""
    turns = [{"role": "user", "content": "hi"}]
    greedy: dict[str, Any] = {"extra_body": {"temperature": 0}}
    arguments = {"model": model, "messages": turns, "max_tokens": 16} | greedy | more
    return Call(path, arguments)


def collected(events: list[Any]) -> Any:
    """The message that a stream's events make, as the client's own helper adds them up."""
    message = events[0].message
    blocks: list[Any] = []
    for event in events:
        if event.type == "content_block_start":
            blocks.append([event.content_block.type, ""])
        elif event.type == "content_block_delta":
            names = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
            blocks[-1][1] += reduce(getattr, [names[event.delta.type]], event.delta)
    return message, blocks


@scenario
def a_message_goes_on_turn_after_turn(model: str) -> Steps:
    turns: list[Any] = [{"role": "user", "content": "hi"}]
    for _ in range(3):
        answer = yield say(model, messages=turns, system="Be brief.")
        assert answer.stop_reason in ("end_turn", "max_tokens")
        assert 0 < answer.usage.output_tokens <= 16
        turns += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": "go on"}]


@scenario
def a_streamed_message_is_the_whole_one(model: str) -> Steps:
    whole = yield say(model)
    events = yield say(model, stream=True)
    assert events[0].type == "message_start"
    assert [event.type for event in events[-2:]] == ["message_delta", "message_stop"]
    _, blocks = collected(events)
    assert blocks == [["text", whole.content[0].text]]
    assert events[-2].delta.stop_reason == whole.stop_reason
    assert events[-2].usage.output_tokens == whole.usage.output_tokens


@scenario
def a_message_has_the_same_ids_with_and_without_drafts(model: str) -> Steps:
    hows: list[dict[str, Any]] = [
        {},
        {"tools": TOOLS, "tool_choice": ANY, "max_tokens": 200},
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}, "max_tokens": 200},
        {"stop_sequences": ["e"], "max_tokens": 100},
    ]
    for how in hows:
        said = []
        for extra in (PLAIN, DRAFTED):
            body = extra | {"seed": 5, "temperature": 1.0}
            answer = yield say(model, extra_body=body, **how)
            said.append(answer.model_extra["token_ids"])
            events = yield say(model, extra_body=body, stream=True, **how)
            said.append(events[-2].model_extra["token_ids"])
        assert said[0]
        assert all(ids == said[0] for ids in said)


@scenario
def the_stop_sequence_that_ended_a_message_is_named(model: str) -> Steps:
    whole = yield say(model, max_tokens=40)
    text = whole.content[0].text
    stop = text[5:8]
    answer = yield say(model, max_tokens=40, stop_sequences=["no such text", stop])
    assert answer.content[0].text == text[: text.index(stop)]
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)


@scenario
def a_tool_is_used_and_its_result_read(model: str) -> Steps:
    turns: list[Any] = [{"role": "user", "content": "hi"}]
    how: dict[str, Any] = {"tools": TOOLS, "max_tokens": 200}
    answer = yield say(model, messages=turns, tool_choice=ANY, **how)
    (used,) = answer.content
    assert (used.type, answer.stop_reason) == ("tool_use", "tool_use")
    assert 0 <= used.input["digit"] <= 9
    result = {"type": "tool_result", "tool_use_id": used.id, "content": "21"}
    turns += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    named = {"type": "tool", "name": "cold"}
    events = yield say(model, messages=turns, tool_choice=named, stream=True, **how)
    starts = [event.content_block for event in events if event.type == "content_block_start"]
    assert [block.name for block in starts] == ["cold"]
    search = {"type": "web_search_20250305", "name": "web_search"}
    last = yield say(model, messages=turns, tool_choice={"type": "none"}, tools=[*TOOLS, search])
    assert last.content[0].text
    assert last.model_extra["skipped_tools"] == [{"index": 2, "type": "web_search_20250305"}]


@scenario
def tokens_are_counted_as_a_message_counts_them(model: str) -> Steps:
    how: dict[str, Any] = {"tools": TOOLS, "system": "Be brief."}
    answer = yield say(model, **how)
    counted = yield Call(
        "messages.count_tokens", {"model": model, "messages": [{"role": "user", "content": "hi"}], **how}
    )
    assert counted.input_tokens == answer.usage.input_tokens + answer.usage.cache_read_input_tokens


@scenario
def a_turn_of_the_assistant_is_gone_on_with(model: str) -> Steps:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "def add"}]
    answer = yield say(model, messages=turns)
    assert answer.content[0].text


@scenario
def a_wrong_message_is_refused(model: str) -> Steps:
    loop = {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}}
    error = yield say(model, tools=[{"name": "f", "input_schema": loop}])
    assert isinstance(error, anthropic.BadRequestError)
    body: Any = error.body
    assert body["error"]["type"] == "invalid_request_error"
    assert "tools[0].input_schema.properties.a" in body["error"]["message"]
    error = yield say("nobody")
    assert isinstance(error, anthropic.NotFoundError)
