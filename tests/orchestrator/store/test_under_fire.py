"""Requests go on, and say the same, while their Redis server is slow, frozen, gone or full of rubbish."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest

from orchestrator.store import Append, StoreUnavailable, Tokens, entries
from orchestrator.store.prefixes import hashes
from orchestrator.store.redis import RedisStore
from outrider.v1 import common_pb2, generation_pb2
from outrider.v1.generation_pb2_grpc import GenerationStub
from outrider.wire.channel import open_channel
from outrider.wire.codec import SessionKey
from tests.in_time import in_time

LIMIT = 60
WHOLE = tuple(2 + (position * 7) % 94 for position in range(1, LIMIT))
TOKEN_PATH_S = 1e-4
KEY = SessionKey("default", "mine")


class Slow:
    """A proxy between clients and a server that delays each piece."""

    def __init__(self, path: str, behind: str) -> None:
        self.delay_s = 0.0
        self.url = f"unix://{path}"
        self._path, self._behind = path, behind
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, self._path)

    async def stop(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        there, back = await asyncio.open_unix_connection(self._behind)
        try:
            await asyncio.gather(self._pass(reader, back, self.delay_s), self._pass(there, writer, 0.0))
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            back.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
        while piece := await reader.read(1 << 16):
            await asyncio.sleep(delay_s)
            writer.write(piece)
        writer.close()


@pytest.fixture
async def slow(own_redis: Any, tmp_path: Any) -> AsyncIterator[Slow]:
    between = Slow(f"{tmp_path}/slow.sock", own_redis.url.removeprefix("unix://"))
    await between.start()
    yield between
    await between.stop()


@contextlib.asynccontextmanager
async def looked_into(url: str) -> AsyncIterator[RedisStore]:
    store = RedisStore(url)
    try:
        yield store
    finally:
        await store.close()


async def served(world: Any, url: str, **how: Any) -> tuple[Any, Any]:
    verifier = await world.verifier(**({"per_tick": 1, "tick_s": 0.01} | how))
    return verifier, await world.ready(await world.front([verifier.address], store="redis", redis_url=url))


def all_up(front: Any, addresses: list[str]) -> bool:
    return all(front.sample("peer_up", peer=address) for address in addresses)


def mean_store_s(front: Any) -> float:
    return float(front.sample("store_seconds_sum") / front.sample("store_seconds_count"))


async def until_recorded(store: RedisStore, ids: tuple[int, ...], key: SessionKey = KEY) -> None:
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(Exception):
                tokens = await store.tokens(key)
                if tokens is not None and tokens.ids[: len(ids)] == ids:
                    return
            await asyncio.sleep(0.02)


async def until_handled(store: RedisStore, key: SessionKey, length: int) -> None:
    """Waits until the request has ended and its KV can be found again."""
    async with asyncio.timeout(60):
        while True:
            handle = await store.handle(key)
            if handle is not None and handle.length == length and await store.find(key) is None:
                return
            await asyncio.sleep(0.02)


async def test_what_a_client_has_is_recorded_soon_after(world: Any, redis_server: Any) -> None:
    verifier, front = await served(world, redis_server.url)
    stream = front.client.stream(ids=[5], session="mine", max_tokens=LIMIT - 1)
    ids = [id_ for _ in range(5) for id_ in (await anext(stream)).ids]
    verifier.per_tick = 0  # the request is not over before its record is read
    async with looked_into(redis_server.url) as store:
        await until_recorded(store, tuple(ids))
        record = await store.find(KEY)
        assert record is not None
        assert (record.verifier, record.epoch) == (verifier.address, verifier.opened[0].epoch)
        verifier.per_tick = 1
        completion = await stream.completion()
        assert completion.ids == WHOLE
        await until_handled(store, KEY, LIMIT)
        assert await store.find(KEY) is None
        handle = await store.handle(KEY)
    assert handle is not None
    assert (handle.verifier, handle.epoch) == (verifier.address, verifier.opened[0].epoch)
    in_time(mean_store_s(front) < TOKEN_PATH_S)


async def during(front: Any, harm: Callable[[], Any], requests: int = 3) -> tuple[float, float]:
    """Harms the store amid requests; the longest pause of any client, and the mean time in store code."""

    async def one(name: str) -> float:
        longest, last, ids = 0.0, None, []
        async for chunk in front.client.stream(ids=[5], session=name, max_tokens=LIMIT - 1):
            now = time.monotonic()
            longest, last = max(longest, now - (last or now)), now
            ids += chunk.ids
        assert tuple(ids) == WHOLE
        return longest

    running = [asyncio.create_task(one(f"s{i}")) for i in range(requests)]
    await asyncio.sleep(0.2)
    harm()
    pauses = await asyncio.gather(*running)
    after = [asyncio.create_task(one(f"t{i}")) for i in range(requests)]
    return max(*pauses, *await asyncio.gather(*after)), mean_store_s(front)


PAUSE_S = 1.0
"""A busy machine's; a store on the way would take seconds."""


