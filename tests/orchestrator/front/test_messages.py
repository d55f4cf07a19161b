"""Anthropic's Messages API, as the anthropic client asks for it; the verifier's model is arithmetic."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import pytest

from outrider.client import AsyncClient
from outrider.tokens import TokenTable
from tests.orchestrator.conftest import MAX_LENGTH, FakeVerifier, Front, World
from tests.orchestrator.front.sending import send
from tests.orchestrator.front.test_http_completions import HI, PLAIN, asking, expected
from tests.orchestrator.fronts import soon, write_keys


@asynccontextmanager
async def telling(
    world: World, table: TokenTable, settings: dict[str, Any] | None = None, **how: Any
) -> AsyncIterator[tuple[anthropic.AsyncAnthropic, FakeVerifier, Front]]:
    async with (
        asking(world, table, settings, **how) as (_, verifier, front),
        anthropic.AsyncAnthropic(base_url=front.http, api_key="any", max_retries=0) as client,
    ):
        yield client, verifier, front


def message(**more: Any) -> dict[str, Any]:
    return {"model": "toy", "messages": HI, "max_tokens": 6} | more


async def test_a_message_is_the_chat_completion_of_the_same_conversation(
    world: World, table: TokenTable
) -> None:
    async with asking(world, table) as (client, verifier, front):
        chat = await client.chat.completions.create(model="toy", messages=HI, max_tokens=6, seed=3)
        async with anthropic.AsyncAnthropic(base_url=front.http, api_key="any") as other:
            said = await other.messages.create(**message(extra_body={"seed": 3, "return_token_ids": True}))
    first, second = verifier.opened
    assert (first.ids, first.limit, first.sampling) == (second.ids, second.limit, second.sampling)
    assert [block.type for block in said.content] == ["text"]
    assert said.content[0].text == chat.choices[0].message.content
    assert (said.stop_reason, said.stop_sequence) == ("max_tokens", None)
    assert said.model_extra is not None
    assert said.model_extra["token_ids"] == expected(table, len(first.ids), 6)[0]
    assert (said.usage.input_tokens, said.usage.output_tokens) == (len(first.ids), 6)
    assert said._request_id


async def test_the_helper_for_streams_adds_up_the_events(world: World, table: TokenTable) -> None:
    async with (
        telling(world, table, cached=3) as (client, verifier, _),
        client.messages.stream(**message(max_tokens=12)) as stream,
    ):
        kinds = [event.type async for event in stream]
        said = await stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    prompt = len(verifier.opened[0].ids)
    assert said.content[0].type == "text"
    assert said.content[0].text == expected(table, prompt, 12)[1]
    assert said.usage.cache_read_input_tokens == 3
    assert said.usage.input_tokens == prompt - 3
    assert said.usage.output_tokens == 12


async def test_an_answer_ends_where_the_context_does(world: World, table: TokenTable) -> None:
    async with telling(world, table) as (client, verifier, _):
        said = await client.messages.create(**message(max_tokens=5_000))
    assert verifier.opened[0].limit == MAX_LENGTH
    assert said.stop_reason == "model_context_window_exceeded"


async def test_blocks_become_the_messages_of_a_conversation(world: World, table: TokenTable) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}"
        "{% for c in m.tool_calls or [] %}({{ c.function.name }}"
        "{{ c.function.arguments|tojson }}){% endfor %}|{% endfor %}"
        "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{{ enable_thinking }}"
    )
    turns: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": part} for part in "ab"]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "c", "cache_control": {"type": "ephemeral"}},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "d"}]},
                {"type": "text", "text": "e"},
            ],
        },
    ]
    tools: list[Any] = [
        {"type": "bash_20250124", "name": "bash"},
        {"name": "f", "input_schema": {"type": "object"}},
    ]
    async with telling(world, table, chat=template, max_length=256) as (client, verifier, _):
        said = await client.messages.create(
            **message(
                messages=turns,
                system=[{"type": "text", "text": "kind"}],
                tools=tools,
                thinking={"type": "enabled", "budget_tokens": 1024},
            )
        )
        counted = await client.messages.count_tokens(model="toy", messages=HI)
    text = b"".join(map(table.token_bytes, verifier.opened[0].ids)).decode()
    assert text == (  # this tokenizer drops spaces
        'system:kind|user:ab|assistant:c[hm](f{"x":1})|tool:d|user:e|fTrue'
    )
    assert said.model_extra is not None
    assert said.model_extra["skipped_tools"] == [{"index": 0, "type": "bash_20250124"}]
    assert counted.input_tokens == len("user:hi|False")


async def test_a_key_may_come_as_anthropics_clients_send_it(
    world: World, table: TokenTable, tmp_path: Path
) -> None:
    (key,) = write_keys(tmp_path / "keys", ["acme"])
    verifier = await world.verifier(tokens=table, chat=PLAIN)
    front = await world.front([verifier.address], http_bind="127.0.0.1:0", api_keys_file=tmp_path / "keys")
    async with (
        AsyncClient(front.address, api_key=key) as grpc_client,
        anthropic.AsyncAnthropic(base_url=front.http, api_key=key, max_retries=0) as client,
    ):
        await soon(grpc_client.models)
        await client.messages.create(**message(max_tokens=1))
        with pytest.raises(anthropic.AuthenticationError) as refused:
            await client.with_options(api_key="wrong").messages.create(**message())
    assert verifier.opened[0].key.tenant == "acme"
    assert refused.value.body["error"]["type"] == "authentication_error"


LOOP = {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}}
USE = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}
ANSWER = {"type": "tool_result", "tool_use_id": "2", "content": ""}
RESULT = {"role": "user", "content": [ANSWER]}
IMAGE = {"type": "image", "source": {"type": "url", "url": "x"}}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no limit": ({"max_tokens": None}, "max_tokens"),
    "a limit of nothing": ({"max_tokens": 0}, "max_tokens"),
    "an unknown field": ({"colour": "red"}, "colour"),
    "no turns": ({"messages": []}, "messages"),
    "an unknown block": ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]"),
    "an unknown role": ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
    "a block of the other role": ({"messages": [*HI, {**USE, "role": "user"}]}, "messages[1].content[0]"),
    "a result that answers nothing": (
        {"system": "x", "messages": [*HI, USE, RESULT]},
        "messages[2].content[0].tool_use_id",
    ),
    "calls without results": ({"messages": [*HI, USE]}, "messages[1]"),
    "a schema that is none": (
        {"tools": [{"type": "bash_20250124", "name": "b"}, {"name": "f", "input_schema": {"type": 5}}]},
        "tools[1].input_schema",
    ),
    "a cycle of references": (
        {"tools": [{"name": "f", "input_schema": LOOP}]},
        "tools[0].input_schema.properties.a",
    ),
    "ten thousand tools": ({"tools": [{"name": "f", "input_schema": {}}] * 10_000}, "tools"),
    "a choice of nothing": ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    "a choice of no tool": ({"tool_choice": {"type": "any"}}, "tool_choice"),
    "an effort": ({"output_config": {"effort": "high"}}, "output_config.effort"),
    "a format that is none": ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
    "an empty stop sequence": ({"stop_sequences": [""]}, "stop"),
}


async def test_a_wrong_field_is_named_in_anthropics_shape(world: World, table: TokenTable) -> None:
    async with telling(world, table) as (client, verifier, _):
        for what, (more, place) in WRONG.items():
            with pytest.raises(anthropic.BadRequestError) as refused:
                await client.messages.create(**message(extra_body=more))
            said = refused.value.body
            assert (said["type"], said["error"]["type"]) == ("error", "invalid_request_error"), what
            assert place in said["error"]["message"], what
        assert not verifier.opened
        await client.messages.create(**message(max_tokens=1))
    assert len(verifier.opened) == 1


@pytest.mark.parametrize(
    ("number", "said"),
    [
        ("NaN", "the body cannot be read: NaN is no JSON"),
        ("1e999", "messages[1].content[0].arguments is '{\"a\": Infinity}'"),
    ],
)
async def test_arguments_are_numbers_of_json(world: World, table: TokenTable, number: str, said: str) -> None:
    result = {"role": "user", "content": [{**ANSWER, "tool_use_id": "1"}]}
    body = json.dumps(message(messages=[*HI, USE, result]))
    body = body.replace('"input": {}', f'"input": {{"a": {number}}}')
    async with asking(world, table) as (_, verifier, front):
        status, answer, _ = await asyncio.to_thread(send, front.http, "/v1/messages", body.encode())
    assert (status, verifier.opened) == (400, [])
    assert said in answer["error"]["message"]


REFUSED: list[tuple[bytes, dict[str, str], int, str]] = [
    (b"[", {}, 400, "invalid_request_error"),
    (
        b'{"model": "x", "messages": [{"role": "user", "content": ""}], "max_tokens": 1}',
        {},
        404,
        "not_found_error",
    ),
    (b"{}", {"origin": "https://evil.example"}, 403, "permission_error"),
    (b" " * 5_000_000, {}, 413, "request_too_large"),
]


async def test_every_refusal_has_anthropics_shape(world: World, table: TokenTable) -> None:
    async with asking(world, table) as (_, _, front):
        for body, headers, status, kind in REFUSED:
            for path in ("/v1/messages", "/v1/messages/count_tokens"):
                sent = body.replace(b', "max_tokens": 1', b"") if path.endswith("tokens") else body
                got, said, _ = await asyncio.to_thread(send, front.http, path, sent, **headers)
                assert (got, said["type"], said["error"]["type"]) == (status, "error", kind)
