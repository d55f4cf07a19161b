"""A drafter that is faulty on purpose: it passes real drafts on, a second late or with random tokens.

A benchmark starts it as `python -m benchmarks.shared.faulty_drafter ADDRESS delayed|garbage`; the first line
of its output is its own address. It describes itself as the real drafter does, so only its drafts look wrong.
"""

import asyncio
import random
import sys
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import grpc.aio

from benchmarks.shared.standin_server import serve_until_stdin_ends
from outrider.v1 import draft_source_pb2 as pb
from outrider.v1.draft_source_pb2_grpc import (
    DraftSourceServicer,
    DraftSourceStub,
    add_DraftSourceServicer_to_server,
)

if TYPE_CHECKING:
    from outrider.v1.draft_source_pb2_grpc import DraftSourceAsyncStub  # a name of the type stubs only

DELAY_S = 1.0


class FaultyDraftSource(DraftSourceServicer):
    """A draft source between a verifier and a real draft source, whose drafts it spoils or delays."""

    def __init__(self, real: "DraftSourceAsyncStub", mode: str) -> None:
        self._real = real
        self._mode = mode
        self._random = random.Random(0)
        self._vocabulary_size = 0

    async def Describe(self, request: pb.SourceDescribeRequest, context: Any) -> pb.SourceDescription:
        """Answers with the real source's description and keeps its vocabulary size."""
        description: pb.SourceDescription = await self._real.Describe(request)
        self._vocabulary_size = description.vocabulary_size
        return description

    async def Attach(
        self, requests: AsyncIterator[pb.AttachRequest], context: Any
    ) -> AsyncIterator[pb.AttachResponse]:
        """Yields the real source's drafts, each a second late or with random tokens."""
        late: asyncio.Queue[tuple[float, pb.AttachResponse]] = asyncio.Queue()
        clock = asyncio.get_running_loop().time

        async def read() -> None:
            async for response in self._real.Attach(requests):
                await late.put((clock(), response))

        reading = asyncio.create_task(read())
        try:
            while True:
                arrived_s, response = await late.get()
                if self._mode == "delayed":
                    await asyncio.sleep(max(0.0, arrived_s + DELAY_S - clock()))
                else:
                    self._spoil(response)
                yield response
        finally:
            reading.cancel()

    def _spoil(self, response: pb.AttachResponse) -> None:
        for draft in response.drafts:
            draft.ids[:] = [self._random.randrange(self._vocabulary_size) for _ in draft.ids]


async def serve(address: str, mode: str) -> None:
    """Stands in front of the drafter at `address` until stdin ends."""
    async with grpc.aio.insecure_channel(address) as channel:
        server = grpc.aio.server()
        faulty = FaultyDraftSource(DraftSourceStub(channel), mode)
        await faulty.Describe(pb.SourceDescribeRequest(), None)
        add_DraftSourceServicer_to_server(faulty, server)
        await serve_until_stdin_ends(server, grace_s=1.0)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], sys.argv[2]))