async def test_a_slow_store_slows_no_stream(world: Any, slow: Slow) -> None:
    slow.delay_s = 0.2
    _, front = await served(world, slow.url)
    pause_s, store_s = await during(front, lambda: None)
    in_time(pause_s < PAUSE_S, pause_s)
    in_time(store_s < TOKEN_PATH_S, store_s)
    in_time(front.sample("store_failures_total") == 0, "slow, but within the limit")


async def test_a_frozen_store_stops_no_stream_and_is_told_all_when_it_wakes(
    world: Any, own_redis: Any
) -> None:
    verifier, front = await served(world, own_redis.url)
    pause_s, store_s = await during(front, own_redis.freeze)
    in_time(pause_s < PAUSE_S, pause_s)
    in_time(store_s < TOKEN_PATH_S, store_s)
    assert front.sample("store_failures_total") > 0
    stream = front.client.stream(ids=[5], session="mine", max_tokens=LIMIT - 1)
    ids = (await anext(stream)).ids
    other = front.client.stream(ids=[5], session="other", max_tokens=LIMIT - 1)
    await anext(other)
    verifier.per_tick = 0  # neither is over before the store is told of it
    began = time.monotonic()
    assert await front.client.cancel("other")
    in_time(time.monotonic() - began < PAUSE_S, "what runs here is cancelled with nobody's help")
    assert (await other.completion()).finish_reason == "cancelled"
    own_redis.thaw()
    async with looked_into(own_redis.url) as store:
        await until_recorded(store, ids)
    verifier.per_tick = 1
    assert (await stream.completion()).ids == WHOLE


async def test_a_store_that_comes_back_empty_is_told_again(world: Any, own_redis: Any) -> None:
    verifier, front = await served(world, own_redis.url, tick_s=0.06)
    stream = front.client.stream(ids=[5], session="mine", max_tokens=LIMIT - 1)
    ids = [id_ for _ in range(3) for id_ in (await anext(stream)).ids]
    async with looked_into(own_redis.url) as store:
        await until_recorded(store, tuple(ids))
    own_redis.kill()
    ids += [id_ for _ in range(3) for id_ in (await anext(stream)).ids]
    verifier.per_tick = 0  # the request is not over before the store is told of it
    own_redis.start()
    async with looked_into(own_redis.url) as store:
        await until_recorded(store, tuple(ids))
        record = await store.find(KEY)
    assert record is not None
    assert record.verifier == verifier.address
    verifier.per_tick = 1
    assert (await stream.completion()).ids == WHOLE


async def test_a_store_that_was_never_there_is_no_reason_to_refuse(world: Any, tmp_path: Any) -> None:
    _, front = await served(world, f"unix://{tmp_path}/nobody.sock")
    pause_s, store_s = await during(front, lambda: None)
    in_time(pause_s < PAUSE_S, pause_s)
    in_time(store_s < TOKEN_PATH_S, store_s)
    began = time.monotonic()
    assert not await front.client.cancel("nobody")
    in_time(time.monotonic() - began < 5)


def rubbish(server: Any) -> None:
    for place, key in enumerate(
        [KEY, SessionKey("default", "s1"), SessionKey("default", "s2"), SessionKey("default", "s3")]
    ):
        name = entries.record_name(key)
        if place == 0:
            server.say("SET", name, b"\xff\x00 no hash")
            server.say("HSET", entries.tokens_name(key), "no", "string")
        elif place == 1:
            server.say("HSET", name, "version", "999", "epoch", "f" * 16)
            server.say("SET", entries.tokens_name(key), b"9 of the future")
        else:
            server.say("HSET", name, "version", "1", "epoch", "f" * 16, "choices", "-7", "verifier", b"\xff")
            server.say("SET", entries.tokens_name(key), b"1" + b"e" * 16 + b"odd")
        server.say("HSET", entries.handle_name(key), "version", "1", "length", "many")
    server.say("HSET", entries.WORKERS, "x", "9999999999999999", "y", "9999999999999999" + '1{"address": 3}')
    server.say("HSET", entries.WORKERS, "z", "9" * 400)


