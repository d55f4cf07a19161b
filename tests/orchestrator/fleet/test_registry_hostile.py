"""A worker that announces without end, or sends junk, costs the orchestrator's loop little at a time."""

import asyncio
import logging
from typing import Any

import grpc
import pytest

from orchestrator.fleet.directory import MAX_UNANSWERED
from outrider.v1 import registry_pb2
from outrider.v1.registry_pb2_grpc import RegistryStub
from outrider.wire.channel import open_channel
from tests.in_time import in_time
from tests.loop_time import longest_callback
from tests.traces import traces


def announcement(port: int) -> registry_pb2.AnnounceRequest:
    return registry_pb2.AnnounceRequest(
        role=registry_pb2.WORKER_ROLE_VERIFIER, address=f"127.0.0.1:{port}", contract=1, model="m"
    )


async def test_a_flood_of_announcements_is_gathered_and_ends_at_a_bound(world: Any) -> None:
    front = await world.front([], registry_bind="127.0.0.1:0")
    async with open_channel(front.registry) as channel:
        stub = RegistryStub(channel)
        with longest_callback() as longest:
            calls = []
            for port in range(1, MAX_UNANSWERED + 65):
                calls.append(stub.Announce(announcement(port)))
                await asyncio.sleep(0.001)  # the caller's own work is on this loop, too
            answers = await asyncio.gather(*calls, return_exceptions=True)
    refused = [answer for answer in answers if isinstance(answer, grpc.aio.AioRpcError)]
    assert len(refused) == 64
    assert {error.code() for error in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert "addresses at which no worker has answered" in str(refused[0].details())
    in_time(longest.ms < 20, f"{longest.ms:.1f} ms")


async def test_junk_at_the_registry_is_an_invalid_argument(
    world: Any, caplog: pytest.LogCaptureFixture
) -> None:
    front = await world.front([], registry_bind="127.0.0.1:0")
    async with grpc.aio.insecure_channel(front.registry) as channel:
        call = channel.unary_unary("/outrider.v1.Registry/Announce")
        for junk, why in (
            (b"\xff\xff", "2 bytes that are no outrider.v1.AnnounceRequest"),
            (b"\x12" + b"\xff" * 70_000, "70001 bytes; at most 65536 are read here"),
        ):
            with caplog.at_level(logging.WARNING), pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(junk)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert why in str(refused.value.details())
    assert not traces(caplog)
