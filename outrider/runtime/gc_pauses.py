"""Keeps the pauses of Python's garbage collector short.

A full collection looks at all objects that could be part of a cycle, and no thread runs meanwhile: some
200 ms for a model and its libraries, over 100 ms for what a busy worker remembers of its sessions. So objects
are exempt once a service has loaded, and again after each full collection that took long. An exempt object is
freed as usual when nothing refers to it. Only exempt objects that refer to one another in a cycle stay, until
a collection that exempts nothing; it waits for a moment in which the process is idle.
"""

import asyncio
import gc
import time
from dataclasses import dataclass
from typing import Any

LONG_S = 0.01
"""Processor seconds of a full collection after which its survivors are exempt."""
LOOK_S = 10.0
"""Seconds between two looks at whether the process is idle."""
IDLE = 0.1
"""Share of a core that an idle process uses at most."""
THAW_S = 3600.0
"""Seconds, at least, between two collections that exempt nothing."""
THAW_BUSY_S = 86_400.0
"""Seconds after which even a process that is never idle has such a collection."""


def freeze() -> None:
    """Collects garbage once, then exempts all objects that exist now from further collections."""
    gc.collect()
    gc.freeze()
    # The collector waits until a quarter as many objects came as the last full collection left: here none.
    gc.collect()


@dataclass(slots=True)
class ThawSchedule:
    """Decides when to collect without exemptions. Times are in seconds, on any clock."""

    thawed_s: float
    """When nothing was exempt the last time."""
    looked_s: float
    """When `is_due` was asked the last time."""
    processor_s: float
    """Processor time of the process by then."""

    def is_due(self, now_s: float, processor_s: float) -> bool:
        """Whether to collect without exemptions now, with the processor time of the process so far."""
        used, self.processor_s = processor_s - self.processor_s, processor_s
        passed, self.looked_s = now_s - self.looked_s, now_s
        since = now_s - self.thawed_s
        return since >= THAW_BUSY_S or (since >= THAW_S and used <= IDLE * passed)


class GcPauses:
    """Exempts the survivors of long collections, from `start` on, until `stop`."""

    def __init__(self) -> None:
        self._began_s = 0.0
        self._has_exempted = False
        """Whether survivors were exempted since the last collection without exemptions."""
        self._schedule: ThawSchedule
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Exempts all objects that exist now; to be called on the running event loop."""
        freeze()
        self._schedule = ThawSchedule(time.monotonic(), time.monotonic(), time.process_time())
        gc.callbacks.append(self._collecting)
        self._look_later()

    def stop(self) -> None:
        """Exempts nothing more; may be called without `start`."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            gc.callbacks.remove(self._collecting)

    def _collecting(self, phase: str, info: dict[str, Any]) -> None:
        """The collector calls this before and after each collection, in the thread that collects."""
        if info["generation"] < 2:
            return
        if phase == "start":
            self._began_s = time.thread_time()
        elif time.thread_time() - self._began_s >= LONG_S:
            gc.freeze()
            self._has_exempted = True

    def _look(self) -> None:
        now_s = time.monotonic()
        is_due = self._schedule.is_due(now_s, time.process_time())
        if is_due and self._has_exempted:
            gc.unfreeze()
            freeze()
            self._has_exempted, self._schedule.thawed_s = False, now_s
        self._look_later()

    def _look_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)
