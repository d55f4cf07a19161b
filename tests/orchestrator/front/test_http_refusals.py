"""What the HTTP front says in OpenAI's shape where a request cannot begin, or ends early."""

import asyncio

import openai
import pytest

from outrider.tokens import TokenTable
from speculative.errors import Overloaded
from tests.orchestrator.conftest import World
from tests.orchestrator.front.sending import send
from tests.orchestrator.front.test_http_completions import asking


async def test_unknown_models_paths_and_methods_have_the_shape_too(world: World, table: TokenTable) -> None:
    async with asking(world, table) as (client, _, front):
        with pytest.raises(openai.NotFoundError, match="no model 'other'") as refused:
            await client.completions.create(model="other", prompt="abc")
        assert (refused.value.param, refused.value.code) == ("model", "model_not_found")
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="toy", input="x")
        status, said, _ = await asyncio.to_thread(send, front.http, "/v1/completions", b"", "GET")
        assert (status, said["error"]["type"]) == (405, "invalid_request_error")
        assert said["error"]["message"] == "this path takes POST, not GET"


async def test_a_refused_method_is_told_every_method_of_the_path(world: World, table: TokenTable) -> None:
    async with asking(world, table) as (_, _, front):
        status, said, headers = await asyncio.to_thread(send, front.http, "/health", b"", "DELETE")
    assert status == 405
    assert said["error"]["message"] == "this path takes GET, not DELETE"
    assert headers["allow"] == "GET"


async def test_a_full_front_says_when_to_come_back(world: World, table: TokenTable) -> None:
    async with asking(world, table, {"max_streams": 1}, per_tick=0) as (client, _, front):
        waits = asyncio.create_task(client.completions.create(model="toy", prompt="abc", stream=True))
        await world.until(lambda: front.sample("requests") == 1)
        with pytest.raises(openai.RateLimitError) as refused:
            await client.completions.create(model="toy", prompt="abc")
        waits.cancel()
        await asyncio.wait((waits,))
        assert float(refused.value.response.headers["retry-after"]) == 1
        await world.until(lambda: front.sample("requests") == 0)


async def test_what_a_verifier_refuses_is_told_before_the_stream_begins(
    world: World, table: TokenTable
) -> None:
    async with asking(world, table, refusal=Overloaded("no room", 2.5)) as (client, _, _):
        with pytest.raises(openai.RateLimitError, match="no room"):
            await client.completions.create(model="toy", prompt="abc", stream=True)


async def test_without_a_verifier_the_front_is_not_healthy(world: World) -> None:
    front = await world.front(["127.0.0.1:1"], http_bind="127.0.0.1:0")
    status, said, _ = await asyncio.to_thread(send, front.http, "/health", b"", "GET")
    assert (status, said["error"]["code"]) == (503, "unavailable")
    status, said, _ = await asyncio.to_thread(send, front.http, "/v1/completions", b'{"prompt": "a"}')
    assert (status, said["error"]["type"]) == (503, "service_unavailable_error")
    assert "127.0.0.1" not in said["error"]["message"], "/fleet hides where verifiers are, too"


async def test_a_lost_stream_ends_in_an_error(world: World, table: TokenTable) -> None:
    async with asking(world, table, {"recover_s": 0.2}, per_tick=1, tick_s=0.02) as (client, verifier, _):
        stream = await client.completions.create(model="toy", prompt="abc", max_tokens=50, stream=True)
        events = aiter(stream)
        await anext(events)
        await verifier.server.stop(0)
        with pytest.raises(openai.APIError, match="lost its verifier") as lost:
            async for _ in events:
                pass
        assert "127.0.0.1" not in str(lost.value)


async def test_a_session_that_fails_ends_in_an_error(world: World, table: TokenTable) -> None:
    from outrider.v1 import common_pb2, verifier_pb2

    fault = verifier_pb2.Committed(
        position=3, finished=common_pb2.FINISH_REASON_ERROR, message="it broke", code=13
    )
    async with asking(world, table, fault=fault) as (client, _, _):
        with pytest.raises(openai.InternalServerError, match="it broke"):
            await client.completions.create(model="toy", prompt="abc")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_grammar_that_leads_nowhere_is_the_clients_fault(
    world: World, table: TokenTable, stream: bool
) -> None:
    from outrider.v1 import common_pb2, verifier_pb2
    from outrider.wire.codec import CommittedCode

    fault = verifier_pb2.Committed(
        position=3,
        finished=common_pb2.FINISH_REASON_ERROR,
        message="the grammar cannot go on: too many states",
        code=CommittedCode.DEAD_END,
    )
    async with asking(world, table, fault=fault) as (client, _, _):

        async def ask() -> None:
            answer = await client.completions.create(model="toy", prompt="abc", stream=stream)
            async for _ in answer:
                pass

        with pytest.raises(openai.APIError, match="too many states") as refused:
            await ask()
    assert refused.value.type == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_cancels(world: World, table: TokenTable, stream: bool) -> None:
    async with asking(world, table, per_tick=0) as (client, verifier, front):
        asked = asyncio.create_task(
            client.completions.create(model="toy", prompt=["abc", "ab"], stream=stream, n=2)
        )
        await world.until(lambda: len(verifier.opened) == 4)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await world.until(lambda: len(verifier.cancelled) == 4)
        await world.until(lambda: front.sample("requests") == 0)


async def test_an_orchestrator_that_stops_tells_its_streams(world: World, table: TokenTable) -> None:
    async with asking(world, table, per_tick=1, tick_s=0.02) as (client, _, front):
        stream = await client.completions.create(model="toy", prompt="abc", max_tokens=60, stream=True)
        events = aiter(stream)
        await anext(events)
        stopping = asyncio.create_task(front.service.stop(0.1))
        with pytest.raises(openai.APIError, match="stopping"):
            async for _ in events:
                pass
        await stopping
