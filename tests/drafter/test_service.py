"""The DraftSource service over real sockets, with a fake drafter behind it."""

import asyncio
import contextlib
import threading
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import grpc.aio
import pytest

from drafter_service.drafters import Drafter
from drafter_service.service import drafter_server
from drafter_service.settings import DrafterSettings
from outrider.runtime.metrics import Metrics
from outrider.runtime.serve import ServiceContext
from outrider.v1 import common_pb2, draft_source_pb2, draft_source_pb2_grpc
from outrider.wire.channel import open_channel, server_options
from speculative.hashing import prefix_hash

PROMPT = (3, 1, 4, 1, 5)
ATTACH = "/outrider.v1.DraftSource/Attach"


class Running:
    """A served drafter, and channels to it."""

    def __init__(self, drafter: Any, **settings: Any) -> None:
        self.drafter = drafter
        self.metrics = Metrics("drafter")
        self.failed: list[BaseException] = []
        values = {"model": "fake", "children": 2, "floor": 0.05, "depth": 3} | settings
        context = ServiceContext(DrafterSettings(**values), "", self.metrics, self.failed.append)
        self.service = drafter_server(context, self._load)
        self.server = grpc.aio.server(options=server_options())
        self.names = self.service.register(self.server)
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.may_load = threading.Event()

    def _load(self) -> Drafter:
        self.may_load.wait(60)
        drafter: Drafter = self.drafter
        return drafter

    async def start(self) -> None:
        self.may_load.set()
        await self.server.start()
        await self.service.start()

    async def stop(self) -> None:
        await self.service.stop(2)
        await self.server.stop(0)

    @contextlib.asynccontextmanager
    async def stub(self) -> AsyncIterator["draft_source_pb2_grpc.DraftSourceAsyncStub"]:
        async with open_channel(f"127.0.0.1:{self.port}") as channel:
            yield draft_source_pb2_grpc.DraftSourceStub(channel)

    def metric(self, name: str) -> float:
        return self.metrics.registry.get_sample_value(f"outrider_drafter_{name}") or 0.0


@pytest.fixture
async def run(fake_drafter: Any) -> AsyncIterator[Callable[..., Any]]:
    """A function that starts drafters, which stop after the test."""
    started: list[Running] = []

    async def start(drafter: Any = None, **settings: Any) -> Running:
        running = Running(fake_drafter() if drafter is None else drafter, **settings)
        started.append(running)
        await running.start()
        return running

    yield start
    for running in started:
        await running.stop()
        assert running.failed == []


def follow(alias: int, ids: Sequence[int] = PROMPT, **given: Any) -> draft_source_pb2.Follow:
    values: dict[str, Any] = {
        "key": common_pb2.SessionKey(tenant="t", session=f"s{alias}"),
        "epoch": 7,
        "model": "target",
        "prompt_length": len(ids),
        "limit": 150,
        "sampling": common_pb2.Sampling(temperature=0),
        "seed": 11,
        "node_limit": 100,
        "vocabulary_size": 24,
    }
    return draft_source_pb2.Follow(alias=alias, ids=ids, **(values | given))


def progress(alias: int, before: Sequence[int], ids: Sequence[int]) -> draft_source_pb2.AttachRequest:
    one = draft_source_pb2.Progress(
        alias=alias, position=len(before), ids=ids, prefix_hash=prefix_hash([*before, *ids])
    )
    return draft_source_pb2.AttachRequest(progress=[one])


class Verifier:
    """The verifier's end of one Attach stream."""

    def __init__(self, stub: Any) -> None:
        self.call = stub.Attach()
        self.refusals: dict[int, str] = {}
        self._drafts: dict[int, deque[draft_source_pb2.Draft]] = defaultdict(deque)

    async def write(self, message: draft_source_pb2.AttachRequest) -> None:
        await self.call.write(message)

    async def follow(self, *follows: draft_source_pb2.Follow) -> None:
        await self.write(draft_source_pb2.AttachRequest(follow=follows))

    async def draft(self, alias: int) -> draft_source_pb2.Draft:
        """The next draft under an alias."""
        while not self._drafts[alias]:
            await self._read()
        return self._drafts[alias].popleft()

    async def refusal(self, alias: int) -> str:
        """Why an alias is not followed."""
        while alias not in self.refusals:
            await self._read()
        return self.refusals[alias]

    async def _read(self) -> None:
        async with asyncio.timeout(60):
            response = await self.call.read()
        assert isinstance(response, draft_source_pb2.AttachResponse)
        self.refusals |= {one.alias: one.message for one in response.refusals}
        for draft in response.drafts:
            self._drafts[draft.alias].append(draft)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not true():  # noqa: ASYNC110  (what is waited for happens in another thread)
            await asyncio.sleep(0.01)


