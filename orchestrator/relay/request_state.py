"""The state of one request on its way: whether it was ended, who reads its tokens, how much time it has left.

Knows nothing of how a request is opened, nor of what becomes of its tokens.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from orchestrator.fleet.verifier_link import SessionReader, VerifierLink
from outrider.runtime.backoff import Backoff
from outrider.v1 import verifier_pb2
from outrider.wire.codec import SessionKey
from speculative.errors import OutriderError

FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 0.5


class ChoiceReaders:
    """Readers of a request's choices that have not ended yet, all on one verifier under one epoch.

    Args:
        positions: by choice, where its client's tokens end, prompt included.
    """

    def __init__(
        self, link: VerifierLink, keys: Sequence[SessionKey], epoch: int, positions: Mapping[int, int]
    ) -> None:
        self._link = link
        self._wake = asyncio.Event()
        self._readers: dict[int, SessionReader] = {
            key.choice: link.read(key, epoch, positions[key.choice], self._wake) for key in keys
        }

    def __bool__(self) -> bool:
        return bool(self._readers)

    def __contains__(self, choice: int) -> bool:
        return choice in self._readers

    def fail(self, error: OutriderError) -> None:
        """Fail all readers with this error."""
        for reader in self._readers.values():
            reader.fail(error)

    async def take(self) -> list[tuple[int, verifier_pb2.Committed]]:
        """All messages since the last call, each with its choice; waits for the first.

        Raises the error of a reader that failed, once all messages before it are taken.
        """
        await self._wake.wait()
        self._wake.clear()
        readers = self._readers.items()
        arrived = [(choice, committed) for choice, reader in readers for committed in reader.take()]
        error = next((reader.error for _, reader in readers if reader.error is not None), None)
        if error is not None:
            self._wake.set()
            if not arrived:
                raise error
        return arrived

    def take_urge(self) -> bool:
        """Whether the verifier has asked, since the last call, for the sessions to move elsewhere."""
        readers = self._readers.values()
        urged = any(reader.should_move for reader in readers)
        for reader in readers:
            reader.should_move = False
        return urged

    def end(self, choice: int) -> None:
        """Stop reading a choice that has ended."""
        self._link.leave(self._readers.pop(choice))

    def detach(self) -> None:
        """Stop reading, and let the sessions decode on until a reader comes back or their time is over."""
        for reader in self._readers.values():
            self._link.leave(reader)
        self._readers.clear()

    def cancel(self) -> None:
        """Stop reading, and end the sessions that have not ended."""
        for reader in self._readers.values():
            self._link.leave(reader)
            self._link.cancel_soon(reader.key, reader.epoch)
        self._readers.clear()


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
        self._readers: ChoiceReaders | None = None

    def end(self, error: OutriderError) -> None:
        """Give the client this error in place of all further tokens."""
        self.error = error
        if self._readers is not None:
            self._readers.fail(error)

    def attach(self, readers: ChoiceReaders) -> None:
        """From now on `end` reaches these readers."""
        self._readers = readers
        if self.error is not None:
            readers.fail(self.error)

    def opens(self, epoch: int) -> None:
        """Record that the request is about to be opened under this epoch.

        Raises the error that ended the request: a superseded request must not take the session back.
        """
        if self.error is not None:
            raise self.error
        self.epoch = max(self.epoch, epoch)


class RequestDeadline:
    """How much time a request has.

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
        """The time at which a request that loses its verifier now stops waiting for another."""
        return self._now() + self._patience_s if self._ends is None else self._ends

    def until(self, moment: float) -> float:
        """Seconds until this time."""
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
