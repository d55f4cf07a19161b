"""Peers that come and go: names that resolve to several addresses, and the links to those addresses.

`peer_changes`, a plain function, decides which links to make and to drop; a link that has sessions is dropped
only when they have ended or moved.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from outrider.runtime.settings import DNS

log = logging.getLogger(__name__)


class PeerLink(Protocol):
    """A link to the process at one address."""

    @property
    def sessions(self) -> int:
        """Number of sessions that use the link."""

    async def run(self) -> None:
        """Hold the link until cancelled."""


P = TypeVar("P", bound=PeerLink)
Resolve = Callable[[str], Awaitable[Sequence[str]]]
"""Resolves dns:NAME:PORT to host:port of every address. Raises OSError where the name is unknown,
UnicodeError where it is no valid name."""


def turn_to_call(
    first_calls: asyncio.Semaphore | None, answered: bool
) -> contextlib.AbstractAsyncContextManager[None]:
    """Waits until a peer may be called, if the peer has not answered yet.

    Peers that share `first_calls` wait for each other until they have answered once. A flood of addresses
    where nobody answers so has few calls under way, and delays no call to a peer that is known.
    """
    return contextlib.nullcontext() if answered or first_calls is None else first_calls


@dataclass(frozen=True, slots=True)
class PeerChanges:
    """Links to make and links to drop."""

    added: tuple[str, ...]
    """Addresses to dial."""
    leaving: tuple[str, ...]
    """Addresses that get no further session."""
    gone: tuple[str, ...]
    """Addresses to hang up on."""


def peer_changes(held: Mapping[str, int], wanted: Collection[str]) -> PeerChanges:
    """The changes that lead from the links held to the addresses wanted.

    Args:
        held: number of sessions of each link, by address.
    """
    unwanted = [address for address in held if address not in wanted]
    return PeerChanges(
        added=tuple(address for address in dict.fromkeys(wanted) if address not in held),
        leaving=tuple(address for address in unwanted if held[address]),
        gone=tuple(address for address in unwanted if not held[address]),
    )


class PeerSet(Generic[P]):
    """One link for each address of its peers; lives on one event loop, from `start` to `stop`.

    Args:
        peers: host:port, which stays for good, or dns:NAME:PORT, which is resolved again and again.
        make: makes the link to host:port.
        every_s: pause between two resolutions of a name, in seconds.
        resolve: see `Resolve`.
    """

    def __init__(
        self, peers: Iterable[str], make: Callable[[str], P], *, every_s: float, resolve: Resolve
    ) -> None:
        peers = tuple(dict.fromkeys(peers))
        self._make = make
        self._every_s = every_s
        self._resolve = resolve
        self._fixed = tuple(peer for peer in peers if not peer.startswith(DNS))
        self._found: dict[str, tuple[str, ...]] = {peer: () for peer in peers if peer.startswith(DNS)}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._followers: list[asyncio.Task[None]] = []
        self._registered: tuple[str, ...] = ()
        self._leaving: frozenset[str] = frozenset()
        self._applying = asyncio.Lock()
        self.by_address: dict[str, P] = {address: make(address) for address in self._fixed}
        """All links, those that are leaving included."""
        self._unasked = set(self._found)
        self.resolved = asyncio.Event()
        """Set once each name has been resolved, or has failed to be, for the first time."""
        if not self._unasked:
            self.resolved.set()

    @property
    def staying(self) -> list[P]:
        """The links that may get further sessions."""
        return [link for address, link in self.by_address.items() if address not in self._leaving]

    @property
    def unknown(self) -> list[str]:
        """Peers' names that have resolved to no address so far."""
        return [name for name, addresses in self._found.items() if not addresses]

    def start(self) -> None:
        """Run the links and resolve the names; returns at once."""
        for address, link in self.by_address.items():
            self._tasks[address] = asyncio.create_task(link.run())
        self._followers = [asyncio.create_task(self._follow(name)) for name in self._found]

    async def stop(self) -> None:
        """End every link."""
        for tasks in (self._followers, list(self._tasks.values())):
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def register(self, addresses: Iterable[str]) -> None:
        """Hold links to these addresses, and to no others, beside those of the peers given at first."""
        if (addresses := tuple(addresses)) != self._registered:
            self._registered = addresses
            await self._apply()

    async def _follow(self, name: str) -> None:
        level = logging.WARNING
        while True:
            try:
                level = await self._follow_once(name, level)
            except Exception:  # a fault of this code must not leave a name unresolved for good
                log.exception("peers were not brought up to date", extra={"fields": {"peer": name}})
            self._unasked.discard(name)
            if not self._unasked:
                self.resolved.set()
            await asyncio.sleep(self._every_s)

    async def _follow_once(self, name: str, level: int) -> int:
        """Resolve a name and change the links; returns the level at which the next failure is logged."""
        try:
            self._found[name] = tuple(await self._resolve(name))
            level = logging.WARNING
        except (OSError, UnicodeError) as error:
            # Addresses found before stay: a resolver that is away is no reason to hang up on any peer.
            log.log(level, "not resolved", extra={"fields": {"peer": name, "why": str(error)}})
            level = logging.DEBUG
        await self._apply()
        return level

    async def _apply(self) -> None:
        async with self._applying:
            await self._apply_one()

    async def _apply_one(self) -> None:
        found = (address for addresses in self._found.values() for address in addresses)
        wanted = dict.fromkeys((*self._fixed, *found, *self._registered))
        held = {address: link.sessions for address, link in self.by_address.items()}
        todo = peer_changes(held, wanted)
        self._leaving = frozenset(todo.leaving)
        hung_up = []
        for address in todo.gone:
            del self.by_address[address]
            hung_up.append(self._tasks.pop(address))
            hung_up[-1].cancel()
            log.info("peer gone", extra={"fields": {"peer": address}})
        for address in todo.added:
            link = self.by_address[address] = self._make(address)
            self._tasks[address] = asyncio.create_task(link.run())
            log.info("peer found", extra={"fields": {"peer": address}})
            await asyncio.sleep(0)  # a channel takes a millisecond to make
        await asyncio.gather(*hung_up, return_exceptions=True)
