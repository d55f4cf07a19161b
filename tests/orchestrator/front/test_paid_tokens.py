"""Tokens that a client says it has are free only where the record shows that they were paid for."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.admitted_request import AdmittedRequest, Speculation
from orchestrator.front import paid_tokens
from orchestrator.front.paid_tokens import count_unpaid
from outrider.client import AsyncClient
from outrider.v1 import generation_pb2
from outrider.v1.generation_pb2_grpc import GenerationStub
from outrider.wire.channel import open_channel
from outrider.wire.codec import SessionKey
from outrider.wire.status import rpc_errors
from speculative.errors import QuotaExceeded
from speculative.params import SamplingParams
from tests.orchestrator.conftest import World
from tests.orchestrator.fronts import soon, write_keys

WHOLE = tuple(2 + (position * 7) % 94 for position in range(1, 60))
FRESH = AdmittedRequest(
    key=SessionKey("us", "mine"),
    ids=(5, 6),
    limit=60,
    params=SamplingParams(),
    seed=7,
    stops=(),
    speculation=Speculation(True, (), None),
    choices=2,
)


def resuming(*have: Sequence[int], ended: frozenset[int] = frozenset()) -> AdmittedRequest:
    return replace(FRESH, have=tuple(map(tuple, have)), ended=ended)


async def unpaid(request: AdmittedRequest, **on_record: Sequence[int]) -> int:
    async def recorded(key: SessionKey) -> Sequence[int]:
        assert (key.tenant, key.session) == ("us", "mine")
        return on_record.get(f"choice_{key.choice}", ())

    return await count_unpaid(request, recorded)


async def test_a_request_that_resumes_nothing_has_nothing_to_pay_twice() -> None:
    assert await unpaid(FRESH, choice_0=[1, 2]) == 0


async def test_what_is_on_record_is_free_and_the_rest_is_charged() -> None:
    request = resuming([1, 2, 3, 4, 5], [7, 8])
    assert await unpaid(request, choice_0=[1, 2, 3], choice_1=[7, 8, 9]) == 2
    assert await unpaid(request) == 7
    assert await unpaid(request, choice_1=[7]) == 6


async def test_tokens_that_differ_from_the_record_are_all_charged() -> None:
    assert await unpaid(resuming([1, 2, 3], []), choice_0=[1, 2, 4, 5]) == 3


async def test_a_choice_that_has_ended_is_computed_for_nobody() -> None:
    assert await unpaid(resuming([1, 2, 3], [7, 8], ended=frozenset({0}))) == 2


async def test_without_a_record_in_time_all_is_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paid_tokens, "PAID_S", 0.01)

    async def never(key: SessionKey) -> Sequence[int]:
        await asyncio.sleep(60)
        return ()

    assert await count_unpaid(resuming([1, 2], [3]), never) == 3


async def asked(address: str, key: str, **start: Any) -> list[Any]:
    prompt = generation_pb2.TokenIds(ids=[5])
    request = generation_pb2.GenerateStart(ids=prompt, seed=7, max_tokens=59, **start)
    async with open_channel(address) as channel:
        call = GenerationStub(channel).Generate(metadata=(("authorization", f"Bearer {key}"),))
        with rpc_errors():
            await call.write(generation_pb2.GenerateRequest(start=request))
            await call.done_writing()
            return [response async for response in call]


async def test_a_false_claim_costs_as_much_as_a_prompt(world: World, tmp_path: Path) -> None:
    (key,) = write_keys(tmp_path / "keys", ["ours"], tokens_per_minute=40)
    verifier = await world.verifier()
    front = await world.front([verifier.address], api_keys_file=tmp_path / "keys")
    async with AsyncClient(front.address, api_key=key) as client:
        await soon(client.models)
    have = [generation_pb2.TokenIds(ids=WHOLE[:55])]
    responses = await asked(front.address, key, session="forged", have=have)
    assert tuple(id_ for one in responses for id_ in one.tokens.ids) == WHOLE[55:]
    with pytest.raises(QuotaExceeded, match="tokens of the minute are used up") as refused:
        await asked(front.address, key)
    assert 25 < refused.value.retry_after_s < 35, "1 of the prompt, 55 claimed and 4 delivered, of 40"


async def test_any_key_of_the_tenant_resumes_a_session_by_its_name(world: World, tmp_path: Path) -> None:
    one, colleague, stranger = write_keys(tmp_path / "keys", ["ours", "ours", "theirs"])
    verifier = await world.verifier()
    front = await world.front([verifier.address], api_keys_file=tmp_path / "keys")
    async with AsyncClient(front.address, api_key=one) as client:
        await soon(client.models)
    await asked(front.address, one, session="mine", resumable=True)
    have = [generation_pb2.TokenIds(ids=WHOLE[:50])]
    resumed = await asked(front.address, colleague, session="mine", have=have)
    assert tuple(id_ for each in resumed for id_ in each.tokens.ids) == WHOLE[50:]
    await asked(front.address, stranger, session="mine", have=have)
    assert [message.key.tenant for message in verifier.opened] == ["ours", "ours", "theirs"]
