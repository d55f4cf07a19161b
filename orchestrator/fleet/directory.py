"""Workers that have registered, with this orchestrator or with another one.

Pure: the clock is given, in seconds of any monotonic one. An announcement is believed for a while; a worker
that is no longer heard of stays for as long as it is seen to be alive, so that a store or a line that is away
moves nobody.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from orchestrator.fleet.compatibility import Refusal, other_contract
from outrider.wire.workers import BELIEVED_S, WorkerEntry
from speculative.errors import Overloaded

MOST = 4096
"""Workers; more are refused."""


@dataclass(slots=True)
class _Known:
    entry: WorkerEntry
    until: float
    itself: bool
    """Whether it was the worker that said so."""


class Directory:
    """Who there is."""

    def __init__(self, most: int = MOST) -> None:
        self._known: dict[str, _Known] = {}
        self._fresh: dict[str, WorkerEntry] = {}
        self._most = most

    def __len__(self) -> int:
        return len(self._known)

    def heard(self, entry: WorkerEntry, now: float) -> bool:
        """A worker announces itself; whether that changes anything for placement.

        Raises Overloaded where there is no room for another one, and where somebody of another role has just
        announced itself at the address: whoever takes over a port waits for as long as that is believed.
        """
        before = self._known.get(entry.address)
        if before is not None and before.itself and before.until > now and before.entry.role != entry.role:
            raise Overloaded(
                f"a {before.entry.role} announces itself at {entry.address}, not a {entry.role}: each worker "
                "needs an address of its own (--advertise)",
                BELIEVED_S,
            )
        if before is None and len(self._known) >= self._most:
            raise Overloaded(f"{self._most} workers are registered, as many as there may be", BELIEVED_S)
        self._known[entry.address] = _Known(entry, now + BELIEVED_S, itself=True)
        self._fresh[entry.address] = entry
        return before is None or _kind(before.entry) != _kind(entry)

    def learnt(self, entries: Iterable[WorkerEntry], now: float) -> None:
        """Others have heard these. What a worker itself said here lately stands."""
        for entry in entries:
            known = self._known.get(entry.address)
            if known is None and len(self._known) >= self._most:
                continue
            if known is None or not known.itself or known.until <= now:
                self._known[entry.address] = _Known(entry, now + BELIEVED_S, itself=False)

    def forget(self, now: float, alive: Callable[[str], bool]) -> None:
        """Drops who has not been heard of for so long, and is not alive either."""
        for address, known in list(self._known.items()):
            if known.until <= now and not alive(address):
                del self._known[address]
                self._fresh.pop(address, None)

    def take_fresh(self) -> list[WorkerEntry]:
        """What workers said here since the last call, for others to know."""
        fresh, self._fresh = self._fresh, {}
        return list(fresh.values())

    def entries(self, *roles: str) -> list[WorkerEntry]:
        """Those of these roles that can be used."""
        return [
            it.entry
            for it in self._known.values()
            if it.entry.role in roles and other_contract(it.entry.contract) is None
        ]

    def refused(self) -> dict[str, Refusal]:
        """By address, those that cannot."""
        told = {address: other_contract(it.entry.contract) for address, it in self._known.items()}
        return {address: refusal for address, refusal in told.items() if refusal is not None}


def _kind(entry: WorkerEntry) -> tuple[str, int, bool]:
    return entry.role, entry.contract, entry.draining
