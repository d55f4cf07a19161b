"""A peer of the verifier that sends junk, or too much, costs its own stream and nobody else's."""

import asyncio
import gc
import logging
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest
from harness import Verifier, eventually, serving
from ngram_lm import NgramLM

from outrider.v1 import common_pb2, draft_source_pb2, verifier_pb2
from outrider.wire.channel import open_channel, server_options
from outrider.wire.incoming.shape import BATCH_ENTRIES
from tests.in_time import in_time
from tests.loop_time import longest_callback
from tests.traces import traces

JUNK = b"\xff\xff\xff"


class MadSource(grpc.GenericRpcHandler):
    """A source that answers each Attach with the same bytes, `times` times."""

    def __init__(self, data: bytes, times: int = 1) -> None:
        self.sent = 0
        self._data = data
        self._times = times

    def service(self, details: Any) -> Any:
        if not details.method.endswith("/Attach"):
            return None
        return grpc.stream_stream_rpc_method_handler(self._attach)

    async def _attach(self, requests: Any, context: Any) -> AsyncIterator[bytes]:
        for _ in range(self._times):
            self.sent += 1
            yield self._data
        await asyncio.sleep(60)


@asynccontextmanager
async def served_source(source: grpc.GenericRpcHandler) -> AsyncIterator[str]:
    """The address of a source that is served."""
    server = grpc.aio.server(options=server_options())
    server.add_generic_rpc_handlers((source,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def beside(verifier: Verifier, address: str) -> None:
    """Decodes beside a mad source until the source is muted; ids stay those of plain decoding."""
    plain = await verifier.generate([1, 2, 3], new=12)
    drafted = await verifier.generate([1, 2, 3], new=12, sources=[("mad", address)])
    async with asyncio.timeout(100):
        while not verifier.metric("source_drafts_dropped_total", reason="malformed"):
            await verifier.generate([4, 5], new=200, sources=[("mad", address)])
    assert drafted.ids == plain.ids


DRAFT = draft_source_pb2.Draft(alias=2**31, epoch=1, base=3, ids=[5], parents=b"\0")
MANY_DRAFTS = draft_source_pb2.AttachResponse(drafts=[DRAFT] * 60_000).SerializeToString()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (JUNK, "3 bytes that are no outrider.v1.AttachResponse"),
        (MANY_DRAFTS, "the message has more than 16384 values"),
        (MANY_DRAFTS * 2, "at most 2097152 are read here"),
    ],
    ids=["junk", "many drafts", "large"],
)
async def test_a_source_whose_bytes_cannot_be_read_is_left_alone_and_the_log_has_no_trace(
    caplog: pytest.LogCaptureFixture, data: bytes, said: str
) -> None:
    async with served_source(MadSource(data)) as address, serving(NgramLM(), orphan_grace_s=60.0) as verifier:
        with caplog.at_level(logging.WARNING), longest_callback() as longest:
            await beside(verifier, address)
    messages = [record.getMessage() for record in caplog.records]
    assert not traces(caplog)
    assert any(text.startswith("source muted for") for text in messages)
    assert any(said in text for text in messages)
    in_time(longest.ms < 60, longest)  # the source's own work is on this loop, too


async def test_a_source_that_drafts_for_sessions_it_never_had_is_left_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = MadSource(draft_source_pb2.AttachResponse(drafts=[DRAFT]).SerializeToString(), 100_000)
    async with served_source(source) as address, serving(NgramLM(), orphan_grace_s=60.0) as verifier:
        with caplog.at_level(logging.WARNING):
            await beside(verifier, address)
            await eventually(lambda: any("source muted for" in record.message for record in caplog.records))
    assert source.sent < 100_000


UNARY = {
    "Describe": "VerifierDescribeRequest",
    "Open": "OpenRequest",
    "Cancel": "VerifierCancelRequest",
    "Explain": "ExplainRequest",
}


