"""Draft sources that lie: each describes itself as a good source, then sends what no source may send.

They run on the benchmark's own loop; the services' sessions draft from them, the canary's too.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc.aio

from benchmarks.hostile.attacked_services import Ports
from benchmarks.hostile.inputs import UNLIMITED, HostileClass, Input
from outrider.tokens import TokenTable
from outrider.v1 import draft_source_pb2 as pb
from outrider.wire.workers import CONTRACT

LIES_S = 3.0
"""Seconds for which each lie is told."""
MB = 1 << 20


def _draft(follow: pb.Follow, **fields: Any) -> bytes:
    base: dict[str, Any] = {
        "alias": follow.alias,
        "epoch": follow.epoch,
        "base": len(follow.ids),
        "ids": [5],
        "parents": b"\0",
    }
    return pb.AttachResponse(drafts=[pb.Draft(**(base | fields))]).SerializeToString()


LIES: dict[str, Callable[[pb.Follow], tuple[bytes, int]]] = {
    "junk": lambda follow: (b"\xff" * 100, 1),
    "huge draft": lambda follow: (_draft(follow, ids=range(4_000_000), parents=bytes(4 * MB)), 1),
    "many drafts": lambda follow: (_draft(follow) * 100_000, 1),
    "unknown alias": lambda follow: (_draft(follow, alias=2**31), 20_000),
    "ids out of range": lambda follow: (_draft(follow, ids=[2**32 - 1] * 16, parents=bytes(16)), 100),
    "parents that are none": lambda follow: (_draft(follow, ids=[5] * 4, parents=b"\xff" * 4), 100),
    "base ahead": lambda follow: (_draft(follow, base=2**31), 100),
    "survival": lambda follow: (_draft(follow, survival=bytes(MB)), 10),
    "refusals": lambda follow: (
        pb.AttachResponse(
            refusals=[pb.Refusal(alias=follow.alias, message="\n" * 10_000)] * 500
        ).SerializeToString(),
        1,
    ),
    "sources": lambda follow: (pb.AttachResponse(sources=bytes(20 * MB)).SerializeToString(), 1),
}
"""By name, a message for a followed session and how often it is sent. A session has at most 16 sources."""


HANG_UP = "hang up"


class LyingSource:
    """Serves a draft source that tells one lie of LIES, or hangs up, while `lying` is true."""

    def __init__(self, lie: str, digest: str) -> None:
        """Serves once `start` was awaited; `digest` is that of the target's tokenizer."""
        name = f"liar-{lie.replace(' ', '-')}"
        description = pb.SourceDescription(
            name=name, names=[name], tokenizer_digest=digest, contract=CONTRACT
        )
        self._description = description.SerializeToString()
        self._server = grpc.aio.server(options=UNLIMITED)
        self._server.add_generic_rpc_handlers((_Handlers(self),))
        self._lie = lie
        self._told = 0
        self.lying = False
        self.address = ""

    async def start(self) -> None:
        """Binds a free port and serves; `address` is known then."""
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()

    async def stop(self) -> None:
        """Ends all streams."""
        await self._server.stop(0)

    async def describe(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """Describes a good source."""
        yield self._description

    async def attach(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """Reads what the verifier sends, and lies about each session as long as the mode says so."""
        follows: dict[int, pb.Follow] = {}

        async def read() -> None:
            async for data in requests:
                message = pb.AttachRequest.FromString(data)
                follows.update({follow.alias: follow for follow in message.follow})
                for alias in message.end:
                    follows.pop(alias, None)

        reading = asyncio.create_task(read())
        try:
            while not reading.done():
                if self.lying and self._lie == HANG_UP and follows:
                    self._told += 1
                    return
                for follow in list(follows.values()) if self.lying and self._lie != HANG_UP else ():
                    message, times = LIES[self._lie](follow)
                    for _ in range(times):
                        self._told += 1
                        yield message
                await asyncio.sleep(0.05)
        finally:
            reading.cancel()

    async def lie(self, ports: Ports) -> str:
        """An Input: lies for LIES_S seconds; the outcome says whether somebody listened."""
        before, self.lying = self._told, True
        try:
            await asyncio.sleep(LIES_S)
        finally:
            self.lying = False
        return "told" if self._told > before else "not told"


class LyingSources:
    """A lying source for each lie."""

    def __init__(self, target: str) -> None:
        """`target` is the folder of the target model."""
        digest = TokenTable.from_json((Path(target) / "tokenizer.json").read_text()).digest
        self._sources = [LyingSource(lie, digest) for lie in (*LIES, HANG_UP)]

    async def start(self) -> list[str]:
        """Serves all; returns their addresses."""
        for source in self._sources:
            await source.start()
        return [source.address for source in self._sources]

    async def stop(self) -> None:
        """Ends all."""
        for source in self._sources:
            await source.stop()

    @property
    def classes(self) -> Sequence[HostileClass]:
        """The class of their lies."""
        inputs: list[Input] = [source.lie for source in self._sources]
        return [HostileClass("lying sources", lambda: inputs, at_once=1)]


class _Handlers(grpc.GenericRpcHandler):
    """The methods of DraftSource, with bytes for messages."""

    def __init__(self, source: LyingSource) -> None:
        described: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(
            source.describe
        )
        attached: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(source.attach)
        service = "/outrider.v1.DraftSource"
        self._methods = {f"{service}/Describe": described, f"{service}/Attach": attached}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """The handler of a method; None where there is none."""
        return self._methods.get(handler_call_details.method)
