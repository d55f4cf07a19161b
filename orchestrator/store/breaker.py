"""A circuit breaker: when to leave a peer alone that does not answer, and when to try it again.

Pure: the clock is given. A closed breaker lets every call through. After some failures in a row it opens and
lets no call through; when its pause is over, one call may try, and the outcome of that call decides.
"""

from collections.abc import Callable

from outrider.runtime.backoff import Backoff

FAILURES = 3
"""How many failures in a row open the breaker."""
PAUSE_S = (0.25, 4.0)
"""First and longest pause, in seconds; each failed trial doubles the pause."""


class Breaker:
    """The breaker of one peer; `now` is any monotonic clock in seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._failures = 0
        self._backoff = Backoff(*PAUSE_S)
        self._pause_s = 0.0
        self._tries_at = 0.0
        self._trying = False
        self.opened = 0
        """How often the breaker has opened."""

    @property
    def closed(self) -> bool:
        """Whether the breaker lets every call through."""
        return self._failures < FAILURES

    def allows(self) -> bool:
        """Whether a call may be made; from an open breaker, True is this pause's one trial."""
        if self.closed:
            return True
        now = self._now()
        if now < self._tries_at:
            return False
        self._tries_at = now + self._pause_s
        self._trying = True
        return True

    def succeeded(self) -> bool:
        """Count an answered call; returns whether it closed the breaker."""
        was, self._failures = self.closed, 0
        self._backoff.reset()
        self._trying = False
        return not was

    def failed(self) -> bool:
        """Count a failed call; returns whether it opened the breaker."""
        was = self.closed
        self._failures += 1
        if self.closed:
            return False
        if not was and not self._trying:
            return False  # the call was made before the breaker opened
        self._pause_s = self._backoff.next_s()
        self._trying = False
        self.opened += was
        self._tries_at = self._now() + self._pause_s
        return was
