"""A client names what it has by number and hash; the ids come from the record, where it reaches that far."""

import asyncio
from typing import Any

import pytest

from orchestrator.store.redis import RedisStore
from outrider.v1 import generation_pb2
from outrider.v1.generation_pb2_grpc import GenerationStub
from outrider.wire.channel import open_channel
from outrider.wire.codec import SessionKey
from outrider.wire.status import rpc_errors
from speculative.errors import IdsNeeded, InvalidRequest, OutriderError
from speculative.hashing import prefix_hash

LIMIT = 60
WHOLE = tuple(2 + (position * 7) % 94 for position in range(1, LIMIT))


def message(**start: Any) -> generation_pb2.GenerateRequest:
    asked = {"session": "mine", "seed": 7, "max_tokens": LIMIT - 1, "resumable": True}
    prompt = generation_pb2.TokenIds(ids=[5])
    return generation_pb2.GenerateRequest(start=generation_pb2.GenerateStart(ids=prompt, **asked | start))


def having(count: int, hash_: int | None = None, ids: tuple[int, ...] = ()) -> Any:
    hash_ = prefix_hash([5, *WHOLE[:count]]) if hash_ is None else hash_
    return generation_pb2.TokenIds(count=count, prefix_hash=hash_, ids=ids)


async def asked(front: Any, **start: Any) -> list[Any]:
    async with open_channel(front.address) as channel:
        call = GenerationStub(channel).Generate()
        with rpc_errors():
            await call.write(message(**start))
            await call.done_writing()
            return [response async for response in call]


async def left_behind(world: Any, url: str, **start: Any) -> Any:
    """A request whose client hung up after some ids, all of which are on record; another orchestrator."""
    verifier = await world.verifier(per_tick=1, tick_s=0.02)
    how = {"store": "redis", "redis_url": url}
    first = await world.ready(await world.front([verifier.address], **how))
    other = await world.ready(await world.front([verifier.address], **how))
    async with open_channel(first.address) as channel:
        call = GenerationStub(channel).Generate()
        await call.write(message(**start))
        for _ in range(12):
            await call.read()
        verifier.per_tick = 0  # the record does not reach the end before the client is gone
        call.cancel()
    store = RedisStore(url)
    async with asyncio.timeout(60):
        while True:
            tokens = await store.tokens(SessionKey("default", "mine"))
            if tokens is not None and len(tokens.ids) > 4:
                break
            await asyncio.sleep(0.02)
    await store.close()
    verifier.per_tick = 1
    return other


async def test_a_count_and_a_hash_stand_for_ids_on_record(world: Any, redis_server: Any) -> None:
    other = await left_behind(world, redis_server.url)
    responses = await asked(other, have=[having(4)])
    assert responses[1].tokens.position == 5
    assert tuple(id_ for one in responses for id_ in one.tokens.ids) == WHOLE[4:]


async def test_choices_can_each_be_named_by_their_own(world: Any, redis_server: Any) -> None:
    other = await left_behind(world, redis_server.url, n=2)
    have = [having(2), generation_pb2.TokenIds(ids=WHOLE[:9])]
    got: dict[int, list[int]] = {0: [], 1: []}
    for response in await asked(other, have=have, n=2):
        got[response.tokens.choice] += response.tokens.ids
    assert (tuple(got[0]), tuple(got[1])) == (WHOLE[2:], WHOLE[9:])


@pytest.mark.parametrize(
    ("start", "error", "says"),
    [
        ({"have": [having(58)]}, IdsNeeded, "first 58 ids"),
        ({"have": [having(2**32 - 1)]}, IdsNeeded, "not on record"),
        ({"have": [having(4, hash_=1)]}, IdsNeeded, "with the ids in `have`"),
        ({"have": [having(4)], "tenant": "another"}, IdsNeeded, "not on record"),
        ({"have": [having(4)], "session": "forged"}, IdsNeeded, "'forged'"),
        ({"have": [having(4, ids=(1,))]}, InvalidRequest, "both ids and a count"),
    ],
)
async def test_what_is_not_on_record_is_asked_for(
    world: Any, redis_server: Any, start: dict[str, Any], error: type[OutriderError], says: str
) -> None:
    other = await left_behind(world, redis_server.url)
    with pytest.raises(error, match=says):
        await asked(other, **start)
    responses = await asked(other, have=[generation_pb2.TokenIds(ids=WHOLE[:4])])
    assert tuple(id_ for one in responses for id_ in one.tokens.ids) == WHOLE[4:]


async def test_without_a_record_there_are_no_ids_to_be_named(world: Any) -> None:
    verifier = await world.verifier()
    front = await world.ready(await world.front([verifier.address]))
    with pytest.raises(IdsNeeded):
        await asked(front, have=[having(4)])