async def test_a_drafter_says_what_it_can_follow(run: Any) -> None:
    running = await run(name="small")
    async with running.stub() as stub:
        described = await stub.Describe(draft_source_pb2.SourceDescribeRequest())
    assert (described.name, described.model, described.vocabulary_size) == ("small", "fake", 24)
    assert described.max_length == 200
    assert described.HasField("learns")
    assert not described.learns, "its sessions leave nothing in it"
    assert running.names == ("outrider.v1.DraftSource",)


async def test_calls_before_the_model_is_loaded_are_sent_elsewhere(fake: Any) -> None:
    running = Running(fake)
    await running.server.start()
    try:
        async with running.stub() as stub:
            with pytest.raises(grpc.aio.AioRpcError) as described:
                await stub.Describe(draft_source_pb2.SourceDescribeRequest())
            with pytest.raises(grpc.aio.AioRpcError) as attached:
                await stub.Attach().read()
    finally:
        await running.stop()
    assert described.value.code() == attached.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_drafts_stream_as_the_tree_grows_and_follow_what_was_committed(run: Any) -> None:
    running = await run()
    async with running.stub() as stub:
        call = Verifier(stub)
        await call.follow(follow(3))
        first = await call.draft(3)
        assert (first.epoch, first.base, first.prefix_hash) == (7, len(PROMPT), prefix_hash(PROMPT))
        best = int(running.drafter.logits(PROMPT).argmax())
        assert first.ids[0] == best
        second = await call.draft(3)
        assert (second.base, second.prefix_hash) == (len(PROMPT) + 1, prefix_hash([*PROMPT, best]))
        await call.write(progress(3, PROMPT, [22, 23]))
        ids = (*PROMPT, 22, 23)
        while (await call.draft(3)).prefix_hash != prefix_hash(ids):
            pass
        call.call.cancel()


