"""A worker that says where it is and how it is, to the orchestrators that are to use it.

Wraps a worker's service: it announces itself once it can serve and every second from then on, and when it
ends it says so first, so that its sessions go elsewhere while it still works. Knows nothing of what it does.
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
CALL_S = 0.8
"""How long an announcement may take: the next is due soon after."""
LEAVING_EVERY_S = 0.05
WILDCARDS = ("0.0.0.0", "[::]", "*")


Settings = TypeVar("Settings", bound=WorkerSettings)


class Worker(Service, Protocol):
    """A service that can be announced."""

    def state(self) -> WorkerState:
        """How it is now; asked on the event loop, once it has started."""


def announced(worker: Worker, context: ServiceContext[Settings], *, waits: bool = False) -> Service:
    """The worker, announced where its settings say so.

    `waits`: while its sessions are moved elsewhere it is not stopped yet; it does not wait for them itself.
    Raises InvalidRequest where nobody could reach it at what it is bound to.
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
    """A `Service` of `outrider.runtime`."""

    def __init__(self, worker: Worker, announcer: "Announcer", waits: bool) -> None:
        self._worker = worker
        self._announcer = announcer
        self._waits = waits

    def register(self, server: grpc.aio.Server) -> tuple[str, ...]:
        """As the worker does."""
        return self._worker.register(server)

    async def start(self) -> None:
        """Starts the worker, then announces it."""
        await self._worker.start()
        self._announcer.start()

    async def stop(self, grace: float) -> None:
        """Says that it ends, then ends it; what waits for its sessions to leave counts as grace."""
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
    """One orchestrator's, and what came of the last announcement there."""

    channel: grpc.aio.Channel
    said: str = "nothing yet"


class Announcer:
    """Announces one worker to all registries; `start` to `stop` on one event loop.

    Args:
        peers: registries, host:port or dns:NAME:PORT.
        state: how the worker is.
        dial: makes a channel to host:port.
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
        """Whether it has begun."""
        return bool(self._tasks)

    def start(self) -> None:
        """Begin; returns at once."""
        work = [self._run()]
        if names := [peer for peer in self._peers if peer.startswith(DNS)]:
            work.append(self._resolve(names))
        self._tasks = [asyncio.create_task(part, name="announcing") for part in work]

    def drain(self) -> None:
        """From now on it says, and says at once, that the worker is about to end."""
        self._draining = True
        self._now.set()

    async def stop(self) -> None:
        """No more is said: the last announcement is forgotten by itself."""
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
            said = f"not used there: {answer.refusal}" if answer.refusal else "registered"
        except grpc.aio.AioRpcError as error:
            said = f"cannot register: {error.code().name}: {error.details() or 'no reason given'}"
        if said != registry.said:
            registry.said = said
            level = logging.INFO if said == "registered" else logging.WARNING
            log.log(level, "%s", peer_text(said), extra={"fields": {"peer": address}})

    def _addresses(self) -> list[str]:
        fixed = [peer for peer in self._peers if not peer.startswith(DNS)]
        return list(dict.fromkeys([*fixed, *(one for found in self._found.values() for one in found)]))

    async def _resolve(self, names: Sequence[str]) -> None:
        while True:
            before = self._addresses()
            for name in names:
                try:
                    self._found[name] = await resolve(name)
                except (OSError, UnicodeError) as error:  # what was found before stands
                    log.debug("not resolved", extra={"fields": {"peer": name, "why": str(error)}})
            if self._addresses() != before:
                self._now.set()
            await asyncio.sleep(RESOLVE_S)
