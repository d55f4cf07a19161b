"""A drafter that is faulty on purpose: passes a real one's drafts on, a second late or with random ids.

Started by a benchmark as `python benchmarks/faulty.py ADDRESS delayed|garbage`; prints its own address. It
says what the real one says of itself, so nothing about it looks wrong but what it sends.
"""

import asyncio
import random
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from outrider.v1 import draft_source_pb2 as pb
from outrider.v1.draft_source_pb2_grpc import (
    DraftSourceServicer,
    DraftSourceStub,
    add_DraftSourceServicer_to_server,
)

DELAY_S = 1.0


class Faulty(DraftSourceServicer):
    """A DraftSource between a verifier and a real one."""

    def __init__(self, real: DraftSourceStub, mode: str) -> None:
        self._real = real
        self._mode = mode
        self._random = random.Random(0)
        self._width = 0

    async def Describe(self, request: pb.SourceDescribeRequest, context: Any) -> pb.SourceDescription:
        """What the real one says."""
        description: pb.SourceDescription = await self._real.Describe(request)
        self._width = description.vocabulary_size
        return description

    async def Attach(
        self, requests: AsyncIterator[pb.AttachRequest], context: Any
    ) -> AsyncIterator[pb.AttachResponse]:
        """The real one's drafts, spoilt."""
        late: asyncio.Queue[tuple[float, pb.AttachResponse]] = asyncio.Queue()
        clock = asyncio.get_running_loop().time

        async def read() -> None:
            async for response in self._real.Attach(requests):
                await late.put((clock(), response))

        reading = asyncio.create_task(read())
        try:
            while True:
                came, response = await late.get()
                if self._mode == "delayed":
                    await asyncio.sleep(max(0.0, came + DELAY_S - clock()))
                else:
                    self._spoil(response)
                yield response
        finally:
            reading.cancel()

    def _spoil(self, response: pb.AttachResponse) -> None:
        for draft in response.drafts:
            draft.ids[:] = [self._random.randrange(self._width) for _ in draft.ids]


async def serve(address: str, mode: str) -> None:
    """Serves until stdin ends."""
    async with grpc.aio.insecure_channel(address) as channel:
        server = grpc.aio.server()
        faulty = Faulty(DraftSourceStub(channel), mode)
        await faulty.Describe(pb.SourceDescribeRequest(), None)
        add_DraftSourceServicer_to_server(faulty, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        print(f"127.0.0.1:{port}", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        await server.stop(1.0)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], sys.argv[2]))