async def test_several_sessions_and_streams_are_told_apart(run: Any) -> None:
    running = await run()
    async with running.stub() as stub:
        left, right = Verifier(stub), Verifier(stub)
        key = common_pb2.SessionKey(session="other")
        await left.follow(follow(1), follow(2, (9, 9)))
        await right.follow(follow(1, (8, 8, 8), key=key))
        assert (await left.draft(1)).prefix_hash == prefix_hash(PROMPT)
        assert (await left.draft(2)).prefix_hash == prefix_hash((9, 9))
        assert (await right.draft(1)).prefix_hash == prefix_hash((8, 8, 8))
        left.call.cancel()
        right.call.cancel()


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"ids": [1] * 201, "prompt_length": 3}, "201 ids; source 'fake' can follow 200"),
        ({"ids": [1, 24], "prompt_length": 1}, "id 24 is outside this drafter's vocabulary of 24"),
        ({"ids": []}, "prompt_length is 5 of 0 ids"),
        ({"prompt_length": 0}, "prompt_length is 0 of 5 ids"),
        ({"vocabulary_size": 0}, "vocabulary_size is 0"),
        ({"key": common_pb2.SessionKey()}, "session has 0 characters"),
        ({"sampling": common_pb2.Sampling(temperature=float("nan"))}, "temperature is nan"),
        ({"sampling": common_pb2.Sampling(top_p=1.5)}, "top_p is 1.5"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_cannot_be_followed_is_refused_by_alias_and_the_stream_goes_on(
    run: Any, wrong: dict[str, Any], why: str
) -> None:
    running = await run()
    bad = follow(4, **({"prompt_length": len(PROMPT)} | {k: v for k, v in wrong.items() if k != "ids"}))
    if "ids" in wrong:
        bad.ClearField("ids")
        bad.ids.extend(wrong["ids"])
    async with running.stub() as stub:
        call = Verifier(stub)
        await call.follow(bad, follow(5))
        assert why in await call.refusal(4)
        assert (await call.draft(5)).ids
        call.call.cancel()


async def test_another_tokenizer_is_refused_with_both_digests(run: Any, fake: Any) -> None:
    fake.tokenizer_digest = "aa11"
    running = await run(fake)
    async with running.stub() as stub:
        call = Verifier(stub)
        await call.follow(follow(1, tokenizer_digest="bb22"), follow(2, tokenizer_digest="aa11"), follow(3))
        assert "none at all" in await call.refusal(3)
        for word in ("target", "bb22", "fake", "aa11"):
            assert word in call.refusals[1]
        assert (await call.draft(2)).ids
        assert set(call.refusals) == {1, 3}
        call.call.cancel()


async def test_a_wrong_hash_is_refused_and_unknown_aliases_are_counted(run: Any) -> None:
    running = await run()
    async with running.stub() as stub:
        call = Verifier(stub)
        await call.follow(follow(1))
        await call.draft(1)
        await call.write(draft_source_pb2.AttachRequest(end=[8, 9]))
        wrong = progress(1, PROMPT, [2])
        wrong.progress[0].prefix_hash ^= 1
        await call.write(wrong)
        assert "follow the session again" in await call.refusal(1)
        await call.follow(follow(2, (*PROMPT, 2), key=common_pb2.SessionKey(tenant="t", session="s1")))
        assert (await call.draft(2)).base == len(PROMPT) + 1
        assert running.metric("unknown_aliases_total") == 2
        call.call.cancel()


async def test_garbage_fails_its_own_stream_alone(run: Any) -> None:
    running = await run()
    async with running.stub() as stub, open_channel(f"127.0.0.1:{running.port}") as channel:
        good = Verifier(stub)
        await good.follow(follow(1))
        await good.draft(1)
        raw = channel.stream_stream(ATTACH, request_serializer=bytes, response_deserializer=bytes)()
        await raw.write(b"\xff\xff garbage \xff")
        with pytest.raises(grpc.aio.AioRpcError):
            await raw.read()
        await good.write(progress(1, PROMPT, [22]))
        while (await good.draft(1)).base <= len(PROMPT):
            pass
        good.call.cancel()


async def test_a_broken_stream_keeps_the_cache_for_the_next_one(run: Any) -> None:
    running = await run()
    async with running.stub() as stub:
        call = Verifier(stub)
        await call.follow(follow(1))
        await call.draft(1)
        call.call.cancel()
        await until(lambda: running.metric("sessions_kept") == 1)
        before = sum(running.drafter.passes)
        again = Verifier(stub)
        await again.follow(follow(6, node_limit=2, key=common_pb2.SessionKey(tenant="t", session="s1")))
        assert (await again.draft(6)).base == len(PROMPT)
        assert sum(running.drafter.passes) - before == 1
        again.call.cancel()


async def test_the_cache_of_a_broken_stream_is_freed_when_its_time_is_up(run: Any) -> None:
    running = await run(keep_s=0.2)
    async with running.stub() as stub:
        call = Verifier(stub)
        await call.follow(follow(1))
        await call.draft(1)
        call.call.cancel()
        await until(lambda: running.metric("sessions_kept") == 1)
        await until(lambda: running.metric("kv_slots") == 0)


async def test_an_end_frees_the_memory_and_half_closing_ends_the_stream(run: Any) -> None:
    running = await run()
    async with running.stub() as stub:
        call = Verifier(stub)
        await call.follow(follow(1), follow(2))
        await call.draft(2)
        assert running.metric("kv_slots") > 0
        await call.write(draft_source_pb2.AttachRequest(end=[1, 2]))
        await until(lambda: running.metric("kv_slots") == 0)
        await call.call.done_writing()
        async with asyncio.timeout(60):
            while await call.call.read() is not grpc.aio.EOF:
                pass
            assert await call.call.code() == grpc.StatusCode.OK


async def test_a_verifier_that_does_not_read_costs_its_oldest_drafts_and_nobody_else(
    run: Any, fake_drafter: Any
) -> None:
    running = await run(fake_drafter(max_length=100_000), children=20, floor=0, depth=2)
    # Without probing for bandwidth the transport holds 64 KB for a peer that does not read, else megabytes.
    options = [("grpc.http2.bdp_probe", 0)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{running.port}", options=options) as channel:
        stub = draft_source_pb2_grpc.DraftSourceStub(channel)
        stalled = Verifier(stub)
        await stalled.follow(follow(1, limit=100_000))
        ids, sent = list(PROMPT), 0
        async with asyncio.timeout(60):
            while not running.metric("nodes_unread_total"):
                await stalled.write(progress(1, ids, [sent % 24]))
                ids.append(sent % 24)
                sent += 1
                await asyncio.sleep(0.002)
        other = Verifier(stub)
        await other.follow(follow(2))
        assert (await other.draft(2)).ids
        stalled.call.cancel()
        other.call.cancel()


async def test_stopping_ends_held_streams_and_the_worker(fake: Any) -> None:
    running = Running(fake)
    await running.start()
    async with running.stub() as stub:
        call = Verifier(stub)
        await call.follow(follow(1))
        await call.draft(1)
        await running.stop()
        with contextlib.suppress(grpc.aio.AioRpcError):
            async with asyncio.timeout(60):
                while await call.call.read() is not grpc.aio.EOF:
                    pass
    assert fake.cached_tokens == 0
    assert running.failed == []


async def test_a_worker_that_dies_ends_the_process(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    running = Running(fake)
    await running.start()
    monkeypatch.setattr(running.service.worker.roster, "expire", lambda now: 1 / 0)
    async with running.stub() as stub:
        call = Verifier(stub)
        await call.follow(follow(1))
        await until(lambda: bool(running.failed))
        call.call.cancel()
    assert isinstance(running.failed[0], ZeroDivisionError)
    await running.stop()


async def test_everything_counted_is_on_the_metrics_page(run: Any) -> None:
    running = await run()
    async with running.stub() as stub:
        call = Verifier(stub)
        await call.follow(follow(1))
        await call.draft(1)
        call.call.cancel()
    page = running.metrics.exposition().decode()
    for name in (
        "passes_total",
        "rows_total",
        "nodes_drafted_total",
        "nodes_unread_total",
        "sessions",
        "kv_slots",
    ):
        assert f"\noutrider_drafter_{name} " in page
    assert running.metric("passes_total") > 0
