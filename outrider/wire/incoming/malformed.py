"""Messages that are neither protobuf nor HTTP: counted by method, and logged at most once a second.

Any peer that connects can send such bytes without end. So the log has one line for many messages, and no
trace.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable

log = logging.getLogger(__name__)

EVERY_S = 1.0
"""The shortest time between two lines of the log, in seconds."""


class MalformedMessages:
    """Counts of one process's malformed messages, and their lines in the log."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts: Counter[str] = Counter()
        """Messages since the process's start, by method: `outrider.v1.Generation/Generate`, or `HTTP/1.1`."""
        self._clock = clock
        self._next_line_at = 0.0
        self._unlogged = 0

    def note(self, method: str, peer: str, what: str) -> None:
        """Counts one message; `what` says what is wrong with it."""
        self.counts[method] += 1
        now = self._clock()
        if now < self._next_line_at:
            self._unlogged += 1
            return
        fields = {"method": method, "peer": peer, "more": self._unlogged}
        log.warning("malformed message: %s", what, extra={"fields": fields})
        self._next_line_at, self._unlogged = now + EVERY_S, 0


MALFORMED = MalformedMessages()
"""This process's counts."""
