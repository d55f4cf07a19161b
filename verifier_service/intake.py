"""What comes to the engine from other threads: commands wait for it, drafts need not.

While the target computes, nobody touches the sessions. So drafts that come then are merged at once, by the
thread that brings them, and the engine's own has that much less to do between two passes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from threading import Lock

from speculative.fragment import Fragment
from verifier_service.commands import Command, InFlight, Offers

Merge = Callable[[int, Fragment, float], bool]
"""Takes in a session's draft that came at a time; returns False where only the engine's thread can tell."""


class Intake:
    """The engine's inbox. What the engine's thread calls is marked so; anything else is for any thread.

    Args:
        merge: called by one thread at a time, and never while the engine's is between two passes.
    """

    def __init__(self, merge: Merge) -> None:
        self._merge = merge
        self._commands: SimpleQueue[Command] = SimpleQueue()
        # Whoever holds it may touch the sessions: the engine's thread except while the target computes.
        self._sessions = Lock()
        self._sessions.acquire()
        self._wanted = True
        """Whether the engine's thread has the sessions, or waits for them."""
        self._merged: list[tuple[InFlight, int]] = []
        """Drafts that were merged since, by link: a link's bound is for a step, whoever merges."""

    def put(self, command: Command) -> None:
        """Hands something over; returns at once, or after merging what of it can be merged now."""
        if isinstance(command, Offers) and not self._wanted and self._sessions.acquire(blocking=False):
            try:
                left = tuple([draft for draft in command.drafts if not self._merge_now(draft, command)])
                self._merged.append((command.in_flight, len(command.drafts) - len(left)))
            finally:
                self._sessions.release()
            if not left:
                return
            command = Offers(left, command.arrived_s, command.in_flight)
        self._commands.put(command)

    def get(self, timeout_s: float) -> Command | None:
        """The next command, waiting for one for so long; None: there was none. The engine's thread."""
        try:
            return self._commands.get(timeout=timeout_s)
        except Empty:
            return None

    def waiting(self) -> Iterator[Command]:
        """The commands that are there, and those that come meanwhile. The engine's thread."""
        while not self._commands.empty():
            yield self._commands.get_nowait()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """While the target computes: others may merge drafts. The engine's thread."""
        self._wanted = False
        self._sessions.release()
        try:
            yield
        finally:
            self._wanted = True
            self._sessions.acquire()
            for in_flight, count in self._merged:
                in_flight.taken += count
            self._merged.clear()

    def _merge_now(self, draft: tuple[int, Fragment], offers: Offers) -> bool:
        # The engine's thread waits for one draft at most, however many there are.
        return not self._wanted and self._merge(*draft, offers.arrived_s)
