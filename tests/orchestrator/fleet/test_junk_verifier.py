"""A verifier whose answers are no messages serves nobody, and takes nothing else down."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from outrider.v1 import verifier_pb2
from outrider.wire.channel import server_options
from outrider.wire.incoming.malformed import MALFORMED
from tests.orchestrator.conftest import FakeVerifier, World, next_id
from tests.traces import traces

JUNK = b"\xff\xff\xff"


class JunkVerifier(grpc.GenericRpcHandler):
    """Answers some methods with bytes that are no message, and the others as a verifier does."""

    def __init__(self, *methods: str) -> None:
        self.methods = methods
        self.calls = 0

    def service(self, details: Any) -> Any:
        method = details.method.rpartition("/")[2]
        if method == "Describe":
            return grpc.unary_unary_rpc_method_handler(self._describe)
        if method == "Open":
            return grpc.unary_unary_rpc_method_handler(self._junk)
        if method == "Watch":
            return grpc.stream_stream_rpc_method_handler(self._watch)
        return None

    async def _describe(self, request: bytes, context: Any) -> bytes:
        if "Describe" in self.methods:
            return await self._junk(request, context)
        described: verifier_pb2.VerifierDescription = await FakeVerifier().Describe(None, context)
        return described.SerializeToString()

    async def _junk(self, request: bytes, context: Any) -> bytes:
        self.calls += 1
        return JUNK

    async def _watch(self, requests: Any, context: Any) -> AsyncIterator[bytes]:
        beat = verifier_pb2.WatchResponse(beat=verifier_pb2.Beat(step=1))
        while True:
            if "Watch" in self.methods:
                self.calls += 1
                yield JUNK
            else:
                yield beat.SerializeToString()
            await asyncio.sleep(0.01)


@asynccontextmanager
async def listening(junk: JunkVerifier) -> AsyncIterator[str]:
    server = grpc.aio.server(options=server_options())
    server.add_generic_rpc_handlers((junk,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@pytest.mark.parametrize("method", ["Describe", "Watch", "Open"])
async def test_a_verifiers_junk_costs_it_its_own_requests_alone(
    world: World, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    MALFORMED._next_line_at = 0.0  # an earlier test's line may be that of this second
    junk, good = JunkVerifier(method), await world.verifier()
    noted, began = sum(MALFORMED.counts.values()), time.monotonic()
    async with listening(junk) as address:
        with caplog.at_level(logging.WARNING):
            front = await world.ready(await world.front([address, good.address]))
            fleet = front.service._fleet  # the junk one may be the first to be known
            await world.until(lambda: good.address in [link.address for link in fleet.verifiers_for("toy")])
            for _ in range(6):
                answer = await front.client.stream(ids=[5, 6, 7], max_tokens=20).completion()
                assert list(answer.ids) == [next_id(position) for position in range(3, 23)]
            async with asyncio.timeout(60):
                while not junk.calls:  # noqa: ASYNC110  # the server's own count
                    await asyncio.sleep(0.01)
            assert (await front.client.stream(ids=[5, 6, 7], max_tokens=20).completion()).ids
    assert sum(MALFORMED.counts.values()) > noted
    texts = [record.getMessage() for record in caplog.records]
    lines = [text for text in texts if text.startswith("malformed message: no outrider.v1.")]
    assert 1 <= len(lines) <= 2 + time.monotonic() - began, "one a second at most"
    assert not traces(caplog)