async def test_rubbish_is_ignored_or_written_over(
    world: Any, redis_server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rubbish(redis_server)
    verifier, front = await served(world, redis_server.url)
    for name in ("mine", "s1", "s2", "s3"):
        completion = await front.client.generate(ids=[5], session=name, max_tokens=LIMIT - 1)
        assert completion.ids == WHOLE
    assert front.sample("store_failures_total") == 0
    async with looked_into(redis_server.url) as store:
        assert {report.address for report in await store.workers()} <= {verifier.address}
        for foreign in (KEY, SessionKey("default", "s1")):
            assert await store.find(foreign) is None
            assert await store.tokens(foreign) is None
        tokens = await store.tokens(SessionKey("default", "s2"))
        assert tokens is None or tokens == Tokens(verifier.opened[2].epoch, tokens.ids)
        handle = await store.handle(SessionKey("default", "s2"))
    assert handle is not None
    assert handle.length == LIMIT, "what is of this version, but broken, is written over"
    assert "ignored; delete it" in caplog.text


@pytest.mark.parametrize("epoch", ["f" * 16, "zz" * 8])
async def test_what_no_clock_can_have_made_neither_cancels_a_request_nor_places_it(
    world: Any, redis_server: Any, epoch: str
) -> None:
    verifier, front = await served(world, redis_server.url)
    fields = ("version", "1", "epoch", epoch, "verifier", verifier.address, "choices", "1", "cancelled", "1")
    redis_server.say("HSET", entries.record_name(KEY), *fields)
    redis_server.say("HSET", entries.handle_name(KEY), *fields[:6], "length", "1", "hash", "0" * 16)
    redis_server.say("SET", entries.tokens_name(KEY), f"1{epoch}".encode() + entries.ids_to_bytes(WHOLE))
    async with looked_into(redis_server.url) as store:
        assert (await store.find(KEY), await store.handle(KEY), await store.tokens(KEY)) == (None, None, None)
        assert await store.cancel(KEY) is None
    assert not await front.client.cancel("mine")
    have = [generation_pb2.TokenIds(ids=WHOLE[:2])]
    start = generation_pb2.GenerateStart(
        ids=generation_pb2.TokenIds(ids=[5]), session="mine", seed=1, max_tokens=9, have=have, seen_epoch=1
    )
    async with open_channel(front.address) as channel:
        call = GenerationStub(channel).Generate(iter((generation_pb2.GenerateRequest(start=start),)))
        responses = [response async for response in call]
    assert tuple(id_ for one in responses for id_ in one.tokens.ids) == WHOLE[2:9]
    assert responses[-1].finished.reason == common_pb2.FINISH_REASON_LENGTH


async def test_a_cancel_at_another_orchestrator_ends_the_request(world: Any, redis_server: Any) -> None:
    verifier, front = await served(world, redis_server.url)
    other = await world.front([verifier.address], store="redis", redis_url=redis_server.url)
    await world.ready(other)
    stream = front.client.stream(ids=[5], session="mine", max_tokens=LIMIT - 1)
    ids = (await anext(stream)).ids
    verifier.per_tick = 0  # the request does not end by itself
    async with looked_into(redis_server.url) as store:
        await until_recorded(store, ids)
    assert await other.client.cancel("mine")
    completion = await stream.completion()
    assert completion.finish_reason == "cancelled"
    assert len(completion.ids) < LIMIT - 1


async def test_a_recorded_cancel_stops_a_takeover(world: Any, redis_server: Any) -> None:
    """Its verifier is frozen when the Cancel comes, and another would go on with it."""
    verifiers = [await world.verifier(per_tick=1, tick_s=0.05) for _ in range(2)]
    addresses = [verifier.address for verifier in verifiers]
    how = {"store": "redis", "redis_url": redis_server.url, "silent_s": 0.6}
    fronts = [await world.front(addresses, **how) for _ in range(2)]
    for front in fronts:
        await world.ready(front)
    stream = fronts[0].client.stream(ids=[5], session="mine", max_tokens=LIMIT - 1)
    ids = (await anext(stream)).ids
    first = next(verifier for verifier in verifiers if verifier.opened)
    async with looked_into(redis_server.url) as store:
        await until_recorded(store, ids)
        first.silent, first.answers = True, False
        await fronts[1].client.cancel("mine")
        completion = await stream.completion()
    assert completion.finish_reason == "cancelled"
    assert len(completion.ids) < LIMIT - 1
    again = await fronts[1].client.generate(ids=[5], session="mine", max_tokens=5)
    assert again.ids == WHOLE[:5], "a new request lifts it"


async def test_the_next_turn_goes_where_the_last_one_was(world: Any, redis_server: Any) -> None:
    verifiers = [await world.verifier() for _ in range(3)]
    addresses = [verifier.address for verifier in verifiers]
    ids = [5]
    for turn in range(4):
        how = {"store": "redis", "redis_url": redis_server.url}
        turned = addresses[turn % 3 :] + addresses[: turn % 3]
        front = await world.front(turned, **how)
        await world.until(partial(all_up, front, addresses))
        completion = await front.client.generate(ids=ids, session="talk", max_tokens=4)
        ids += [*completion.ids, 7]
        async with looked_into(redis_server.url) as store:
            await until_handled(store, SessionKey("default", "talk"), len(ids) - 1)
    assert sorted(len(verifier.opened) for verifier in verifiers) == [0, 0, 4]


async def test_a_known_prefix_draws_a_session_without_a_name(world: Any, redis_server: Any) -> None:
    verifiers = [await world.verifier() for _ in range(2)]
    addresses = [verifier.address for verifier in verifiers]
    how = {"store": "redis", "redis_url": redis_server.url}
    ids = list(range(2, 42))
    async with looked_into(redis_server.url) as store:
        await store.put_prefixes("default\0toy", hashes(ids), addresses[1])
    front = await world.front(addresses, **how)
    await world.until(partial(all_up, front, addresses))
    for _ in range(3):
        await front.client.generate(ids=[*ids, 50], max_tokens=4)
    assert [len(verifier.opened) for verifier in verifiers] == [0, 3]


async def test_many_questions_at_once_are_all_answered(redis_server: Any) -> None:
    """More than there are connections."""
    async with looked_into(redis_server.url) as store:
        await store.append([Append(KEY, 1, 0, [7])])
        answers = await asyncio.gather(*(store.tokens(KEY) for _ in range(500)))
        assert set(answers) == {Tokens(1, (7,))}


async def test_a_store_that_lost_its_scripts_is_told_them(redis_server: Any) -> None:
    async with looked_into(redis_server.url) as store:
        await store.append([Append(KEY, 1, 0, [7])])
        redis_server.say("SCRIPT", "FLUSH")
        assert await store.append([Append(KEY, 1, 1, [8]), Append(KEY, 1, 2, [9])]) == [2, 3]


async def test_a_server_that_was_demoted_is_left_for_the_one_that_its_name_leads_to(
    own_redis: Any, redis_server: Any, tmp_path: Any
) -> None:
    name = tmp_path / "name.sock"
    name.symlink_to(own_redis.url.removeprefix("unix://"))
    async with looked_into(f"unix://{name}") as store:
        await store.append([Append(KEY, 1, 0, [7])])
        own_redis.say("REPLICAOF", "127.0.0.1", "1")
        name.unlink()
        name.symlink_to(redis_server.url.removeprefix("unix://"))
        with pytest.raises(StoreUnavailable, match="READONLY"):
            await store.append([Append(KEY, 1, 1, [8])])
        assert await store.append([Append(KEY, 1, 0, [7, 8])]) == [2]
    async with looked_into(redis_server.url) as store:
        assert await store.tokens(KEY) == Tokens(1, (7, 8))


async def test_a_caller_that_goes_away_leaves_no_answer_behind(
    own_redis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that nobody took must not become the answer to the next question."""
    monkeypatch.setattr("orchestrator.store.connection.TIMEOUT_S", 30.0)
    async with looked_into(own_redis.url) as store:
        keys = [SessionKey("default", f"k{i}") for i in range(20)]
        for place, key in enumerate(keys):
            await store.append([Append(key, 1, 0, [place])])
        own_redis.freeze()
        asked = [asyncio.create_task(store.tokens(key)) for key in keys[:2]]
        await asyncio.sleep(0.05)
        for task in asked:
            task.cancel()
        thaw = threading.Timer(0.1, own_redis.thaw)
        thaw.start()
        await asyncio.gather(*asked, return_exceptions=True)
        await asyncio.sleep(0.3)
        for place, key in enumerate(keys):
            assert await store.tokens(key) == Tokens(1, (place,))
        thaw.join()


async def test_an_orchestrator_counts_what_others_have_at_a_verifier(world: Any, redis_server: Any) -> None:
    verifiers = [await world.verifier(per_tick=1, tick_s=0.1) for _ in range(2)]
    addresses = [verifier.address for verifier in verifiers]
    how = {"store": "redis", "redis_url": redis_server.url}
    first, second = [await world.front(addresses, **how) for _ in range(2)]
    await world.until(partial(all_up, first, addresses))
    await world.until(partial(all_up, second, addresses))
    held = first.client.stream(ids=[5], max_tokens=LIMIT - 1)
    await anext(held)
    assert verifiers[0].opened
    async with looked_into(redis_server.url) as store, asyncio.timeout(60):
        told: set[tuple[str, str, int]] = set()
        while told != {(address, "toy", 8) for address in addresses}:
            await asyncio.sleep(0.02)
            told = {(it.address, it.model, it.capacity) for it in await store.workers()}
        while not verifiers[1].opened:  # before the second one has heard of it, it asks the first verifier
            await second.client.generate(ids=[5], max_tokens=1)
    assert len(verifiers[1].opened) == 1
