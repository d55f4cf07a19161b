"""Watches a process's event loop: a timer on the loop measures stalls, a thread looks at the loop meanwhile.

A stall costs every request of the process. Parsers and formatters in C hold the interpreter lock, so that the
thread sees the loop only once they return; the loop's stack still shows who called them then.
"""

import asyncio
import json
import logging
import sys
import sysconfig
import threading
import time
from collections import Counter, deque
from types import FrameType
from typing import NamedTuple

from outrider.runtime.metrics import Metrics
from outrider.runtime.stalls.record import UNKNOWN, Seen, Stall, StallRecord, most_seen
from outrider.wire.origin import origin_of_task

log = logging.getLogger(__name__)

BEAT_S = 0.025
"""Seconds between two calls of the timer on the loop."""
LEAST_S = 0.02
"""Seconds by which the timer has to be late for a stall."""
LOOK_S = 0.05
"""Seconds between two looks of the thread."""
DEEPEST = 24
"""Most functions of a stack to keep."""
MOST_SEEN = 64
"""Most different stacks of one stall to keep."""
LOGGED_FUNCTIONS = 8
JOIN_S = 1.0
STANDARD_LIBRARY = sysconfig.get_path("stdlib")
PACKAGES = ("outrider.", "orchestrator.", "verifier_service.", "drafter_service.", "retrieval_service.")
"""Beginnings of this project's modules, which may lie among the installed libraries."""


class _Late(NamedTuple):
    """A call of the timer that came late."""

    number: int
    ended: float
    seconds: float
    processor_seconds: float


class Watchdog:
    """Watches the loop on which it is started, until `stop`."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._record = StallRecord()
        self._late: deque[_Late] = deque()
        self._seen: Counter[Seen] = Counter()
        self._seen_before = 0
        """Number of the timer's call that was due when `_seen` was seen."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._loop: asyncio.AbstractEventLoop
        self._loop_thread = 0
        self._timer: asyncio.TimerHandle | None = None
        self._number = 0
        self._beat_at = 0.0
        self._processor_s = 0.0

    def start(self) -> None:
        """Starts to watch the running loop, on whose thread this is called."""
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._schedule(time.monotonic(), time.thread_time())
        self._thread.start()

    def stop(self) -> None:
        """Stops watching and logs what no line tells of yet; called on the loop, also without `start`."""
        if self._timer is None:
            return
        self._timer.cancel()
        self._timer = None
        self._stopping.set()
        self._thread.join(JOIN_S)

    def recent(self) -> bytes:
        """The most recent stalls as a JSON array, the oldest first; may be called from any thread."""
        return json.dumps([stall.as_object() for stall in self._record.recent]).encode() + b"\n"

    def _beat(self) -> None:
        now, processor_s = time.monotonic(), time.thread_time()
        late = now - self._beat_at - BEAT_S
        if late >= LEAST_S:
            used = processor_s - self._processor_s
            self._late.append(_Late(self._number, time.time(), late, used))
        self._number += 1
        self._schedule(now, processor_s)

    def _schedule(self, now: float, processor_s: float) -> None:
        self._beat_at, self._processor_s = now, processor_s
        self._timer = self._loop.call_later(BEAT_S, self._beat)

    def _watch(self) -> None:
        while not self._stopping.wait(LOOK_S):
            self._gather()
            if time.monotonic() - self._beat_at > BEAT_S + LEAST_S:
                self._look()
        self._gather(last=True)

    def _gather(self, last: bool = False) -> None:
        """Records the stalls that have ended, and logs one of them where a line is due."""
        while self._late:
            late = self._late.popleft()
            seen = most_seen(self._seen) if late.number == self._seen_before else Seen()
            stall = Stall(late.ended, late.seconds, late.processor_seconds, seen)
            place, longest_s = self._record.add(stall)
            self._metrics.loop_stalls.observe(stall.seconds)
            self._metrics.longest_loop_stall.labels(place).set(longest_s)
        if (due := self._record.to_log(time.monotonic(), last)) is not None:
            _log(*due)

    def _look(self) -> None:
        """Notes what the loop's thread runs at this moment of a stall."""
        number = self._number
        if self._seen_before != number:
            self._seen.clear()
            self._seen_before = number
        seen = _seen(sys._current_frames().get(self._loop_thread), self._request())
        if seen in self._seen or len(self._seen) < MOST_SEEN:
            self._seen[seen] += 1

    def _request(self) -> str:
        task = asyncio.current_task(self._loop)
        return "" if task is None else origin_of_task(task).request


def _seen(innermost: FrameType | None, request: str) -> Seen:
    """What a thread runs whose innermost frame this is."""
    frame, stack, where = innermost, list[str](), UNKNOWN
    while frame is not None and len(stack) < DEEPEST:
        name = f"{frame.f_globals.get('__name__', '?')}.{frame.f_code.co_qualname}"
        stack.append(f"{name}:{frame.f_lineno}")
        if where == UNKNOWN and (name.startswith(PACKAGES) or not _is_library(frame.f_code.co_filename)):
            where = name
        frame = frame.f_back
    return Seen(where, tuple(stack), request)


def _is_library(file: str) -> bool:
    return file.startswith((STANDARD_LIBRARY, "<")) or "site-packages" in file


def _log(stall: Stall, others: int) -> None:
    fields = {
        "stall_ms": round(stall.seconds * 1000),
        "processor_ms": round(stall.processor_seconds * 1000),
        "where": stall.seen.where,
        "request": stall.seen.request,
        "stack": " < ".join(stall.seen.stack[:LOGGED_FUNCTIONS]),
        "others": others,
    }
    told = {key: value for key, value in fields.items() if value not in ("", None)}
    # A thread that computed nothing waited for a core or a lock: the machine is busy, nothing is wrong.
    level = logging.WARNING if stall.processor_seconds >= LEAST_S else logging.INFO
    log.log(level, "the event loop stood still: every request of this process waited", extra={"fields": told})
