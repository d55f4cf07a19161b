"""Keys at both fronts: who is not let in, whose sessions are whose, what a key may use."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from outrider.client import AsyncClient
from outrider.tokens import TokenTable
from outrider.v1 import generation_pb2
from outrider.v1.generation_pb2_grpc import GenerationStub
from outrider.wire.channel import open_channel
from outrider.wire.codec import SessionKey
from outrider.wire.keys import bearer, new_key
from outrider.wire.status import rpc_errors
from speculative.errors import (
    IdsNeeded,
    InvalidRequest,
    OutriderError,
    Overloaded,
    PermissionDenied,
    Unauthenticated,
)
from tests.orchestrator.conftest import MAX_LENGTH, FakeVerifier, Front, World
from tests.orchestrator.front.sending import send
from tests.orchestrator.fronts import orchestrator, soon, write_keys

ASKS: dict[str, Any] = {"ids": [5, 6], "max_tokens": 4}


@dataclass
class Doors:
    """A front with keys, and clients of two tenants."""

    world: World
    verifier: FakeVerifier
    front: Front
    keys: list[str]
    ours: AsyncClient
    theirs: AsyncClient


@asynccontextmanager
async def doors(
    world: World, table: TokenTable, folder: Path, *, verifier: dict[str, Any] | None = None, **quotas: int
) -> AsyncIterator[Doors]:
    keys = write_keys(folder / "keys", ["ours", "theirs"], **quotas)
    fake = await world.verifier(tokens=table, **(verifier or {}))
    front = await world.front([fake.address], http_bind="127.0.0.1:0", api_keys_file=folder / "keys")
    async with (
        AsyncClient(front.address, api_key=keys[0]) as ours,
        AsyncClient(front.address, api_key=keys[1]) as theirs,
    ):
        await soon(ours.models)
        yield Doors(world, fake, front, keys, ours, theirs)


async def test_a_key_makes_its_tenant(world: World, table: TokenTable, tmp_path: Path) -> None:
    async with doors(world, table, tmp_path) as at:
        await at.ours.generate(**ASKS)
        await at.ours.generate(**ASKS, tenant="ours")
        await at.theirs.generate(**ASKS)
        async with openai.AsyncOpenAI(
            base_url=f"{at.front.http}/v1", api_key=at.keys[1], max_retries=0
        ) as client:
            await client.completions.create(model="toy", prompt="abc", max_tokens=4)
        tenants = [message.key.tenant for message in at.verifier.opened]
    assert tenants == ["ours", "ours", "theirs", "theirs"]


@pytest.mark.parametrize("key", [None, "", "wrong", "nearly"])
async def test_without_a_known_key_nothing_is_answered_over_grpc(
    world: World, table: TokenTable, tmp_path: Path, key: str | None
) -> None:
    async with doors(world, table, tmp_path) as at, open_channel(at.front.address) as channel:
        shown = at.keys[0][:-1] if key == "nearly" else new_key() if key == "wrong" else key
        metadata = () if shown is None else (("authorization", f"Bearer {shown}"),)
        stub = GenerationStub(channel)
        start = generation_pb2.GenerateStart(ids=generation_pb2.TokenIds(ids=[5]))
        request = generation_pb2.GenerateRequest(start=start)

        async def generate() -> None:
            async for _ in stub.Generate(iter((request,)), metadata=metadata):
                pass

        for call in (
            generate(),
            stub.Cancel(generation_pb2.CancelRequest(session="a"), metadata=metadata),
            stub.ListModels(generation_pb2.ListModelsRequest(), metadata=metadata),
        ):
            with pytest.raises(Unauthenticated) as refused, rpc_errors():
                await call
            assert not shown or shown not in str(refused.value)
        assert at.verifier.opened == []
        assert at.front.sample("request_errors_total", reason="Unauthenticated") == 3


async def test_a_caller_without_a_key_is_told_before_it_sends_a_request(
    world: World, table: TokenTable, tmp_path: Path
) -> None:
    async with doors(world, table, tmp_path) as at, open_channel(at.front.address) as channel:
        call = GenerationStub(channel).Generate(timeout=100)
        with pytest.raises(Unauthenticated), rpc_errors():
            await anext(aiter(call))


@pytest.mark.parametrize("shown", [None, "Bearer", "Basic eDp4", "Bearer wrong"])
async def test_without_a_known_key_http_answers_401_in_openai_s_shape(
    world: World, table: TokenTable, tmp_path: Path, shown: str | None
) -> None:
    headers = {} if shown is None else {"authorization": shown}
    async with doors(world, table, tmp_path) as at:
        for method, path in (
            ("POST", "/v1/completions"),
            ("POST", "/v1/chat/completions"),
            ("GET", "/v1/models"),
            ("POST", "/tokenize"),
            ("GET", "/no/such/path"),
        ):
            status, body, response_headers = await asyncio.to_thread(
                send, at.front.http, path, b"{", method, **headers
            )
            assert status == 401, path
            assert body["error"]["code"] == "invalid_api_key"
            assert body["error"]["type"] == "invalid_request_error"
            assert set(body["error"]) == {"message", "type", "param", "code"}
            assert response_headers["www-authenticate"] == "Bearer"
        for path in ("/health", "/version", "/openapi.json"):
            status, _, _ = await asyncio.to_thread(send, at.front.http, path, b"", "GET", **headers)
            assert status == 200, "probes have no key"


async def test_the_openai_client_raises_its_own_error(
    world: World, table: TokenTable, tmp_path: Path
) -> None:
    async with (
        doors(world, table, tmp_path) as at,
        openai.AsyncOpenAI(base_url=f"{at.front.http}/v1", api_key="wrong") as client,
    ):
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()


async def test_a_request_that_names_another_tenant_is_refused(
    world: World, table: TokenTable, tmp_path: Path
) -> None:
    async with doors(world, table, tmp_path) as at:
        with pytest.raises(PermissionDenied, match="'theirs' is not this key's"):
            await at.ours.generate(**ASKS, tenant="theirs")
        with pytest.raises(PermissionDenied):
            await at.ours.cancel("a", tenant="theirs")
        assert at.verifier.opened == []


async def test_a_session_is_cancelled_by_its_own_tenant_alone(
    world: World, table: TokenTable, tmp_path: Path
) -> None:
    async with doors(world, table, tmp_path, verifier={"per_tick": 0}) as at:
        async with at.ours.stream(ids=[5], max_tokens=8, session="mine"):
            await world.until(lambda: at.verifier.opened)
            assert not await at.theirs.cancel("mine")
            assert at.verifier.cancelled == []
            assert await at.ours.cancel("mine")
        assert {key for key, _ in at.verifier.cancelled} == {SessionKey("ours", "mine", 0)}


async def test_a_session_is_gone_on_with_by_its_own_tenant_alone(
    world: World, table: TokenTable, tmp_path: Path
) -> None:
    """Neither its tokens nor the verifier's session can be reached with a name that was guessed."""
    async with doors(world, table, tmp_path) as at:
        answer = await at.ours.generate(ids=[5], max_tokens=8, session="mine", seed=1)
        first = at.verifier.opened[-1]
        async with open_channel(at.front.address) as channel:
            start = generation_pb2.GenerateStart(
                session="mine",
                seed=1,
                max_tokens=8,
                ids=generation_pb2.TokenIds(ids=[5]),
                resumable=True,
                seen_epoch=first.epoch,
                have=[generation_pb2.TokenIds(count=4, prefix_hash=1)],
            )
            with pytest.raises(IdsNeeded) as refused, rpc_errors():
                await asked(channel, start, at.keys[1])
            assert str(answer.ids[0]) not in str(refused.value).replace("4 ids of choice 0", "")
            del start.have[:]
            start.have.add(ids=answer.ids[:4])
            await asked(channel, start, at.keys[1])
        assert at.verifier.opened[-1].key.tenant == "theirs"
        assert SessionKey("ours", "mine", 0) in at.verifier.sessions
        assert at.verifier.sessions[SessionKey("ours", "mine", 0)].message is first, "it is untouched"


