"""The load of verifiers that several orchestrators share.

Each orchestrator reports its own sessions and reads the others' reports.

Placement counts all of them. Without the store it counts the sessions of this orchestrator alone.
"""

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Iterable

from orchestrator.fleet.fleet import Fleet
from orchestrator.fleet.verifier_link import VerifierLink
from orchestrator.store import SessionStore, StoreUnavailable, WorkerReport

log = logging.getLogger(__name__)

EVERY_S = 1.0


class SharedLoad:
    """Keeps the fleet's count of other orchestrators' sessions up to date, from `start` to `stop`."""

    def __init__(self, fleet: Fleet, store: SessionStore) -> None:
        self._fleet = fleet
        self._store = store
        self._reporter = secrets.token_hex(8)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to report and to read."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Stop reporting; the last report expires by itself."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                await self._store.report(
                    [_report(link, self._reporter) for link in self._fleet.verifiers.values() if link.target]
                )
                self._fleet.elsewhere = elsewhere(await self._store.workers(), self._reporter)
            except StoreUnavailable:
                self._fleet.elsewhere = {}
            except Exception:  # whatever is wrong with the reports, placement works without them
                log.exception("the others' loads are left out")
                self._fleet.elsewhere = {}
            await asyncio.sleep(EVERY_S)


def elsewhere(reports: Iterable[WorkerReport], reporter: str) -> dict[str, int]:
    """Sessions that other orchestrators than `reporter` have at each verifier, by its address."""
    found: Counter[str] = Counter()
    for report in reports:
        if report.reporter != reporter:
            found[report.address] += min(report.sessions, max(report.capacity, 1))
    return dict(found)


def _report(link: VerifierLink, reporter: str) -> WorkerReport:
    model = link.target.name if link.target is not None else ""
    return WorkerReport(
        link.address, reporter, model, link.fingerprint, link.capacity, link.sessions, link.step_s
    )
