"""What else a body over HTTP may ask, and what a stream survives."""

from typing import Any

import openai
import pytest

from outrider.tokens import TokenTable
from outrider.v1 import common_pb2
from outrider.wire.incoming.request_fields import REQUEST_FIELDS
from speculative.errors import InvalidRequest
from tests.orchestrator.conftest import World
from tests.orchestrator.front.test_http_completions import HI, PLAIN, asking, expected

OPENED = "{{ messages | length }}<think>{# </think> #}"
MARKED = "{{ messages | length }}{# <think></think> #}"
OLDER = tuple(field for field in REQUEST_FIELDS if field != "grammar.preamble")
PARTS = [{"type": "text", "text": "de"}, {"type": "text", "text": "f"}]


@pytest.mark.parametrize(("content", "text"), [("def", "def"), (PARTS, "de\nf")])
async def test_a_prediction_becomes_a_source(
    world: World, table: TokenTable, content: Any, text: str
) -> None:
    async with asking(world, table) as (client, verifier, _):
        await client.chat.completions.create(
            model="toy", messages=HI, max_tokens=2, prediction={"type": "content", "content": content}
        )
        await client.chat.completions.create(model="toy", messages=HI, max_tokens=2)
    predicted, without = verifier.opened
    assert list(predicted.prediction) == table.encode(text)
    assert [source.name for source in predicted.sources] == ["lookup", "prediction"]
    assert [source.name for source in without.sources] == ["lookup"]


async def test_a_prediction_may_be_the_only_source(world: World, table: TokenTable) -> None:
    async with asking(world, table) as (client, verifier, _):
        await client.completions.create(
            model="toy",
            prompt="abc",
            max_tokens=2,
            n=2,
            extra_body={
                "prediction": {"type": "content", "content": "def"},
                "speculation": {"sources": ["prediction"]},
            },
        )
    assert [[source.name for source in opened.sources] for opened in verifier.opened] == [["prediction"]] * 2
    assert all(list(opened.prediction) == table.encode("def") for opened in verifier.opened)


async def test_without_speculation_a_prediction_goes_nowhere(world: World, table: TokenTable) -> None:
    async with asking(world, table) as (client, verifier, front):
        await client.completions.create(
            model="toy",
            prompt="abc",
            max_tokens=2,
            extra_body={
                "prediction": {"type": "content", "content": "def"},
                "speculation": {"enabled": False},
            },
        )
        await front.client.generate("abc", max_tokens=2, prediction="de")
    plain, over_grpc = verifier.opened
    assert (list(plain.prediction), list(plain.sources)) == ([], [])
    assert list(over_grpc.prediction) == table.encode("de")


async def test_what_may_be_learnt_and_drawn_on_reaches_the_verifier(world: World, table: TokenTable) -> None:
    async with asking(world, table) as (client, verifier, _):
        for speculation in ({"learn": False, "corpora": ["code", "docs"]}, {}):
            await client.completions.create(
                model="toy", prompt="abc", max_tokens=1, extra_body={"speculation": speculation}
            )
    assert [(m.learn, list(m.corpora)) for m in verifier.opened] == [(False, ["code", "docs"]), (True, [])]


FORMS: list[tuple[dict[str, Any], str, Any]] = [
    ({"regex": "a+"}, "regex", "a+"),
    ({"json": {"type": "object"}}, "json_schema", '{"type": "object"}'),
    ({"json": '{"type": "object"}'}, "json_schema", '{"type": "object"}'),
    ({"json_object": True}, "json_object", True),
    ({"choice": ["yes", "no"]}, "choice", common_pb2.AllowedTexts(texts=["yes", "no"])),
    ({"grammar": "start: /a+/"}, "lark", "start: /a+/"),
]


@pytest.mark.parametrize(("form", "kind", "value"), FORMS)
async def test_forms_that_vllm_names_reach_the_verifier(
    world: World, table: TokenTable, form: dict[str, Any], kind: str, value: Any
) -> None:
    async with asking(world, table) as (client, verifier, _):
        await client.completions.create(
            model="toy", prompt="abc", max_tokens=1, extra_body={"structured_outputs": form}
        )
    grammar = verifier.opened[0].grammar
    assert (grammar.WhichOneof("kind"), getattr(grammar, kind)) == (kind, value)