async def test_the_same_name_is_another_session_for_another_tenant(
    world: World, table: TokenTable, tmp_path: Path
) -> None:
    async with (
        doors(world, table, tmp_path, verifier={"tick_s": 0.02}) as at,
        at.ours.stream(ids=[5], max_tokens=MAX_LENGTH - 1, session="same") as stream,
    ):
        await anext(stream)
        await at.theirs.generate(ids=[5], max_tokens=4, session="same")
        assert len((await stream.completion()).ids) == MAX_LENGTH - 1, "nobody took it over"


async def asked(
    channel: Any, start: generation_pb2.GenerateStart, key: str
) -> list[generation_pb2.GenerateResponse]:
    request = generation_pb2.GenerateRequest(start=start)
    call = GenerationStub(channel).Generate(iter((request,)), metadata=bearer(key), timeout=100)
    return [response async for response in call]


FORGED: dict[str, tuple[dict[str, Any], type[OutriderError] | None]] = {
    "a session's name with a line break": ({"session": "a\nb"}, InvalidRequest),
    "a session's name that names another tenant's": ({"session": "ours\0mine"}, InvalidRequest),
    "a session's name that looks like one of the store": ({"session": "{mine}:record"}, None),
    "ids that are none": ({"session": "s", "have": [[2**32 - 1]]}, InvalidRequest),
    "more ids than there are": ({"session": "s", "have": [[5] * 60]}, InvalidRequest),
    "ids that nobody generated": ({"session": "s", "have": [[7, 7]]}, None),
    "an epoch of the past": ({"session": "s", "have": [[7]], "seen_epoch": 1}, None),
    "an epoch of the far future": ({"session": "s", "have": [[7]], "seen_epoch": 2**64 - 1}, OutriderError),
}


