"""One thread that works on the newest wish of each session, in order of asking; nobody ever waits for it."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

log = logging.getLogger(__name__)


@dataclass(slots=True)
class SearchCounts:
    """Counts of wishes so far; `replaced` by a newer one of the same session, `dropped` for want of room."""

    done: int = 0
    failed: int = 0
    replaced: int = 0
    dropped: int = 0


class Searcher:
    """At most `capacity` sessions wait; where there are more, the wish that waited longest is dropped."""

    def __init__(self, capacity: int = 256) -> None:
        self._capacity = capacity
        self._waiting: OrderedDict[Hashable, Callable[[], None]] = OrderedDict()
        self._changed = threading.Condition()
        self._busy = False
        self._closed = False
        self.counts = SearchCounts()
        self._thread = threading.Thread(target=self._run, name="dense-search", daemon=True)
        self._thread.start()

    def ask(self, session: Hashable, wish: Callable[[], None]) -> None:
        """Has `wish` called soon, instead of an earlier one of the session that still waits."""
        with self._changed:
            if self._closed:
                return
            if session in self._waiting:
                self.counts.replaced += 1
            elif len(self._waiting) >= self._capacity:
                self._waiting.popitem(last=False)
                self.counts.dropped += 1
            self._waiting[session] = wish
            self._changed.notify_all()

    def forget(self, session: Hashable) -> None:
        """What the session still waits for is not done."""
        with self._changed:
            self._waiting.pop(session, None)

    def is_idle(self, timeout_s: float) -> bool:
        """Waits until nothing is asked for; whether that came to be in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._busy, timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends the thread after what it is at; what waits is left undone."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or bool(self._waiting))
                if self._closed:
                    return
                _, wish = self._waiting.popitem(last=False)
                self._busy = True
            failed = False
            try:
                wish()
            except Exception as error:  # one session's failure is not the others'
                failed = True
                log.warning("a search for references failed: %s", error)
            with self._changed:
                self.counts.failed += failed
                self.counts.done += not failed
                self._busy = False
                self._changed.notify_all()
