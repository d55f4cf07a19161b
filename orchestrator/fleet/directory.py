"""The directory of workers that have registered, with this orchestrator or with another one.

Pure: the caller passes the time, in seconds of any monotonic clock. An announcement is believed for a while.
A worker that announces itself no longer stays for as long as it answers, so that the loss of a store or of a
connection removes no worker.

Addresses where no worker has answered yet are bounded, for each announcer and in all. Workers that have
answered have their places, whatever else is announced.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from orchestrator.fleet.compatibility import Refusal, contract_refusal
from outrider.wire.workers import BELIEVED_S, WorkerEntry
from speculative.errors import Overloaded

MOST = 4096
"""The most workers in the directory; further ones are refused."""
MAX_UNANSWERED = 64
"""The most addresses of one announcer where no worker has answered yet; further ones are refused."""
MAX_UNANSWERED_ELSEWHERE = 256
"""The most such addresses that other orchestrators have heard of; further ones wait."""


@dataclass(slots=True)
class _Known:
    entry: WorkerEntry
    until: float
    announcer: str | None
    """Host from which the worker announced itself here; None: it did so at another orchestrator."""
    answered: bool = False
    """Whether a worker has answered at the address."""

    @property
    def itself(self) -> bool:
        """Whether the worker announced itself here, rather than to another orchestrator."""
        return self.announcer is not None


class Directory:
    """Registered workers by address."""

    def __init__(self, most: int = MOST) -> None:
        self._known: dict[str, _Known] = {}
        self._fresh: dict[str, WorkerEntry] = {}
        self._most = most

    def __len__(self) -> int:
        return len(self._known)

    def heard(self, entry: WorkerEntry, now: float, announcer: str = "") -> bool:
        """Take a worker's own announcement; returns whether it changes anything for placement.

        Raises Overloaded where the directory is full, where `announcer`, the host that the announcement came
        from, has announced too many addresses at which nobody answers, and where a worker of another role
        announced itself at the same address: a worker that takes over a port waits until that announcement is
        no longer believed.
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
        if before is None and self._unanswered(announcer) >= MAX_UNANSWERED:
            raise Overloaded(
                f"{announcer or 'this host'} has announced {MAX_UNANSWERED} addresses at which no worker has "
                "answered yet: check that orchestrators can reach what --advertise names",
                BELIEVED_S,
            )
        answered = before is not None and before.answered
        self._known[entry.address] = _Known(entry, now + BELIEVED_S, announcer, answered)
        self._fresh[entry.address] = entry
        return before is None or _kind(before.entry) != _kind(entry)

    def learnt(self, entries: Iterable[WorkerEntry], now: float) -> None:
        """Take entries that other orchestrators have heard.

        A worker's own recent announcement here takes precedence. Of many unknown entries some are taken, and
        more once workers have answered at those.
        """
        unanswered = self._unanswered(None)
        for entry in entries:
            known = self._known.get(entry.address)
            if known is None:
                if len(self._known) >= self._most or unanswered >= MAX_UNANSWERED_ELSEWHERE:
                    continue
                unanswered += 1
            if known is None or not known.itself or known.until <= now:
                answered = known is not None and known.answered
                self._known[entry.address] = _Known(entry, now + BELIEVED_S, None, answered)

    def forget(self, now: float, alive: Callable[[str], bool]) -> None:
        """Drop workers whose announcements are no longer believed and that are not alive either."""
        for address, known in list(self._known.items()):
            answers = alive(address)
            known.answered |= answers
            if known.until <= now and not answers:
                del self._known[address]
                self._fresh.pop(address, None)

    def take_fresh(self) -> list[WorkerEntry]:
        """Announcements made here since the last call, to share with other orchestrators."""
        fresh, self._fresh = self._fresh, {}
        return list(fresh.values())

    def entries(self, *roles: str) -> list[WorkerEntry]:
        """Workers of these roles that speak this process's contract."""
        return [
            it.entry
            for it in self._known.values()
            if it.entry.role in roles and contract_refusal(it.entry.contract) is None
        ]

    def refused(self) -> dict[str, Refusal]:
        """Refusals, by address, of workers that speak another contract."""
        refusals = {address: contract_refusal(it.entry.contract) for address, it in self._known.items()}
        return {address: refusal for address, refusal in refusals.items() if refusal is not None}

    def _unanswered(self, announcer: str | None) -> int:
        return sum(it.announcer == announcer and not it.answered for it in self._known.values())


def _kind(entry: WorkerEntry) -> tuple[str, int, bool]:
    return entry.role, entry.contract, entry.draining
