"""Announces a worker's address and state to the orchestrators that are to use the worker.

Wraps a worker's service: the worker is announced once it can serve, and every second from then on. Before it
ends, an announcement says so, and orchestrators move its sessions while it still works. This module knows
nothing of what a worker does.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import grpc.aio

from outrider.runtime.resolving import resolve
from outrider.runtime.security import certificates
from outrider.runtime.serve import Service, ServiceContext
from outrider.runtime.settings import DNS, WorkerSettings
from outrider.v1.registry_pb2_grpc import RegistryStub
from outrider.wire.channel import open_channel
from outrider.wire.status import peer_text
from outrider.wire.workers import EVERY_S, WorkerEntry, WorkerState, entry_to_wire
from speculative.errors import InvalidRequest

log = logging.getLogger(__name__)

RESOLVE_S = 5.0
"""Seconds between two resolutions of the names of registries."""
CALL_S = 0.8
"""Timeout of an announcement in seconds; the next announcement is due soon after."""
LEAVING_EVERY_S = 0.05
"""Seconds between two checks whether all sessions have left a worker that ends."""
WILDCARDS = ("0.0.0.0", "[::]", "*")


Settings = TypeVar("Settings", bound=WorkerSettings)


class Worker(Service, Protocol):
    """A service with a state that can be announced."""

    def state(self) -> WorkerState:
        """The worker's present state; called on the event loop, after `start`."""


def announced(worker: Worker, context: ServiceContext[Settings], *, waits: bool = False) -> Service:
    """The worker as a service that announces itself where its settings name registries.

    `waits`: a stop waits until the worker's sessions have moved to others; for workers that do not wait
    themselves. Raises InvalidRequest where the worker is bound to an address that cannot be dialled.
    """
    settings = context.settings
    if not settings.register_with:
        return worker
    address = settings.advertise or context.address
    if address.rpartition(":")[0] in WILDCARDS:
        raise InvalidRequest(
            f"this worker is bound to {address}, which nobody can dial; give --advertise HOST:PORT"
        )
    dial = partial(open_channel, certificates=certificates(settings), role="orchestrator")
    announcer = Announcer(settings.register_with, settings.role, address, worker.state, dial=dial)
    return AnnouncedWorker(worker, announcer, waits)


class AnnouncedWorker:
    """A worker and its announcer as one `Service` of `outrider.runtime`."""

    def __init__(self, worker: Worker, announcer: "Announcer", waits: bool) -> None:
        self._worker = worker
        self._announcer = announcer
        self._waits = waits

    def register(self, server: grpc.aio.Server) -> tuple[str, ...]:
        """Registers the worker's servicers; returns their names."""
        return self._worker.register(server)

    async def start(self) -> None:
        """Starts the worker, then announces it."""
        await self._worker.start()
        self._announcer.start()

    async def stop(self, grace: float) -> None:
        """Announces the end, then stops the worker; `grace` includes the time until its sessions left."""
        began = time.monotonic()
        self._announcer.drain()
        if self._waits and self._announcer.running:
            for _ in range(round(grace / LEAVING_EVERY_S)):
                if not self._worker.state().sessions:
                    break
                await asyncio.sleep(LEAVING_EVERY_S)
        try:
            await self._worker.stop(max(0.0, grace - (time.monotonic() - began)))
        finally:
            await self._announcer.stop()


@dataclass(slots=True)
class _Registry:
    """The registry of one orchestrator, and the outcome of the last announcement to it."""

    channel: grpc.aio.Channel
    outcome: str = "nothing yet"


class Announcer:
    """Announces one worker to all registries, from `start` to `stop`, on one event loop.

    Args:
        peers: registries, host:port or dns:NAME:PORT.
        state: returns the worker's present state.
        dial: opens a channel to host:port.
    """

    def __init__(
        self,
        peers: Sequence[str],
        role: str,
        address: str,
        state: Callable[[], WorkerState],
        every_s: float = EVERY_S,
        dial: Callable[[str], grpc.aio.Channel] = open_channel,
    ) -> None:
        self._peers = peers
        self._role = role
        self._address = address
        self._state = state
        self._every_s = every_s
        self._dial = dial
        self._draining = False
        self._registries: dict[str, _Registry] = {}
        self._found: dict[str, tuple[str, ...]] = {}
        self._now = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def running(self) -> bool:
        """Whether announcements have begun."""
        return bool(self._tasks)

    def start(self) -> None:
        """Begins to announce the worker; returns at once."""
        work = [self._run()]
        if names := [peer for peer in self._peers if peer.startswith(DNS)]:
            work.append(self._resolve(names))
        self._tasks = [asyncio.create_task(part, name="announcing") for part in work]

    def drain(self) -> None:
        """Announces that the worker is about to end, at once and from now on."""
        self._draining = True
        self._now.set()

    async def stop(self) -> None:
        """Ends the announcements; the last one expires by itself."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for registry in self._registries.values():
            await registry.channel.close()

    async def _run(self) -> None:
        while True:
            self._now.clear()
            try:
                await self._announce_everywhere()
            except Exception:  # a fault of this code costs an announcement, never the worker
                log.exception("not announced")
            try:
                async with asyncio.timeout(self._every_s):
                    await self._now.wait()
            except TimeoutError:
                continue

    async def _announce_everywhere(self) -> None:
        addresses = self._addresses()
        for address in set(self._registries) - set(addresses):
            await self._registries.pop(address).channel.close()
        for address in addresses:
            if address not in self._registries:
                self._registries[address] = _Registry(self._dial(address))
        entry = WorkerEntry(self._role, self._address, self._state(), draining=self._draining)
        await asyncio.gather(*(self._announce(address, entry) for address in addresses))

    async def _announce(self, address: str, entry: WorkerEntry) -> None:
        registry = self._registries[address]
        stub = RegistryStub(registry.channel)
        try:
            answer = await stub.Announce(entry_to_wire(entry), timeout=CALL_S)
            outcome = f"not used there: {answer.refusal}" if answer.refusal else "registered"
        except grpc.aio.AioRpcError as error:
            outcome = f"cannot register: {error.code().name}: {error.details() or 'no reason given'}"
        if outcome != registry.outcome:
            registry.outcome = outcome
            level = logging.INFO if outcome == "registered" else logging.WARNING
            log.log(level, "%s", peer_text(outcome), extra={"fields": {"peer": address}})

    def _addresses(self) -> list[str]:
        fixed = [peer for peer in self._peers if not peer.startswith(DNS)]
        return list(dict.fromkeys([*fixed, *(one for found in self._found.values() for one in found)]))

    async def _resolve(self, names: Sequence[str]) -> None:
        while True:
            before = self._addresses()
            for name in names:
                try:
                    self._found[name] = await resolve(name)
                except (OSError, UnicodeError) as error:  # the addresses found before stay in use
                    log.debug("not resolved", extra={"fields": {"peer": name, "why": str(error)}})
            if self._addresses() != before:
                self._now.set()
            await asyncio.sleep(RESOLVE_S)
