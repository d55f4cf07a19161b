"""The HTTP front's other paths: models, tokens, health, its own description."""

import asyncio
import json
import time
from typing import Any

import pytest

import outrider
from outrider.tokens import TokenTable
from tests.orchestrator.conftest import MAX_LENGTH, World
from tests.orchestrator.front.sending import send
from tests.orchestrator.front.test_http_abuse import raw
from tests.orchestrator.front.test_http_completions import HI, asking


async def test_models_are_listed_and_told_one_by_one(world: World, table: TokenTable) -> None:
    began = int(time.time())
    async with asking(world, table, model="folder/toy") as (client, _, _):
        listed = [model.id async for model in client.models.list()]
        one = await client.models.retrieve("folder/toy")
    assert listed == ["folder/toy"]
    assert (one.object, one.owned_by) == ("model", "outrider")
    assert began <= one.created <= time.time()
    more = one.model_extra or {}
    assert (more["max_model_len"], more["sampling_defaults"]) == (MAX_LENGTH, {})


@pytest.mark.parametrize(
    ("how", "parses"),
    [
        ({"chat": ""}, False),
        ({"chat": "{{ messages | length }}"}, False),
        ({"chat": "{{ messages | length }}{# <think></think> #}"}, True),
        ({"chat": "{{ messages | length }}", "response": '{"fields": {"content": {}}}'}, True),
    ],
)
async def test_a_model_says_whether_answers_to_conversations_are_more_than_text(
    world: World, table: TokenTable, how: dict[str, str], parses: bool
) -> None:
    async with asking(world, table, **how) as (client, _, _):
        (model,) = [model async for model in client.models.list()]
    assert (model.model_extra or {})["parses_chat"] is parses


async def test_text_becomes_ids_and_ids_text(world: World, table: TokenTable) -> None:
    async def post(path: str, **body: Any) -> dict[str, Any]:
        status, said, _ = await asyncio.to_thread(send, front.http, path, json.dumps(body).encode())
        assert status == 200, said
        return said

    async with asking(world, table) as (_, _, front):
        tokenized = await post("/tokenize", model="toy", prompt="abc", return_token_strs=True)
        chat = await post("/tokenize", messages=HI, add_generation_prompt=False)
        back = await post("/detokenize", model="toy", tokens=tokenized["tokens"])
    assert tokenized["tokens"] == table.encode("abc")
    assert (tokenized["count"], tokenized["max_model_len"], tokenized["token_strs"]) == (
        3,
        MAX_LENGTH,
        ["a", "b", "c"],
    )
    assert chat["tokens"] == table.encode("user:hi|")
    assert back == {"prompt": "abc"}


async def test_ids_beyond_the_vocabulary_have_no_text(world: World, table: TokenTable) -> None:
    body = json.dumps({"tokens": [5, 96]}).encode()
    async with asking(world, table) as (_, _, front):
        status, said, _ = await asyncio.to_thread(send, front.http, "/detokenize", body)
    assert (status, said["error"]["param"]) == (400, "tokens[1]")
    assert said["error"]["message"] == "tokens[1] is 96; ids are below 96"


async def test_health_and_version_are_reported(world: World, table: TokenTable) -> None:
    async with asking(world, table) as (_, _, front):
        health = await asyncio.to_thread(send, front.http, "/health", b"", "GET")
        version = await asyncio.to_thread(send, front.http, "/version", b"", "GET")
    assert health[:2] == (200, {"status": "ok"})
    assert version[:2] == (200, {"version": outrider.__version__})


async def test_the_description_knows_no_422(world: World, table: TokenTable) -> None:
    async with asking(world, table) as (_, _, front):
        status, said, _ = await asyncio.to_thread(send, front.http, "/openapi.json", b"", "GET")
    assert status == 200
    assert "422" not in json.dumps(said)
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize"} <= set(said["paths"])
    assert "ValidationError" not in json.dumps(said)


async def test_what_leaves_the_front_is_no_more_than_asked_for(world: World, table: TokenTable) -> None:
    body = json.dumps({"prompt": "abc", "max_tokens": 2}).encode()
    async with asking(world, table) as (_, _, front):
        status, said, headers = await asyncio.to_thread(
            send, front.http, "/v1/completions", body, authorization="Bearer x", **{"x-request-id": "a\tb"}
        )
    assert status == 200
    assert "server" not in headers
    assert set(said) == {"id", "object", "created", "model", "seed", "choices", "usage"}


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/nothing", "/v1/completions"])
async def test_head_is_answered_as_get_without_the_body(world: World, table: TokenTable, path: str) -> None:
    def asked(method: str) -> bytes:
        return f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode()

    async with asking(world, table) as (_, _, front):
        (get_head, _, get_body), (head, _, body) = [
            (await raw(front.http, asked(method))).partition(b"\r\n\r\n") for method in ("GET", "HEAD")
        ]
    assert get_body
    assert not body
    assert head.splitlines()[0] == get_head.splitlines()[0]
    assert f"content-length: {len(get_body)}".encode() in head