async def test_junk_is_an_invalid_argument_on_every_method(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(NgramLM()) as verifier, grpc.aio.insecure_channel(verifier.address) as channel:
        for method, kind in UNARY.items():
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await channel.unary_unary(f"/outrider.v1.Verifier/{method}")(JUNK)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert f"3 bytes that are no outrider.v1.{kind}" in str(refused.value.details())
        watch = channel.stream_stream("/outrider.v1.Verifier/Watch")()
        await watch.write(JUNK)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await read_to_the_end(watch)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "no outrider.v1.WatchRequest" in str(refused.value.details())
    assert not traces(caplog)


@pytest.fixture
def memory() -> Iterator[Callable[[], int]]:
    """Bytes of all Python objects now; garbage that only Python's collector finds stays."""
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
        gc.enable()


@pytest.mark.parametrize(
    ("method", "data"),
    [
        ("Cancel", b"\xaa\x06\x01x" * 2**18),
        ("Open", b"\xaa\x06\x01x" * 2**18),
        ("Cancel", b"\xff" * 2**15),
        ("Watch", b"\xff" * 2**15),
        ("Open", verifier_pb2.OpenRequest(stop=["s" * 2**15]).SerializeToString()),
    ],
    ids=["too large", "too many values", "junk", "junk in a stream", "refused by its content"],
)
async def test_refused_messages_take_no_memory_until_garbage_is_collected(
    memory: Callable[[], int], method: str, data: bytes
) -> None:
    async def once(data: bytes) -> AsyncIterator[bytes]:
        yield data

    async with serving(NgramLM()) as verifier, grpc.aio.insecure_channel(verifier.address) as channel:
        held = []
        for _ in range(24):
            call = channel.stream_stream(f"/outrider.v1.Verifier/{method}")(once(data))
            with suppress(grpc.aio.AioRpcError):
                await read_to_the_end(call)
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
            held.append(memory())
        assert held[-1] - held[7] < 8 * len(data)


async def watched_to_the_end(verifier: Verifier, request: verifier_pb2.WatchRequest) -> grpc.aio.AioRpcError:
    call = verifier.stub.Watch()
    await call.write(request)
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await asyncio.wait_for(read_to_the_end(call), 60)
    return ended.value


async def read_to_the_end(call: Any) -> None:
    async for _ in call:
        pass


async def test_a_watch_for_more_than_there_can_be_ends_its_own_stream_alone() -> None:
    async with serving(NgramLM()) as verifier:
        request = verifier.request([1, 2, 3], new=200)
        await verifier.open(request)
        reading = asyncio.create_task(verifier.read(request))
        adds = [verifier_pb2.Cursor(alias=alias) for alias in range(2_100)]
        same = [
            verifier_pb2.Cursor(alias=alias, key=request.key, epoch=request.epoch, position=3)
            for alias in range(9)
        ]
        with longest_callback() as longest:
            many = await watched_to_the_end(verifier, verifier_pb2.WatchRequest(add=adds))
            drops = await watched_to_the_end(verifier, verifier_pb2.WatchRequest(drop=range(5_000)))
            again = await watched_to_the_end(verifier, verifier_pb2.WatchRequest(add=same))
        codes = {error.code() for error in (many, drops, again)}
        assert codes == {grpc.StatusCode.INVALID_ARGUMENT}
        assert "add has 2100 entries" in str(many.details())
        assert "drop has 5000 entries" in str(drops.details())
        assert "has 8 cursors of this stream already" in str(again.details())
        assert len((await reading).ids) == 200
    in_time(longest.ms < 60, longest)  # the client's own work is on this loop, too


async def test_two_thousand_cursors_are_answered_in_pieces() -> None:
    async with serving(NgramLM()) as verifier:
        key = common_pb2.SessionKey(session="nobody")
        adds = [verifier_pb2.Cursor(alias=alias, key=key, epoch=1) for alias in range(2_000)]
        call = verifier.stub.Watch()
        await call.write(verifier_pb2.WatchRequest(add=adds))
        unknown, pieces = list[int](), list[int]()
        async with asyncio.timeout(60):
            async for response in call:
                unknown += [committed.alias for committed in response.committed]
                pieces.append(len(response.committed))
                if len(unknown) >= 2_000:
                    break
        call.cancel()
    assert sorted(unknown) == list(range(2_000))
    assert max(pieces) <= BATCH_ENTRIES < 2_000


async def test_a_long_answer_reaches_a_late_reader_in_several_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("verifier_service.sessions.watch.IDS_PER_MESSAGE", 16)
    async with serving(NgramLM()) as verifier:
        plain = await verifier.generate([1, 2, 3], new=100)
        request = verifier.request([1, 2, 3], new=100)
        await verifier.open(request)
        await verifier.read(request)
        late = await verifier.read(request)
    assert late.ids == plain.ids
    assert late.finished


async def test_a_verifiers_junk_breaks_no_session_of_a_source(caplog: pytest.LogCaptureFixture) -> None:
    """The same bytes the other way round: a DraftSource refuses them, by name."""
    from outrider.source.server import SourceServer

    source: Any = SourceServer(lambda publish: None, loading="loading")  # type: ignore[arg-type, return-value]
    server = grpc.aio.server(options=server_options())
    source.register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary("/outrider.v1.DraftSource/Describe")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(JUNK)
    await server.stop(0)
    name = draft_source_pb2.SourceDescribeRequest.DESCRIPTOR.full_name
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert f"no {name}" in str(refused.value.details())
