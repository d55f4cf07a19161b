"""The registry, where workers announce themselves.

The fleet dials the workers that it hears of. Orchestrators that share a store share these announcements.

The registry has an address of its own. A process that can call it can have prompts sent to itself, so clients
must not be able to.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from orchestrator.fleet.directory import Directory
from orchestrator.fleet.fleet import Fleet
from orchestrator.store import SessionStore, StoreUnavailable
from outrider.runtime.security import check_role
from outrider.v1 import registry_pb2
from outrider.v1.registry_pb2_grpc import RegistryServicer, add_RegistryServicer_to_server
from outrider.wire.bind_errors import bind_failure
from outrider.wire.channel import server_options
from outrider.wire.incoming.unparsed import unparsed
from outrider.wire.origin import host_of
from outrider.wire.status import guarded
from outrider.wire.workers import EVERY_S, ROLES, entry_from_wire

log = logging.getLogger(__name__)

TIDY_S = 0.5
"""Pause between two rounds of applying the directory to the fleet, in seconds."""
GATHER_S = 0.02
"""How long announcements are gathered before the directory is applied, in seconds."""
STOP_S = 0.2
ANNOUNCEMENT_MB = 1

Context = grpc.aio.ServicerContext[Any, Any]


class RegistryServer(RegistryServicer):
    """Listens for workers, from `start` to `stop`, on one event loop. Raises Unavailable if `bind` is taken.

    Args:
        store: the store that other orchestrators share; None: no other orchestrator shares one.
        bind: host:port; port 0 picks a free port.
        credentials: the registry's certificate; None: connections are in plain. With a certificate, a worker
            needs a certificate of the role that it announces: a worker of another role cannot call a verifier
            away, or announce that it drains.
        interceptors: decide who may register.
    """

    def __init__(
        self,
        fleet: Fleet,
        store: SessionStore | None,
        bind: str,
        *,
        credentials: grpc.ServerCredentials | None = None,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._store = store
        self._now = now
        self._secured = credentials is not None
        self._tasks: list[asyncio.Task[None]] = []
        self._applying = asyncio.Lock()
        self._next_round: asyncio.Task[None] | None = None
        """Applies the directory once the announcements of this moment are in it."""
        self._server = grpc.aio.server(options=server_options(ANNOUNCEMENT_MB), interceptors=interceptors)
        self.directory = Directory()
        add_RegistryServicer_to_server(self, unparsed(self._server))
        try:
            if credentials is None:
                port = self._server.add_insecure_port(bind)
            else:
                port = self._server.add_secure_port(bind, credentials)
        except RuntimeError as error:
            raise bind_failure("the registry", bind, "orchestrator", "registry_bind", error) from error
        self.address = f"{bind.rpartition(':')[0]}:{port}"
        """host:port where the registry listens."""

    async def start(self) -> None:
        """Begin to listen, and to share entries with other orchestrators."""
        await self._server.start()
        loops = [self._tidy()] if self._store is None else [self._tidy(), self._share(self._store)]
        self._tasks = [asyncio.create_task(loop, name="registry") for loop in loops]

    async def stop(self) -> None:
        """Stop listening; workers announce themselves to other orchestrators."""
        tasks = [task for task in (*self._tasks, self._next_round) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._server.stop(STOP_S)

    @guarded
    async def Announce(
        self, request: registry_pb2.AnnounceRequest, context: Context
    ) -> registry_pb2.AnnounceResponse:
        """Take a worker's announcement; the answer says why the worker is not used, if so."""
        entry = entry_from_wire(request)
        if self._secured:
            check_role(context, entry.role)
        if self.directory.heard(entry, self._now(), host_of(context.peer())):
            fields = {"peer": entry.address, "role": entry.role, "draining": entry.draining}
            log.info("worker registered", extra={"fields": fields})
            await self._applied()
        refusal = self._fleet.refused.get(entry.address)
        return registry_pb2.AnnounceResponse(refusal="" if refusal is None else refusal.why)

    async def _applied(self) -> None:
        """Returns once the directory of this moment is applied; calls that come together share one round."""
        if self._next_round is None:
            self._next_round = asyncio.create_task(self._round(), name="registry round")
        await asyncio.shield(self._next_round)

    async def _round(self) -> None:
        await asyncio.sleep(GATHER_S)
        self._next_round = None
        await self._apply()

    async def _apply(self) -> None:
        async with self._applying:
            self.directory.forget(self._now(), self._fleet.alive)
            await self._fleet.registered(self.directory.entries(*ROLES), self.directory.refused())

    async def _tidy(self) -> None:
        while True:
            try:
                await self._apply()
            except Exception:  # a fault of this code costs a round, never the registry
                log.exception("what workers said was not taken over")
            await asyncio.sleep(TIDY_S)

    async def _share(self, store: SessionStore) -> None:
        while True:
            try:
                await store.announce(self.directory.take_fresh())
                self.directory.learnt(await store.announced(), self._now())
            except StoreUnavailable as error:  # workers announce themselves again
                log.debug("not shared", extra={"fields": {"why": str(error)}})
            except Exception:  # whatever is wrong with the store, workers that register here are used
                log.exception("other orchestrators' workers are left out")
            await asyncio.sleep(EVERY_S)
