"""Peers that come and go: names that stand for several addresses, and the links to those addresses.

What is to change is decided by `change`, a plain function; a link that has sessions is let go only when these
have ended or moved.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from outrider.runtime.settings import DNS

log = logging.getLogger(__name__)


class Link(Protocol):
    """What is held per address."""

    @property
    def sessions(self) -> int:
        """Sessions that use it."""

    async def run(self) -> None:
        """Until cancelled."""


L = TypeVar("L", bound=Link)
Resolve = Callable[[str], Awaitable[Sequence[str]]]
"""From dns:NAME:PORT to host:port of every address. Raises OSError where the name is not known, UnicodeError
where it can be none."""


@dataclass(frozen=True, slots=True)
class Change:
    """What becomes of links."""

    added: tuple[str, ...]
    """Addresses to dial."""
    leaving: tuple[str, ...]
    """Addresses that get no further session."""
    gone: tuple[str, ...]
    """Addresses to hang up on."""


def change(held: Mapping[str, int], wanted: Collection[str]) -> Change:
    """From links by address, with the sessions of each, to the addresses that there should be."""
    unwanted = [address for address in held if address not in wanted]
    return Change(
        added=tuple(address for address in dict.fromkeys(wanted) if address not in held),
        leaving=tuple(address for address in unwanted if held[address]),
        gone=tuple(address for address in unwanted if not held[address]),
    )


class Links(Generic[L]):
    """One link per address of the peers given; `start` to `stop` on one event loop.

    Args:
        peers: host:port, for good, or dns:NAME:PORT.
        make: a link to host:port.
        every_s: how often names are resolved again.
        resolve: see `Resolve`.
    """

    def __init__(
        self, peers: Iterable[str], make: Callable[[str], L], *, every_s: float, resolve: Resolve
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
        self.by_address: dict[str, L] = {address: make(address) for address in self._fixed}
        """All of them, those that are leaving too."""

    @property
    def staying(self) -> list[L]:
        """Those that may get further sessions."""
        return [link for address, link in self.by_address.items() if address not in self._leaving]

    @property
    def unknown(self) -> list[str]:
        """Names that have resolved to nothing so far."""
        return [name for name, addresses in self._found.items() if not addresses]

    def start(self) -> None:
        """Run the links and follow the names; returns at once."""
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
        """Peers that have said themselves where they are: these, beside those given, and no others."""
        if (addresses := tuple(addresses)) != self._registered:
            self._registered = addresses
            await self._apply()

    async def _follow(self, name: str) -> None:
        level = logging.WARNING
        while True:
            try:
                self._found[name] = tuple(await self._resolve(name))
                level = logging.WARNING
            except (OSError, UnicodeError) as error:  # the second where it can be no name
                # What was found before stands: a resolver that is away is no reason to hang up on anybody.
                log.log(level, "not resolved", extra={"fields": {"peer": name, "why": str(error)}})
                level = logging.DEBUG
            await self._apply()
            await asyncio.sleep(self._every_s)

    async def _apply(self) -> None:
        found = (one for addresses in self._found.values() for one in addresses)
        wanted = dict.fromkeys((*self._fixed, *found, *self._registered))
        held = {address: link.sessions for address, link in self.by_address.items()}
        todo = change(held, wanted)
        self._leaving = frozenset(todo.leaving)
        for address in todo.added:
            link = self.by_address[address] = self._make(address)
            self._tasks[address] = asyncio.create_task(link.run())
            log.info("peer found", extra={"fields": {"peer": address}})
        hung_up = []
        for address in todo.gone:
            del self.by_address[address]
            hung_up.append(self._tasks.pop(address))
            hung_up[-1].cancel()
            log.info("peer gone", extra={"fields": {"peer": address}})
        for task in hung_up:
            with contextlib.suppress(asyncio.CancelledError):
                await task
