"""A TCP connection across a network: a proxy in this process that delays, loses and cuts.

TCP sends lost segments again. So a lost segment arrives later, by the time of a retransmission, and holds up
all segments behind it.
"""

import asyncio
import contextlib
import random
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

SEGMENT = 1448
"""Bytes of one TCP segment."""
LEAST_RETRANSMISSION_MS = 200.0
"""The least time after which Linux sends a lost segment again."""
START_S = 10.0


class DelayedLink:
    """A proxy before a server; clients dial `address`.

    Args:
        server: host:port of the server.
        rtt_ms: round trip of the link in milliseconds, half of it each way.
        loss: share of segments that are lost, 0 to 1.

    Attributes:
        address: host:port at which the proxy listens.
        bytes_up: bytes that clients sent.
        bytes_down: bytes that clients received.
    """

    def __init__(self, server: str, rtt_ms: float = 0.0, loss: float = 0.0, seed: int = 0) -> None:
        self.address = ""
        self.bytes_up = self.bytes_down = 0
        self.rtt_ms = rtt_ms
        self._server = server
        self._loss = loss
        self._random = random.Random(seed)
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._stopped = asyncio.Event()
        self._thread = threading.Thread(
            target=self._loop.run_until_complete, args=(self._run(),), daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._started.wait(START_S):
            raise TimeoutError("the link did not start")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join()
        self._loop.close()

    def cut(self) -> None:
        """Breaks all connections; clients can dial again at once."""
        self._loop.call_soon_threadsafe(self._cut)

    def _cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _run(self) -> None:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        self.address = f"{host}:{port}"
        self._started.set()
        async with server:
            await self._stopped.wait()
            self._cut()
        # Each connection's task ends by itself now: its transports are gone.
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._server.rpartition(":")
        try:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        pair = {writer, far_writer}
        self._writers |= pair
        try:
            await asyncio.gather(
                self._carry(reader, far_writer, self._sent_up),
                self._carry(far_reader, writer, self._sent_down),
            )
        finally:
            self._writers -= pair
            for one in pair:
                one.transport.abort()

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, count: Callable[[int], None]
    ) -> None:
        """Passes on what is read, each piece after the link's delay, in order."""
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        delivering = asyncio.create_task(self._deliver(pieces, writer))
        due_s = 0.0
        try:
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(1 << 16):
                    count(len(data))
                    due_s = max(due_s, self._loop.time() + self._delay_s(len(data)))
                    pieces.put_nowait((due_s, data))
            pieces.put_nowait((due_s, b""))
            await delivering
        finally:
            delivering.cancel()

    async def _deliver(
        self, pieces: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter
    ) -> None:
        while True:
            due_s, data = await pieces.get()
            if not writer.is_closing() and (left_s := due_s - self._loop.time()) > 0:
                await asyncio.sleep(left_s)
            if not data or writer.is_closing():
                writer.close()
                return
            writer.write(data)

    def _delay_s(self, size: int) -> float:
        delay_ms = self.rtt_ms / 2
        for _ in range(-(-size // SEGMENT)):
            if self._random.random() < self._loss:
                delay_ms += max(LEAST_RETRANSMISSION_MS, 2 * self.rtt_ms)
        return delay_ms / 1000

    def _sent_up(self, size: int) -> None:
        self.bytes_up += size

    def _sent_down(self, size: int) -> None:
        self.bytes_down += size
