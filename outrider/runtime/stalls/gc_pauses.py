"""Keeps the pauses of Python's garbage collector short.

A full collection looks at all objects that could be part of a cycle, and no thread runs meanwhile: some
200 ms for a model and its libraries, over 100 ms for what a busy worker remembers of its sessions. So objects
are exempt once a service has loaded, and again after each full collection that took long. An exempt object is
freed as usual when nothing refers to it. Only cycles of exempt objects, and what they refer to, stay until a
collection without exemptions, after which everything is exempt again. That collection waits until the process
uses little of a core. A Python that collects in small increments has no long collections to exempt anything.
Collections of young objects are short, but an engine of many sessions would have several in a step. So they
come less often.
"""

import asyncio
import gc
import sys
import time
from dataclasses import dataclass
from typing import Any

YOUNG = 10_000
"""Number of new objects after which young ones are collected. With the 700 of Python 3.11 and 3.12 a step of
32 sessions has three collections, and nearly all objects that they look at are gone after the step."""
LONG_S = 0.01
"""Processor seconds of a full collection after which its survivors are exempt."""
LOOK_S = 10.0
"""Seconds between two looks at how busy the process is."""
IDLE = 0.1
"""Share of a core that an idle process uses at most."""
THAW_S = 3600.0
"""Seconds, at least, between two collections without exemptions."""
THAW_BUSY_S = 86_400.0
"""Seconds after which even a process that is never idle has such a collection."""


def freeze() -> None:
    """Collects garbage once, then exempts all objects that exist now from further collections."""
    gc.collect()
    gc.freeze()
    # The next full collection waits until new objects are a quarter of what the last one left: here none.
    gc.collect()


@dataclass(slots=True)
class ThawSchedule:
    """Decides when to thaw: to collect without exemptions. Times are in seconds, on any clock."""

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


class _YoungObjects:
    """How often young objects are collected: seldom while any of the process's services serves."""

    def __init__(self) -> None:
        self._services = 0
        self._before = gc.get_threshold()

    def collect_seldom(self) -> None:
        """Counts a service that begins to serve. A higher threshold stays, and so does 0, for never."""
        self._services += 1
        if self._services == 1:
            self._before = gc.get_threshold()
            # From 3.14 on a collection of young objects also looks at old ones, in proportion to the former.
            if 0 < self._before[0] < YOUNG and sys.version_info < (3, 14):
                gc.set_threshold(YOUNG, *self._before[1:])

    def collect_as_before(self) -> None:
        """Counts a service that stops serving; the last one restores the threshold."""
        self._services -= 1
        if not self._services:
            gc.set_threshold(*self._before)


_YOUNG_OBJECTS = _YoungObjects()


class GcPauses:
    """Exempts the survivors of long collections, from `start` on, until `stop`."""

    def __init__(self) -> None:
        self._began_s = 0.0
        self._schedule: ThawSchedule
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Exempts all objects that exist now; to be called on the running event loop."""
        freeze()
        _YOUNG_OBJECTS.collect_seldom()
        self._schedule = ThawSchedule(time.monotonic(), time.monotonic(), time.process_time())
        gc.callbacks.append(self._collecting)
        self._look_later()

    def stop(self) -> None:
        """Exempts nothing more; may be called without `start`."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            gc.callbacks.remove(self._collecting)
            _YOUNG_OBJECTS.collect_as_before()

    def _collecting(self, phase: str, info: dict[str, Any]) -> None:
        """The collector calls this before and after each collection, in the thread that collects."""
        if info["generation"] < 2:
            return
        if phase == "start":
            self._began_s = time.thread_time()
        elif time.thread_time() - self._began_s >= LONG_S:
            gc.freeze()

    def _look(self) -> None:
        now_s = time.monotonic()
        if self._schedule.is_due(now_s, time.process_time()):
            gc.unfreeze()
            freeze()
            self._schedule.thawed_s = now_s
        self._look_later()

    def _look_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)
