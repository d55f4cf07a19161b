"""Bounds on what the client of one WebSocket may cost below the messages that it sends.

The library answers pings and collects fragments by itself, however many come, and a client that takes nothing
leaves the answers with this process. One read may bring tens of thousands of pings: the library gets what was
read in small pieces, between which the loop serves others.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from outrider.wire.incoming.message_stream import BURST_S, OVERDRAWN, Pace

MOST_FRAGMENTS = 4096
"""Fragments of one message."""
MOST_UNTAKEN = 2 * 2**20
"""Bytes that a client which goes on sending may leave untaken."""
PIECE_BYTES = 512
"""Bytes that the library gets at a time: pings in them cost some 2 ms."""
SLICE_S = 0.002
"""Processor time after which the loop serves others."""


class _Flow:
    """The transport as the library sees it: that it pauses and resumes reading is only noted."""

    def __init__(self, transport: Any, resumed: Callable[[], None]) -> None:
        self._transport = transport
        self._resumed = resumed
        self.paused = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def pause_reading(self) -> None:
        """The library has a message that nobody has taken."""
        self.paused = True

    def resume_reading(self) -> None:
        """The library's messages were taken."""
        self.paused = False
        self._resumed()


class FrameBounds:
    """Watches one WebSocket, and cuts the connection of a client that oversteps.

    Args:
        protocol: the library's protocol of the connection; its methods and its transport are replaced.
        taking_s: seconds in which a client takes some of what it is sent.
    """

    def __init__(
        self, protocol: Any, transport: Any, loop: asyncio.AbstractEventLoop, taking_s: float
    ) -> None:
        self._protocol = protocol
        self._transport = transport
        self._loop = loop
        self._taking_s = taking_s
        self._pace = Pace(time.monotonic(), BURST_S)  # one message may be large
        self._unread = bytearray()
        """What the client has sent and the library has not seen."""
        self._flow = _Flow(transport, self._go_on)
        self._reads = True
        self._next: asyncio.TimerHandle | None = None
        self._waits = ExitStack()
        """Holds this connection's place among those that are overdrawn."""
        self._taking: asyncio.TimerHandle | None = None
        self._received: Callable[[bytes], None] = protocol.data_received
        self._paused: Callable[[], None] = protocol.pause_writing
        self._resumed: Callable[[], None] = protocol.resume_writing
        self._lost: Callable[[Exception | None], None] = protocol.connection_lost
        protocol.transport = self._flow
        protocol.data_received = self._data_received
        protocol.pause_writing = self._pause_writing
        protocol.resume_writing = self._resume_writing
        protocol.connection_lost = self._connection_lost
        transport.set_protocol(protocol)  # uvloop looks the methods up here

    def _data_received(self, data: bytes) -> None:
        self._unread += data
        self._go_on()

    def _go_on(self) -> None:
        """Reads on now, unless that is due later."""
        if self._next is None:
            self._read()

    def _read(self) -> None:
        """Gives the library some of what waits, and decides when the next piece is due."""
        self._next = None
        self._waits.close()
        began_s = time.thread_time()
        cost_s = 0.0
        while self._unread and not self._flow.paused and cost_s < SLICE_S:
            piece = bytes(self._unread[:PIECE_BYTES])
            del self._unread[:PIECE_BYTES]
            self._received(piece)
            if self._oversteps():
                self._transport.abort()
            if self._transport.is_closing():
                self._unread.clear()
                return
            cost_s = time.thread_time() - began_s
        wait_s = self._pace.charge(cost_s, time.monotonic(), OVERDRAWN.count)
        if wait_s > 0:
            self._waits.enter_context(OVERDRAWN.one_more())
        if wait_s > 0 or (self._unread and not self._flow.paused):
            self._next = self._loop.call_later(wait_s, self._read)
        self._let_read(self._next is None and not self._flow.paused)

    def _oversteps(self) -> bool:
        fragments = len(getattr(self._protocol, "frames", ()))
        return fragments > MOST_FRAGMENTS or self._transport.get_write_buffer_size() > MOST_UNTAKEN

    def _let_read(self, reads: bool) -> None:
        """Pauses or resumes reading from the client."""
        if reads is self._reads or self._transport.is_closing():
            return
        self._reads = reads
        if reads:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def _pause_writing(self) -> None:
        self._paused()
        if self._taking is None:
            self._taking = self._loop.call_later(self._taking_s, self._transport.abort)

    def _resume_writing(self) -> None:
        self._resumed()
        self._stop_taking()

    def _connection_lost(self, error: Exception | None) -> None:
        self._stop_taking()
        self._waits.close()
        self._unread.clear()
        if self._next is not None:
            self._next.cancel()
        self._lost(error)

    def _stop_taking(self) -> None:
        if self._taking is not None:
            self._taking.cancel()
            self._taking = None