@pytest.mark.parametrize("what", FORGED)
async def test_what_is_forged_is_refused_or_costs_nobody_else(
    world: World, table: TokenTable, tmp_path: Path, what: str
) -> None:
    fields, error = FORGED[what]
    have = [generation_pb2.TokenIds(ids=ids) for ids in fields.get("have", ())]
    start = generation_pb2.GenerateStart(
        ids=generation_pb2.TokenIds(ids=[5]), seed=1, max_tokens=8, **(fields | {"have": have})
    )
    async with doors(world, table, tmp_path) as at, open_channel(at.front.address) as channel:
        async with at.ours.stream(ids=[5], max_tokens=40, session="mine") as stream:
            await anext(stream)
            with pytest.raises(error) if error else contextlib.nullcontext(), rpc_errors():
                await asked(channel, start, at.keys[1])
            assert len((await stream.completion()).ids) == 40
        assert (await at.theirs.generate(**ASKS)).ids, "and the one who forged is answered next time"


async def test_a_quota_is_told_with_when_to_come_back_over_both_fronts(
    world: World, table: TokenTable, tmp_path: Path
) -> None:
    async with doors(world, table, tmp_path, requests_per_minute=1) as at:
        await at.ours.generate(**ASKS)
        with pytest.raises(Overloaded, match="requests of the minute") as refused:
            await at.ours.generate(**ASKS)
        assert 30 < refused.value.retry_after_s <= 60
        status, body, headers = await asyncio.to_thread(
            send,
            at.front.http,
            "/v1/completions",
            b'{"prompt": "abc"}',
            authorization=f"Bearer {at.keys[0]}",
        )
        assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded")
        assert 30 < int(headers["retry-after"]) <= 60, "whole seconds: others are no HTTP"
        assert 0 <= int(headers["retry-after"]) * 1000 - int(headers["retry-after-ms"]) < 1000
        await at.theirs.generate(**ASKS)
        assert at.front.sample("request_errors_total", reason="QuotaExceeded") == 2


async def test_tokens_are_counted_of_prompts_and_answers(
    world: World, table: TokenTable, tmp_path: Path
) -> None:
    async with doors(world, table, tmp_path, tokens_per_minute=20) as at:
        await at.ours.generate(ids=[5] * 10, max_tokens=4)
        await at.ours.generate(ids=[5] * 4, max_tokens=8)
        with pytest.raises(Overloaded, match="tokens of the minute") as refused:
            await at.ours.generate(ids=[5], max_tokens=1)
        assert 10 < refused.value.retry_after_s < 25, "26 of 20 are used"


async def test_streams_at_once_are_counted_and_end_with_their_clients(
    world: World, table: TokenTable, tmp_path: Path
) -> None:
    async with doors(world, table, tmp_path, verifier={"per_tick": 0}, streams=1) as at:
        async with at.ours.stream(ids=[5], max_tokens=8):
            await world.until(lambda: at.verifier.opened)
            with pytest.raises(Overloaded, match="1 requests of this key run, 1 may"):
                await at.ours.generate(**ASKS)
            async with at.theirs.stream(ids=[5], max_tokens=8):
                await world.until(lambda: len(at.verifier.opened) == 2)
        at.verifier.per_tick = 2

        async def again() -> bool:
            try:
                return bool((await at.ours.generate(**ASKS)).ids)
            except Overloaded:
                return False

        await soon(again)


async def test_calls_of_one_address_are_bounded_over_both_fronts(world: World, table: TokenTable) -> None:
    fake = await world.verifier(tokens=table, per_tick=0)
    front = await world.front([fake.address], http_bind="127.0.0.1:0", max_streams_per_peer=1)
    await world.ready(front)
    async with front.client.stream(ids=[5], max_tokens=8):
        await world.until(lambda: fake.opened)
        with pytest.raises(Overloaded, match="your address"):
            await front.client.generate(**ASKS)
    async with openai.AsyncOpenAI(base_url=f"{front.http}/v1", api_key="any", max_retries=0) as client:
        held = asyncio.create_task(client.completions.create(model="toy", prompt="abc", max_tokens=4))
        await world.until(lambda: len(fake.opened) == 2)
        with pytest.raises(openai.RateLimitError, match="your address"):
            await client.models.list()
        held.cancel()
        await asyncio.gather(held, return_exceptions=True)


async def test_connections_are_bounded_over_both_fronts(world: World) -> None:
    async with orchestrator(verifier=["127.0.0.1:1"], max_connections=2) as said:
        for address in (said["address"], said["http"].removeprefix("http://")):
            host, _, port = address.rpartition(":")
            dialled = [await asyncio.open_connection(host, int(port)) for _ in range(3)]
            reading = [asyncio.create_task(until_closed(reader)) for reader, _ in dialled]
            closed, held = await asyncio.wait(reading, timeout=60, return_when=asyncio.FIRST_COMPLETED)
            assert len(closed) == 1, "one of the three is closed"
            for _, writer in dialled:
                writer.close()
            await asyncio.gather(*held)
            await soon(partial(answers, host, int(port)))


async def until_closed(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(ConnectionError):
        await reader.read()


async def answers(host: str, port: int) -> bool:
    """Whether a connection stays open."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        async with asyncio.timeout(0.3):
            with contextlib.suppress(ConnectionError):
                while await reader.read(1000):
                    pass
            return False
    except TimeoutError:
        return True
    finally:
        writer.close()
