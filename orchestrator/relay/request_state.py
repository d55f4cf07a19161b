"""The state of one request on its way: whether it was ended, and how much time it has left.

Knows nothing of how a request is opened, nor of what becomes of its tokens.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from outrider.runtime.backoff import Backoff
from speculative.errors import OutriderError

FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 0.5


class RequestState:
    """A running request as later calls for its session see and end it.

    Args:
        earlier: the request that this one takes the session from, if any.
    """

    def __init__(self, earlier: "RequestState | None" = None) -> None:
        self.cancelled = False
        self.error: OutriderError | None = None
        """The error that ends the request; None while it may go on."""
        self.epoch: int = 0 if earlier is None else earlier.epoch
        """The highest epoch that the session is known to have had; 0: none.

        An epoch counts as soon as this process sends an Open under it, since an Open can arrive late."""
        self.recovers = False
        """Whether the request has lost its verifier and has no other one yet, so that no verifier has to be
        told of a Cancel."""
        self._fail_readers: Callable[[OutriderError], None] | None = None
        self._on_cancel: Callable[[], None] | None = None

    def cancel(self) -> None:
        """The client wants no more; a request that waits, to begin or for a verifier, waits no longer."""
        self.cancelled = True
        if self._on_cancel is not None:
            self._on_cancel()

    def when_cancelled(self, call: Callable[[], None]) -> None:
        """Have `cancel` call this from now on; an earlier `cancel` calls it at once."""
        self._on_cancel = call
        if self.cancelled:
            call()

    @asynccontextmanager
    async def heeding(self, cancel: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
        """Inside the context, `cancel` runs, and the request is cancelled once it returns."""

        async def heed() -> None:
            await cancel()
            self.cancel()

        task = asyncio.create_task(heed(), name="cancels")
        try:
            yield
        finally:
            task.cancel()

    def end(self, error: OutriderError) -> None:
        """Give the client this error in place of all further tokens."""
        self.error = error
        if self._fail_readers is not None:
            self._fail_readers(error)

    def attach(self, fail_readers: Callable[[OutriderError], None]) -> None:
        """Have `end` fail the request's readers by this function from now on."""
        self._fail_readers = fail_readers
        if self.error is not None:
            fail_readers(self.error)

    def opens(self, epoch: int) -> None:
        """Record that the request is about to be opened under this epoch.

        Raises the error that ended the request: a superseded request must not take the session back.
        """
        if self.error is not None:
            raise self.error
        self.epoch = max(self.epoch, epoch)


class RequestDeadline:
    """The time that a request has, in seconds.

    Args:
        now: seconds of any monotonic clock.
        seconds: time until the request's deadline; None: it has none.
        patience_s: how long a request without a deadline waits for a verifier.
    """

    def __init__(self, now: Callable[[], float], seconds: float | None, patience_s: float) -> None:
        self._now = now
        self._ends = None if seconds is None else now() + seconds
        self._patience_s = patience_s

    def time_left(self) -> float | None:
        """Seconds until the deadline, at least 0; None: there is no deadline."""
        return None if self._ends is None else max(0.0, self._ends - self._now())

    def gives_up(self) -> float:
        """The time until which a request that loses its verifier now waits for another."""
        return self._now() + self._patience_s if self._ends is None else self._ends

    def until(self, moment: float) -> float:
        """Seconds from now until this time."""
        return moment - self._now()


class RecoveryPauses:
    """The pauses of one recovery between its attempts, from its beginning to the request's deadline."""

    def __init__(self, deadline: RequestDeadline) -> None:
        self._deadline = deadline
        self._until = deadline.gives_up()
        self._backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)

    def next_s(self) -> float | None:
        """Seconds to wait before the next attempt; None: the time is over."""
        left_s = self._deadline.until(self._until)
        return None if left_s <= 0 else min(self._backoff.next_s(), left_s)
