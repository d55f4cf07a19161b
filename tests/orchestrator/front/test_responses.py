"""OpenAI's Responses API, as the openai client asks for it; the verifier's model is arithmetic."""

from typing import Any

import openai
import pytest

from outrider.tokens import TokenTable
from tests.orchestrator.conftest import World
from tests.orchestrator.front.test_http_completions import HI, asking, expected


async def test_a_response_is_the_chat_completion_of_the_same_conversation(
    world: World, table: TokenTable
) -> None:
    async with asking(world, table) as (client, verifier, _):
        said = await client.responses.create(
            model="toy", input="hi", max_output_tokens=6, extra_body={"seed": 3, "return_token_ids": True}
        )
        chat = await client.chat.completions.create(model="toy", messages=HI, max_tokens=6, seed=3)
    first, second = verifier.opened
    assert (first.ids, first.limit, first.sampling) == (second.ids, second.limit, second.sampling)
    assert said.output_text == chat.choices[0].message.content
    assert said.status == "incomplete"
    assert said.incomplete_details is not None
    assert said.incomplete_details.reason == "max_output_tokens"
    assert said.model_extra is not None
    assert said.model_extra["token_ids"] == expected(table, len(first.ids), 6)[0]
    assert said.usage is not None
    assert (said.usage.input_tokens, said.usage.output_tokens) == (len(first.ids), 6)


async def test_the_answer_repeats_which_functions_were_allowed(world: World, table: TokenTable) -> None:
    f, g = ({"type": "function", "name": name} for name in "fg")
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [f]}
    async with asking(world, table) as (client, _, _):
        said = await client.responses.create(
            model="toy", input="hi", max_output_tokens=1, extra_body={"tools": [f, g], "tool_choice": choice}
        )
    assert said.model_dump(mode="json")["tool_choice"] == choice


async def test_events_are_typed_and_numbered_and_end_in_the_whole_response(
    world: World, table: TokenTable
) -> None:
    async with asking(world, table) as (client, verifier, _):
        stream = await client.responses.create(model="toy", input="hi", max_output_tokens=12, stream=True)
        events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert isinstance(events[-1], openai.types.responses.ResponseIncompleteEvent)
    assert events[-1].response.output_text == text == expected(table, len(verifier.opened[0].ids), 12)[1]


async def test_items_become_the_messages_of_a_conversation(world: World, table: TokenTable) -> None:
    turns = "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    template = (
        turns + "{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}"
        "{% for c in m.tool_calls or [] %}({{ c.function.name }}"
        "{{ c.function.arguments|tojson }}){% endfor %}"
        "|{% endfor %}{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    )
    items: list[Any] = [
        {"role": "developer", "content": "be kind"},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
        },
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [{"type": "output_text", "text": "c", "annotations": []}],
        },
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"x": 1}'},
        {"type": "function_call", "call_id": "2", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "d"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "e"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "cut"}]},
    ]
    tools: list[Any] = [{"type": "web_search"}, {"type": "function", "name": "f", "parameters": {}}]
    async with asking(world, table, chat=template, max_length=256) as (client, verifier, _):
        said = await client.responses.create(
            model="toy",
            instructions="be brief",
            input=items,
            tools=tools,
            max_output_tokens=1,
            store=False,
            include=["reasoning.encrypted_content"],
        )
    text = b"".join(map(table.token_bytes, verifier.opened[0].ids)).decode()
    assert text == (  # this tokenizer drops spaces
        'system:bebriefbekind|user:ab|assistant:c[hm](f{"x":1})(f{})|tool:d|tool:e|assistant:[cut]|f'
    )
    assert said.model_extra is not None
    assert said.model_extra["skipped_tools"] == [{"index": 0, "type": "web_search"}]
    assert [tool.type for tool in said.tools] == ["function"]


async def test_an_item_of_type_null_is_a_message(world: World, table: TokenTable) -> None:
    items: list[Any] = [{"role": "user", "content": "hi", "type": None}]
    async with asking(world, table) as (client, verifier, _):
        await client.responses.create(model="toy", input=items, max_output_tokens=1)
    assert list(verifier.opened[0].ids) == table.encode("user:hi|a:")


LOOP = {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}}
F = {"type": "function", "name": "f"}
CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a state": ({"previous_response_id": "resp_1"}, "previous_response_id"),
    "a conversation": ({"conversation": "conv_1"}, "conversation"),
    "a background": ({"background": True}, "background"),
    "a truncation": ({"truncation": "auto"}, "truncation"),
    "log-probabilities": ({"include": ["message.output_text.logprobs"]}, "include"),
    "an unknown field": ({"colour": "red"}, "colour"),
    "a field of chat": ({"messages": []}, "messages"),
    "an unknown item": (
        {"input": [{"role": "user", "content": "a"}, {"type": "item_reference"}]},
        "input[1]",
    ),
    "an unknown part": (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0]",
    ),
    "an unknown role": ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role"),
    "no input": ({"input": []}, "input"),
    "an input of empty reasoning alone": ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
    "a number that JSON does not have": (
        {"input": [{"role": "user", "content": "a"}, {**CALL, "arguments": '{"x": NaN}'}]},
        "input[1].arguments",
    ),
    "allowed tools that are none": (
        {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}},
        "tool_choice.tools[0].type",
    ),
    "allowed tools that there are not": (
        {
            "tools": [F],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{**F, "name": "g"}]},
        },
        "tool_choice",
    ),
    "arguments that do not parse": (
        {"instructions": "x", "input": [{"role": "user", "content": "a"}, {**CALL, "arguments": "{"}]},
        "input[1].arguments",
    ),
    "an output that answers nothing": (
        {"input": [CALL, {"type": "function_call_output", "call_id": "2", "output": ""}]},
        "input[1].call_id",
    ),
    "a schema that is none": (
        {"tools": [{"type": "x"}, {"type": "function", "name": "f", "parameters": {"type": 5}}]},
        "tools[1].parameters",
    ),
    "a cycle of references": (
        {"tools": [{"type": "function", "name": "f", "parameters": LOOP}]},
        "tools[0].parameters.properties.a",
    ),
    "ten thousand tools": ({"tools": [{"type": "function", "name": "f"}] * 10_000}, "tools"),
    "a tool without a type": ({"tools": [{"name": "f"}]}, "tools[0]"),
    "a choice that is none": ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
    "a choice of no tool": ({"tool_choice": "required"}, "tool_choice"),
    "a format that is none": ({"text": {"format": {"type": "xml"}}}, "text.format"),
    "an effort": ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
    "too many tokens": ({"max_output_tokens": 100_000}, "max_output_tokens"),
    "a stop string that is empty": ({"stop": ""}, "stop"),
}


async def test_a_wrong_field_is_named_as_the_body_has_it(world: World, table: TokenTable) -> None:
    async with asking(world, table) as (client, verifier, _):
        for what, (more, param) in WRONG.items():
            with pytest.raises(openai.BadRequestError) as refused:
                await client.responses.create(**{"model": "toy", "input": "hi", "extra_body": more})
            assert refused.value.param == param, (what, refused.value)
            assert "messages[" not in str(refused.value), what
        assert not verifier.opened
        said = await client.responses.create(model="toy", input="hi", max_output_tokens=1)
    assert said.output_text
    assert len(verifier.opened) == 1
