"""Two tenants with keys at two orchestrators that share a store: neither reaches the other's sessions."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from orchestrator.store.redis import RedisStore
from outrider.client import AsyncClient
from outrider.tokens import TokenTable
from outrider.v1 import common_pb2, explain_pb2, generation_pb2
from outrider.v1.generation_pb2_grpc import GenerationStub
from outrider.wire.channel import open_channel
from outrider.wire.codec import SessionKey
from outrider.wire.keys import bearer
from outrider.wire.status import rpc_errors
from speculative.errors import IdsNeeded, OutriderError, PermissionDenied, Unauthenticated, UnknownSession
from speculative.hashing import prefix_hash
from tests.orchestrator.conftest import MAX_LENGTH, FakeVerifier, Front, World, next_id
from tests.orchestrator.fronts import soon, write_keys
from tests.redis_server import RedisServer

PROMPT = [5]
WHOLE = [next_id(position) for position in range(1, MAX_LENGTH)]
KEPT = explain_pb2.Incarnation(epoch=7, prompt_tokens=1)


@dataclass
class Pair:
    """Two orchestrators, one verifier, and each tenant's credentials."""

    verifier: FakeVerifier
    fronts: list[Front]
    ours: str
    theirs: str
    url: str

    def client(self, front: int, key: str) -> AsyncClient:
        return AsyncClient(self.fronts[front].address, api_key=key)

    async def generate(self, key: str, **start: Any) -> list[int]:
        """The other orchestrator's answer to a request, as messages of the wire."""
        asked: dict[str, Any] = {"session": "mine", "seed": 7, "max_tokens": MAX_LENGTH - 1}
        message = generation_pb2.GenerateStart(ids=generation_pb2.TokenIds(ids=PROMPT), **asked | start)
        async with open_channel(self.fronts[1].address) as channel:
            request = generation_pb2.GenerateRequest(start=message)
            call = GenerationStub(channel).Generate(iter((request,)), metadata=bearer(key), timeout=100)
            with rpc_errors():
                return [id_ async for response in call for id_ in response.tokens.ids]

    async def explain(self, key: str | None, **named: Any) -> list[explain_pb2.Incarnation]:
        metadata = () if key is None else bearer(key)
        async with open_channel(self.fronts[1].address) as channel:
            request = explain_pb2.ExplainRequest(key=common_pb2.SessionKey(**named))
            with rpc_errors():
                answer = await GenerationStub(channel).Explain(request, metadata=metadata, timeout=100)
            return list(answer.incarnations)


@pytest.fixture
async def pair(world: World, table: TokenTable, redis_server: RedisServer, tmp_path: Path) -> Pair:
    keys = write_keys(tmp_path / "keys", ["us", "them"])
    verifier = await world.verifier(tokens=table, per_tick=1, tick_s=0.02, explained=[KEPT])
    how: dict[str, Any] = {"api_keys_file": tmp_path / "keys", "http_bind": "127.0.0.1:0"}
    how |= {"store": "redis", "redis_url": redis_server.url}
    fronts = [await world.front([verifier.address], **how) for _ in range(2)]
    at = Pair(verifier, fronts, keys[0], keys[1], redis_server.url)
    for front in range(2):
        async with at.client(front, at.ours) as client:
            await soon(client.models)
    return at


@contextlib.asynccontextmanager
async def running(at: Pair) -> AsyncIterator[Any]:
    """A request of ours at the first orchestrator, whose record is in the store."""
    store = RedisStore(at.url)
    async with at.client(0, at.ours) as client:
        stream = client.stream(ids=PROMPT, max_tokens=MAX_LENGTH - 1, session="mine", seed=7)
        for _ in range(5):
            await anext(stream)
        at.verifier.per_tick = 0  # it does not end before its record is there

        async def recorded() -> bool:
            tokens = await store.tokens(SessionKey("us", "mine"))
            return tokens is not None and len(tokens.ids) >= 4

        await soon(recorded)
        await store.close()
        at.verifier.per_tick = 1
        yield stream


async def test_a_session_that_runs_elsewhere_is_cancelled_by_its_own_tenant_alone(pair: Pair) -> None:
    async with running(pair) as stream, pair.client(1, pair.theirs) as them, pair.client(1, pair.ours) as us:
        pair.verifier.per_tick = 0  # it does not end by itself
        assert not await them.cancel("mine")
        with pytest.raises(PermissionDenied):
            await them.cancel("mine", tenant="us")
        assert pair.verifier.cancelled == []
        assert await us.cancel("mine")
        assert len((await stream.completion()).ids) < len(WHOLE)


async def test_ids_on_record_are_given_to_their_own_tenant_alone(pair: Pair) -> None:
    have = [generation_pb2.TokenIds(count=4, prefix_hash=prefix_hash([*PROMPT, *WHOLE[:4]]))]
    async with running(pair) as stream:
        epoch = pair.verifier.opened[-1].epoch
        with pytest.raises(IdsNeeded):
            await pair.generate(pair.theirs, have=have, seen_epoch=epoch, resumable=True)
        with pytest.raises(PermissionDenied):
            await pair.generate(pair.theirs, have=have, seen_epoch=epoch, resumable=True, tenant="us")
        assert {opened.key.tenant for opened in pair.verifier.opened} == {"us"}
        assert await pair.generate(pair.ours, have=have, seen_epoch=epoch, resumable=True) == WHOLE[4:]
        with contextlib.suppress(OutriderError):  # taken over, as it was asked for twice
            await stream.completion()


async def test_the_same_name_elsewhere_leaves_another_tenant_s_session_alone(pair: Pair) -> None:
    async with running(pair) as stream:
        made_up = [generation_pb2.TokenIds(ids=WHOLE[:2])]
        assert await pair.generate(pair.theirs, have=made_up, seen_epoch=1, max_tokens=8) == WHOLE[2:8]
        assert list((await stream.completion()).ids) == WHOLE


async def test_an_answer_over_http_is_cancelled_by_its_own_tenant_alone(pair: Pair) -> None:
    async with (
        openai.AsyncOpenAI(base_url=f"{pair.fronts[0].http}/v1", api_key=pair.ours, max_retries=0) as http,
        pair.client(1, pair.theirs) as them,
    ):
        answer = await http.completions.create(model="toy", prompt="a", max_tokens=40, stream=True)
        name = (await anext(aiter(answer))).id
        opened = pair.verifier.opened[-1].key
        assert opened.tenant == "us"
        for session in {name, opened.session}:
            assert not await them.cancel(session)
        assert [part.choices[0].finish_reason async for part in answer if part.choices][-1] == "length"
    assert pair.verifier.cancelled == []


async def test_how_a_session_went_is_told_to_its_own_tenant_alone(pair: Pair) -> None:
    assert [one.epoch for one in await pair.explain(pair.ours, session="mine")] == [7]
    assert [one.epoch for one in await pair.explain(pair.ours, session="mine", tenant="us")] == [7]
    with pytest.raises(UnknownSession):
        await pair.explain(pair.theirs, session="mine")
    with pytest.raises(PermissionDenied):
        await pair.explain(pair.theirs, session="mine", tenant="us")


@pytest.mark.parametrize("named", [{"session": "mine", "tenant": "us"}, {"session": "a\nb"}, {}])
async def test_without_a_key_nothing_of_what_is_to_be_explained_is_looked_at(
    pair: Pair, named: dict[str, str]
) -> None:
    with pytest.raises(Unauthenticated):
        await pair.explain(None, **named)