@pytest.mark.parametrize("field", ["response_format", "structured_outputs"])
async def test_a_schema_that_a_verifier_refuses_is_named_as_the_body_names_it(
    world: World, table: TokenTable, field: str
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
    body = {field: form if field == "response_format" else {"json": {}}}
    refusal = InvalidRequest("json_schema cannot be used: uniqueItems is not possible")
    async with asking(world, table, refusal=refusal) as (client, _, _):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="uniqueItems") as refused:
                await client.completions.create(model="toy", prompt="abc", stream=stream, extra_body=body)
            assert refused.value.param == field


@pytest.mark.parametrize(
    "body", [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"regex": "a"}}]
)
async def test_a_preamble_that_a_verifier_refuses_is_named_by_the_format_behind_it(
    world: World, table: TokenTable, body: dict[str, Any]
) -> None:
    refusal = InvalidRequest("preamble has <[7]>, but 7 is no special token")
    async with asking(world, table, chat=OPENED, refusal=refusal) as (client, _, _):
        with pytest.raises(openai.BadRequestError, match=r"reasoning before the format.*<\[7\]>") as refused:
            await client.chat.completions.create(model="toy", messages=HI, extra_body=body)
    assert [refused.value.param] == list(body)


async def test_only_a_stream_gets_a_message_a_round(world: World, table: TokenTable) -> None:
    async with asking(world, table) as (client, verifier, _):
        for stream in (False, True):
            answer: Any = await client.completions.create(
                model="toy", prompt="abc", max_tokens=20, stream=stream
            )
            if stream:
                assert len([event async for event in answer]) > 5
    assert verifier.intervals_ms == [200, 0]


@pytest.mark.parametrize("kind", ["completions", "chat"])
async def test_a_stream_goes_on_where_its_verifier_is_lost(
    world: World, table: TokenTable, kind: str
) -> None:
    how = {"tokens": table, "chat": PLAIN, "per_tick": 1, "tick_s": 0.01}
    verifiers = [await world.verifier(**how) for _ in range(2)]
    front = await world.front([verifier.address for verifier in verifiers], http_bind="127.0.0.1:0")
    await world.ready(front)
    for verifier in verifiers:
        await world.until(lambda address=verifier.address: front.sample("peer_up", peer=address))
    text = ""
    async with openai.AsyncOpenAI(base_url=f"{front.http}/v1", api_key="any", max_retries=0) as client:
        if kind == "chat":
            stream: Any = await client.chat.completions.create(
                model="toy", messages=HI, max_tokens=40, stream=True
            )
        else:
            stream = await client.completions.create(model="toy", prompt="abc", max_tokens=40, stream=True)
        async for event in stream:
            for choice in event.choices:
                text += (choice.delta.content or "") if kind == "chat" else choice.text
            if len(text) >= 5 and not any(one.server is None for one in verifiers):
                lost = next(one for one in verifiers if one.opened)
                await lost.server.stop(0)
                lost.server = None
    assert text == expected(table, 10 if kind == "chat" else 3, 40)[1]
    assert all(verifier.opened for verifier in verifiers)
    assert next(one for one in verifiers if one.server is not None).opened[0].recovered


@pytest.mark.parametrize("chat", [OPENED, MARKED])
async def test_a_format_binds_at_once_where_all_verifiers_are_older_than_preambles(
    world: World, table: TokenTable, chat: str
) -> None:
    async with asking(world, table, chat=chat, request_fields=OLDER) as (client, verifier, _):
        answer = await client.chat.completions.create(
            model="toy", messages=HI, max_tokens=8, response_format={"type": "json_object"}
        )
    assert answer.choices[0].message.content == expected(table, verifier.opened[0].prompt_length, 8)[1]
    assert verifier.opened[0].grammar.json_object
    assert not verifier.opened[0].grammar.preamble


async def test_reasoning_precedes_a_format_where_one_verifier_is_new_enough(
    world: World, table: TokenTable
) -> None:
    new = await world.verifier(tokens=table, chat=OPENED)
    old = await world.verifier(tokens=table, chat=OPENED, request_fields=OLDER)
    front = await world.front([new.address, old.address], http_bind="127.0.0.1:0")
    for verifier in (new, old):
        await world.until(lambda verifier=verifier: front.sample("peer_up", peer=verifier.address))
    await world.ready(front)
    async with openai.AsyncOpenAI(base_url=f"{front.http}/v1", api_key="any", max_retries=0) as client:
        await client.chat.completions.create(
            model="toy", messages=HI, max_tokens=8, response_format={"type": "json_object"}
        )
    assert new.opened[0].grammar.preamble
    assert not old.opened
