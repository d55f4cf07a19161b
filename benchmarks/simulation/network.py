"""The network between simulated processes: reachability, delays, lost messages and messages that come twice.

All held streams from one process to another share one TCP connection. Their messages are delayed, for long
where a line is cut, but keep their order across streams until the connection breaks. So a stream that a
client has left is over before its next one begins. Unary calls are lost, delayed past each other and
delivered twice, the second time perhaps much later. Knows nothing of the messages' contents.
"""

import contextvars
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.simulation.clock import Process, VirtualLoop

PING_S = 3.0
"""Seconds after which a dialler notices by pings that a peer is frozen or behind a cut line."""
CLIENT_PING_S = 12.0
"""The same between a client and its server, in either direction: both are more patient."""
AMONG_SEVERAL_S = 0.7
"""Seconds after which a client of several orchestrators leaves one that does not answer its pings."""
REFUSED_S = 0.002
"""Seconds until a dialler sees a refused or broken connection."""


@dataclass(frozen=True, slots=True)
class Weather:
    """How often and how badly the network fails."""

    delay_s: float = 0.002
    """Seconds that most messages take, up to twice as long."""
    late: float = 0.0
    """Share of messages that take up to `late_s` seconds more."""
    late_s: float = 0.2
    lost: float = 0.0
    """Share of calls whose request, or whose answer, is lost."""
    twice: float = 0.0
    """Share of calls that are carried out twice, the second time up to `again_s` seconds later."""
    again_s: float = 1.0
    stutter: float = 0.0
    """Share of a verifier's messages to its readers that come twice."""


@dataclass(slots=True)
class _Cut:
    ends: float


class Line:
    """One direction of a connection."""

    def __init__(self) -> None:
        self._last = 0.0

    def behind(self, when: float) -> float:
        """When a message arrives that would arrive at `when` on an idle line."""
        self._last = max(self._last + 1e-9, when)
        return self._last


class Network:
    """The addresses of processes, and the delivery of messages between them.

    Args:
        loop: the world's event loop.
        weather: how the network fails until `clear`.
        chance: the random source of the messages from one process to another, by the name of that way. Each
            way has its own, as the order in which one process wakes two others is not always the same.
        note: takes a line for the trace; None without a trace.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        weather: Weather,
        chance: Callable[[str], random.Random],
        note: Callable[[str], None] | None = None,
    ) -> None:
        self.loop = loop
        self.weather = weather
        self._chance = chance
        self._ways: dict[tuple[str, str], random.Random] = {}
        self.note = note
        self.under_way = 0
        """Number of second deliveries that are still to come."""
        self.servers: dict[str, Any] = {}
        """The server that listens at each address now."""
        self.streams: dict[Any, None] = {}
        """The held streams that are connected."""
        self._cuts: dict[tuple[str, str], _Cut] = {}
        self._lines: dict[tuple[Process, Process], Line] = {}

    def clear(self) -> None:
        """Ends all bad weather: from now on no message is lost, late or delivered twice."""
        self.weather = Weather(self.weather.delay_s)
        self._cuts.clear()

    def way(self, sender: Process, receiver: Process) -> random.Random:
        """The random source of the messages from one process to another."""
        names = (sender.name, receiver.name)
        if (found := self._ways.get(names)) is None:
            found = self._ways[names] = self._chance(f"{names[0]} to {names[1]}")
        return found

    def line(self, sender: Process, receiver: Process) -> Line:
        """One direction of the connection of two processes, which their held streams share."""
        return self._lines.setdefault((sender, receiver), Line())

    def drop_connection(self, one: Process, other: Process) -> None:
        """Drops the connection of two processes; their next stream gets a new one."""
        self._lines.pop((one, other), None)
        self._lines.pop((other, one), None)

    def find(self, address: str) -> Any | None:
        """The living server at an address; None where no process listens."""
        server = self.servers.get(address)
        return server if server is not None and server.process.alive else None

    def cut(self, one: str, other: str, seconds: float) -> None:
        """Holds all messages between two processes for `seconds`; they arrive afterwards."""
        ends = self.loop.now + seconds
        self._cuts[one, other] = self._cuts[other, one] = _Cut(ends)
        for stream in list(self.streams):
            if {stream.client.name, stream.server.name} == {one, other}:
                self.doubt(stream)

    def is_cut(self, one: str, other: str) -> bool:
        """Whether the line between two processes is cut now."""
        cut = self._cuts.get((one, other))
        return cut is not None and cut.ends > self.loop.now

    def doubt(self, stream: Any) -> None:
        """Breaks a stream off unless its sides answer each other's pings again within their patience."""
        if not stream.client.name.startswith("client"):
            self._ask_in(PING_S, self._ping, stream)
            return
        self._ask_in(CLIENT_PING_S, self._ping, stream)
        if sum(address.startswith("orchestrator") for address in self.servers) > 1:
            self._ask_in(AMONG_SEVERAL_S, self._move_on, stream)

    def _ask_in(self, seconds: float, ask: Callable[[Any], None], stream: Any) -> None:
        nobody = contextvars.Context()  # the ping comes even if the process that asks for it freezes
        self.loop.call_later(seconds, ask, stream, context=nobody)

    def _ping(self, stream: Any) -> None:
        if stream.server.frozen or stream.client.frozen or self._is_cut(stream):
            stream.break_off("pings were not answered")

    def _move_on(self, stream: Any) -> None:
        """The client leaves. Behind a cut line the server hears nothing of that, and has more patience."""
        if not stream.client.frozen and (stream.server.frozen or self._is_cut(stream)):
            unheard_s = CLIENT_PING_S - AMONG_SEVERAL_S if self._is_cut(stream) else 0.0
            stream.break_off("a ping was not answered", unheard_s)

    def _is_cut(self, stream: Any) -> bool:
        return self.is_cut(stream.client.name, stream.server.name)

    def arrival(self, sender: Process, receiver: Process) -> float:
        """When a message that is sent now arrives, on the loop's clock."""
        weather, chance = self.weather, self.way(sender, receiver)
        delay_s = weather.delay_s * (1.0 + chance.random())
        if weather.late and chance.random() < weather.late:
            delay_s += weather.late_s * chance.random()
        when = self.loop.now + delay_s
        if self._cuts and (cut := self._cuts.get((sender.name, receiver.name))) is not None:
            when = max(when, cut.ends + delay_s)
        return when

    def send(self, sender: Process, receiver: Process, deliver: Callable[..., None], *args: Any) -> None:
        """Sends one message that others may overtake."""
        self.at(self.arrival(sender, receiver), receiver, deliver, *args)

    def at(self, when: float, receiver: Process, deliver: Callable[..., None], *args: Any) -> None:
        """Calls `deliver` at `when` inside the receiver."""
        self.loop.call_at(when, deliver, *args, context=receiver.context)

    def again(self, sender: Process, receiver: Process, deliver: Callable[..., None], *args: Any) -> None:
        """Delivers a message a second time, later."""
        self.under_way += 1

        def arrive() -> None:
            self.under_way -= 1
            deliver(*args)

        when = self.loop.now + self.weather.again_s * self.way(sender, receiver).random()
        self.loop.call_at(when, arrive, context=receiver.context)
