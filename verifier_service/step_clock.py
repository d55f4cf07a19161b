"""Where the time of the engine's thread goes, from one forward to the next."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from verifier_service.pace import StepPace
from verifier_service.timings import Timings


class PassTimes(NamedTuple):
    """When a forward ran, in seconds."""

    began_s: float
    ended_s: float
    waited_s: float = 0.0
    """How long its step was held back for drafts."""


class StepClock:
    """Keeps the time of steps. All times are of time.perf_counter, in seconds.

    Args:
        timings: told of every step's parts.
        pace: learns what steps take.
    """

    def __init__(self, timings: Timings, pace: StepPace) -> None:
        self.began = 0.0
        """When the last forward did."""
        self.ended: float | None = None
        """When it ended; None: it failed, or there was nothing to do since."""
        self.waited = 0.0
        """How long drafts were waited for before it."""
        self._timings = timings
        self._pace = pace
        self._sampling = self._waiting = 0.0
        self._taking_in = 0.0  # drafts and commands: no part of what one more session or node costs

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Tokens are chosen."""
        began = time.perf_counter()
        yield
        self._sampling += time.perf_counter() - began

    @contextmanager
    def taking_in(self) -> Iterator[None]:
        """Drafts and commands are taken in."""
        began = time.perf_counter()
        yield
        self._taking_in += time.perf_counter() - began

    def waited_for_drafts(self, seconds: float) -> None:
        """The step was held back for drafts."""
        self._waiting += seconds
        self._timings.waiting.add(seconds * 1000)

    def pause(self) -> None:
        """What comes between this forward and the next is no part of a step."""
        self.ended = None

    def begin(self, sessions: int) -> None:
        """A forward of so many sessions begins."""
        self.began, self.waited = time.perf_counter(), self._waiting
        if self.ended is not None:
            between = self.began - self.ended - self._waiting
            self._timings.sampling.add(self._sampling * 1000)
            self._timings.add_split(sessions, (between - self._sampling) * 1000)
            self._pace.record_overhead(max(0.0, between - self._taking_in) * 1000, sessions)
        self._sampling = self._waiting = self._taking_in = 0.0

    def end(self, rows: int, sessions: int, depth: float) -> PassTimes:
        """It has ended, and was of so many input tokens, each attending over `depth` cached positions on
        average."""
        self.ended = time.perf_counter()
        forward_ms = (self.ended - self.began) * 1000
        self._pace.record(rows, forward_ms, sessions, depth)
        self._timings.forward.add(forward_ms)
        return PassTimes(self.began, self.ended, self.waited)
