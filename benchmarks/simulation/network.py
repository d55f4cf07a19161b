"""The network between simulated processes: who can be reached, how late, and what is lost or comes twice.

Held streams from one process to another are on one TCP connection: their messages are delayed, for long where
a line is cut, but keep their order, those of several streams, too, until it breaks. So one that a client has
left is over before its next begins. Calls of one message each are lost, delayed past each other and
delivered twice, the second time perhaps much later. Knows nothing of what it carries.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.simulation.clock import Process, VirtualLoop

PING_S = 3.0
"""After so long a dialler notices by pings that a peer is frozen, or behind a cut line."""
CLIENT_PING_S = 12.0
"""The same for clients, who are more patient."""
REFUSED_S = 0.002


@dataclass(frozen=True, slots=True)
class Weather:
    """How bad the network is."""

    delay_s: float = 0.002
    """Of most messages, up to twice as long."""
    late: float = 0.0
    """Share of messages that take up to `late_s`."""
    late_s: float = 0.2
    lost: float = 0.0
    """Share of calls whose request, or whose answer, is lost."""
    twice: float = 0.0
    """Share of calls that are carried out twice, the second time up to `again_s` later."""
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
        """When something arrives that would arrive then if nothing had been sent before it."""
        self._last = max(self._last + 1e-9, when)
        return self._last


class Network:
    """Addresses, and the way between them.

    Args:
        loop: the world's.
        weather: until `clear`.
        chance: by the name of a way from one process to another: what decides of its messages. Each way has
            its own, as the order in which one process wakes two others is not always the same.
        note: told what happens, for whoever reads along; None: nobody does.
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
        """Second deliveries that are still to come."""
        self.servers: dict[str, Any] = {}
        """By address; who listens there now."""
        self.streams: dict[Any, None] = {}
        """Held streams that are up."""
        self._cuts: dict[tuple[str, str], _Cut] = {}
        self._lines: dict[tuple[Process, Process], Line] = {}

    def clear(self) -> None:
        """From now on nothing is lost, late or twice."""
        self.weather = Weather(self.weather.delay_s)
        self._cuts.clear()

    def way(self, sender: Process, receiver: Process) -> random.Random:
        """The chance of the messages from one process to another."""
        names = (sender.name, receiver.name)
        if (found := self._ways.get(names)) is None:
            found = self._ways[names] = self._chance(f"{names[0]} to {names[1]}")
        return found

    def line(self, sender: Process, receiver: Process) -> Line:
        """Their connection, one way: held streams share it."""
        return self._lines.setdefault((sender, receiver), Line())

    def broke(self, one: Process, other: Process) -> None:
        """Their connection did: the next stream is on another."""
        self._lines.pop((one, other), None)
        self._lines.pop((other, one), None)

    def find(self, address: str) -> Any | None:
        """Who listens at an address, if anybody does."""
        server = self.servers.get(address)
        return server if server is not None and server.process.alive else None

    def cut(self, one: str, other: str, seconds: float) -> None:
        """Nothing passes between two processes for so long; what was sent arrives after."""
        ends = self.loop.now + seconds
        self._cuts[one, other] = self._cuts[other, one] = _Cut(ends)
        for stream in list(self.streams):
            if {stream.client.name, stream.server.name} == {one, other}:
                self.doubt(stream)

    def is_cut(self, one: str, other: str) -> bool:
        """Whether nothing passes between them now."""
        cut = self._cuts.get((one, other))
        return cut is not None and cut.ends > self.loop.now

    def doubt(self, stream: Any) -> None:
        """Pings are not answered on this one; if that is still so when patience ends, it breaks."""
        patience_s = CLIENT_PING_S if stream.client.name.startswith("client") else PING_S
        self.loop.call_later(patience_s, self._ping, stream)

    def _ping(self, stream: Any) -> None:
        if stream.server.frozen or self.is_cut(stream.client.name, stream.server.name):
            stream.broke("pings were not answered")

    def arrival(self, sender: Process, receiver: Process) -> float:
        """When a message that is sent now arrives."""
        weather, chance = self.weather, self.way(sender, receiver)
        delay_s = weather.delay_s * (1.0 + chance.random())
        if weather.late and chance.random() < weather.late:
            delay_s += weather.late_s * chance.random()
        when = self.loop.now + delay_s
        if self._cuts and (cut := self._cuts.get((sender.name, receiver.name))) is not None:
            when = max(when, cut.ends + delay_s)
        return when

    def send(self, sender: Process, receiver: Process, deliver: Callable[..., None], *args: Any) -> None:
        """One message by itself, which others may overtake."""
        self.at(self.arrival(sender, receiver), receiver, deliver, *args)

    def at(self, when: float, receiver: Process, deliver: Callable[..., None], *args: Any) -> None:
        """Delivered then, as the receiver's own doing."""
        self.loop.call_at(when, deliver, *args, context=receiver.context)

    def again(self, sender: Process, receiver: Process, deliver: Callable[..., None], *args: Any) -> None:
        """Delivered a second time, later."""
        self.under_way += 1

        def arrive() -> None:
            self.under_way -= 1
            deliver(*args)

        when = self.loop.now + self.weather.again_s * self.way(sender, receiver).random()
        self.loop.call_at(when, arrive, context=receiver.context)
