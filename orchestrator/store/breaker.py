"""When to leave a peer alone that does not answer, and when to try it again.

Pure: the clock is given. Closed, it lets every call through; after some failures in a row it opens and lets
none through; when its pause is over one call may try, and what becomes of that one decides.
"""

from collections.abc import Callable

FAILURES = 3
PAUSE_S = (0.25, 4.0)
"""First and longest pause; each failed trial doubles it."""


class Breaker:
    """For one peer; `now` is any monotonic clock in seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._failures = 0
        self._pause_s = PAUSE_S[0]
        self._tries_at = 0.0
        self._trying = False
        self.opened = 0
        """How often it has opened."""

    @property
    def closed(self) -> bool:
        """Whether every call is let through."""
        return self._failures < FAILURES

    def allows(self) -> bool:
        """Whether a call may be made; where it is open, a True is this pause's one trial."""
        if self.closed:
            return True
        now = self._now()
        if now < self._tries_at:
            return False
        self._tries_at = now + self._pause_s
        self._trying = True
        return True

    def succeeded(self) -> bool:
        """A call was answered; whether that closed it."""
        was, self._failures, self._pause_s = self.closed, 0, PAUSE_S[0]
        self._trying = False
        return not was

    def failed(self) -> bool:
        """A call was not; whether that opened it."""
        was = self.closed
        self._failures += 1
        if self.closed:
            return False
        if not was and not self._trying:
            return False  # a call from before it opened
        if self._trying:
            self._pause_s = min(2 * self._pause_s, PAUSE_S[1])
        self._trying = False
        self.opened += was
        self._tries_at = self._now() + self._pause_s
        return was
