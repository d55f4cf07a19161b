"""The store behind the network: the real in-memory store in a process that is slow, frozen, lost or emptied.

An orchestrator waits a few hundred milliseconds for it, as for a Redis server. A command whose answer is lost
may have been carried out. Commands that can be repeated are carried out twice now and then.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.simulation.clock import Process, current
from benchmarks.simulation.network import Network
from orchestrator.store import Append, Handle, SessionRecord, StoreUnavailable, Tokens, WorkerReport
from orchestrator.store.memory import MemoryStore
from outrider.wire.codec import SessionKey
from outrider.wire.workers import WorkerEntry

COMMAND_TIMEOUT_S = 0.5


class StoreServer:
    """The store's process."""

    def __init__(self, network: Network, name: str = "store") -> None:
        self.network = network
        self.process = Process(network.loop, name)
        self.memory = MemoryStore(network.loop.time)
        self.checked: Callable[[MemoryStore, Sequence[Append]], None] = lambda memory, appends: None
        """Called after ids were appended."""

    def empty(self) -> None:
        """Empties the store, as a restart without a file does."""
        self.memory = MemoryStore(self.network.loop.time)

    async def carry_out(self, command: str, arguments: tuple[Any, ...]) -> Any:
        """Carries one command out, now."""
        result = await getattr(self.memory, command)(*arguments)
        if command == "append":
            self.checked(self.memory, *arguments)
        return result


class RemoteStore:
    """A SessionStore of one orchestrator, whose commands travel over the network."""

    def __init__(self, server: StoreServer, chance: random.Random) -> None:
        self._server = server
        self._chance = chance
        self._client = current()

    async def put(self, records: Sequence[tuple[SessionRecord, int]]) -> list[bool]:
        """Puts records as SessionStore says, where the other methods are described too."""
        answer: list[bool] = await self._ask("put", tuple(records), again=True) if records else []
        return answer

    async def find(self, key: SessionKey) -> SessionRecord | None:
        answer: SessionRecord | None = await self._ask("find", key)
        return answer

    async def cancel(self, key: SessionKey) -> SessionRecord | None:
        answer: SessionRecord | None = await self._ask("cancel", key)
        return answer

    async def forget(self, key: SessionKey, epoch: int) -> None:
        await self._ask("forget", key, epoch, again=True)

    async def append(self, appends: Sequence[Append]) -> list[int]:
        answer: list[int] = await self._ask("append", tuple(appends), again=True) if appends else []
        return answer

    async def tokens(self, key: SessionKey) -> Tokens | None:
        answer: Tokens | None = await self._ask("tokens", key)
        return answer

    async def put_handle(self, handle: Handle) -> None:
        await self._ask("put_handle", handle, again=True)

    async def handle(self, key: SessionKey) -> Handle | None:
        answer: Handle | None = await self._ask("handle", key)
        return answer

    async def put_prefixes(self, scope: str, hashes: Sequence[int], verifier: str) -> None:
        await self._ask("put_prefixes", scope, tuple(hashes), verifier, again=True)

    async def longest_prefix(self, scope: str, hashes: Sequence[int]) -> tuple[int, str] | None:
        answer: tuple[int, str] | None = (
            await self._ask("longest_prefix", scope, tuple(hashes)) if hashes else None
        )
        return answer

    async def report(self, reports: Sequence[WorkerReport]) -> None:
        await self._ask("report", tuple(reports), again=True)

    async def workers(self) -> list[WorkerReport]:
        answer: list[WorkerReport] = await self._ask("workers")
        return answer

    async def announce(self, entries: Sequence[WorkerEntry]) -> None:
        await self._ask("announce", tuple(entries), again=True)

    async def announced(self) -> list[WorkerEntry]:
        answer: list[WorkerEntry] = await self._ask("announced")
        return answer

    async def close(self) -> None:
        """Does nothing, as the store holds nothing here."""

    async def _ask(self, command: str, *arguments: Any, again: bool = False) -> Any:
        network, server = self._server.network, self._server
        if not self._client.alive:
            raise StoreUnavailable("this process is gone")
        if network.weather.lost and self._chance.random() < network.weather.lost:
            raise StoreUnavailable("connection reset")
        answer: asyncio.Future[Any] = network.loop.create_future()

        async def serve() -> None:
            result = await server.carry_out(command, arguments)
            network.send(server.process, self._client, take_result, result)

        def take_result(result: Any) -> None:
            if not answer.done():
                answer.set_result(result)

        def arrive() -> None:
            server.process.spawn(serve())

        network.send(self._client, server.process, arrive)
        if again and network.weather.twice and self._chance.random() < network.weather.twice:
            network.again(self._client, server.process, arrive)
        try:
            async with asyncio.timeout(COMMAND_TIMEOUT_S):
                return await answer
        except TimeoutError as error:
            raise StoreUnavailable(f"no answer to {command} within {COMMAND_TIMEOUT_S} s") from error
