"""The engine's thread: it takes commands, waits, has the target compute, and measures all of it.

Drain the inbox, begin a step, publish what the last step did and the beat of this one, one forward, finish.
The core decides what a step does. Everything that touches the target is here; nothing touches a socket.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from threading import Lock
from types import MappingProxyType

from outrider.lm.parallel.rank_group import RankLost
from outrider.lm.step_profile import StepProfile
from outrider.runtime.stalls.awake_clock import AwakeClock
from speculative.fragment import Fragment
from verifier_service.engine.core import AwaitDrafts, EngineCore, Idle, TargetPass
from verifier_service.engine.kv_cache import KVCache
from verifier_service.engine.messages import Command, InFlight, Offers, StepReport, Stop, load_of
from verifier_service.engine.noise_ahead import LEAST_VOCABULARY, NoiseAhead, Wanted, positions_ahead
from verifier_service.engine.stats import StepClock, Timings
from verifier_service.engine.step import EngineLimits, PackedTarget, PassOutcome
from verifier_service.engine.step_cost import StepCostModel
from verifier_service.proposers.batched import BatchedProposer

log = logging.getLogger(__name__)

# After this many failed forwards in a row the next would fail too: the process ends, and its sessions go
# elsewhere.
_MOST_FAILURES = 3
_NOISE_STOP_S = 1.0

Merge = Callable[[int, Fragment, float], bool]
"""Merges a draft of a session (handle, draft, arrival); returns False to leave it to the engine's thread."""


class EngineInbox:
    """Commands and drafts for the engine from other threads: commands are queued, drafts need not be.

    While the target computes, the engine's thread does not touch the sessions. So a draft that comes then is
    merged at once, by the thread that brings it, and the engine has that much less to do between two passes.
    Methods that only the engine's thread may call say so.

    Args:
        merge: called by one thread at a time, and never while the engine's thread has the sessions.
    """

    def __init__(self, merge: Merge) -> None:
        self._merge = merge
        self._commands: SimpleQueue[Command] = SimpleQueue()
        # Its holder may touch the sessions: the engine's thread, except while the target computes.
        self._sessions = Lock()
        self._sessions.acquire()
        self._wanted = True
        """Whether the engine's thread holds the sessions, or waits for them."""
        self._merged: list[tuple[InFlight, int]] = []
        """Drafts merged since, by link: the bound of a link counts those of a whole step."""

    def put(self, command: Command) -> None:
        """Hands a command over; returns at once, or after merging those of its drafts that can be now."""
        if isinstance(command, Offers) and not self._wanted and self._sessions.acquire(blocking=False):
            try:
                left = tuple([draft for draft in command.drafts if not self._merge_now(draft, command)])
                self._merged.append((command.in_flight, load_of(command.drafts) - load_of(left)))
            finally:
                self._sessions.release()
            if not left:
                return
            command = Offers(left, command.arrived_s, command.in_flight)
        self._commands.put(command)

    def get(self, timeout_s: float) -> Command | None:
        """The next command; None where none comes in time. Only for the engine's thread."""
        try:
            return self._commands.get(timeout=timeout_s)
        except Empty:
            return None

    def waiting(self) -> Iterator[Command]:
        """The commands that wait now. Only for the engine's thread.

        Those that come meanwhile wait for the next call: a source that drafts faster than its drafts are
        merged would otherwise hold up the pass, and every session with it, for as long as it goes on.
        """
        for _ in range(self._commands.qsize()):
            yield self._commands.get_nowait()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Context in which other threads may merge drafts; the engine's thread enters it around a forward."""
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
        # The engine's thread waits for the merging of one draft at most, however many there are.
        return not self._wanted and self._merge(*draft, offers.arrived_s)


class EngineThread:
    """Decodes sessions until it is stopped.

    Args:
        target: the model; the engine's thread alone uses it from `start` on.
        limits: bounds of a step.
        publish: called once per step, and per beat while idle, from the engine's thread.
        fail: called once if the engine cannot go on, from the engine's thread.
        costs: what steps of this target take, as far as that is known.
        proposers: batched proposers, by source name.
        take_profile: returns the profile of passes that have just become another kind, or else None.
    """

    def __init__(
        self,
        target: PackedTarget,
        limits: EngineLimits,
        publish: Callable[[StepReport], None],
        fail: Callable[[BaseException], None],
        costs: StepCostModel | None = None,
        proposers: Mapping[str, BatchedProposer] = MappingProxyType({}),
        take_profile: Callable[[], StepProfile | None] = lambda: None,
    ) -> None:
        self.timings = Timings()
        costs = costs or StepCostModel()
        self._awake = AwakeClock() if proposers else None
        self._clock = StepClock(self.timings, costs, self._awake)
        kv = KVCache(target.pool, limits.reuse_prefixes, limits.lease_s)
        self.core = EngineCore(kv, limits, costs, self._clock, proposers)
        self._target = target
        self._costs = costs
        self._take_profile = take_profile
        self._publish = publish
        self._fail = fail
        self._inbox = EngineInbox(self.core.sessions.merge)
        width = target.vocabulary_size
        self._noise = NoiseAhead(width) if width >= LEAST_VOCABULARY else None
        self._stopping = False
        self._failures = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread, which takes commands from now on."""
        self._thread.start()

    def put(self, command: Command) -> None:
        """Hands a command over; from any thread."""
        self._inbox.put(command)

    def stop(self, timeout_s: float) -> bool:
        """Ends the thread when the step in flight ends; returns whether it did in time. Blocks."""
        self.put(Stop())
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        if self._noise is not None:
            self._noise.start()
        if self._awake is not None:
            self._awake.start()
        try:
            while not self._stopping:
                self._turn()
        except BaseException as error:
            log.exception("the engine failed")
            self._fail(error)
        finally:
            if self._noise is not None and not self._noise.stop(_NOISE_STOP_S):
                log.warning("noise was still being drawn")
            if self._awake is not None:
                self._awake.stop()

    def _turn(self) -> None:
        """One step, or one beat of an idle engine."""
        with self._clock.taking_in():
            for command in self._inbox.waiting():
                self._handle(command)
        if self._stopping:
            self._publish_report(self.core.collect())
            return
        begun = self.core.begin(time.perf_counter())
        while isinstance(begun, AwaitDrafts):
            begun = self._await_drafts(begun)
        if begun.report is not None:
            self._publish_report(begun.report)
        if isinstance(begun, TargetPass):
            self._compute(begun)
        elif (left_s := begun.until_s - time.perf_counter()) > 0:
            self._clock.pause()
            self._wait_for_command(left_s)

    def _publish_report(self, report: StepReport) -> None:
        self._publish(report)
        self.core.published(report, time.perf_counter())

    def _handle(self, command: Command) -> None:
        if isinstance(command, Stop):
            self._stopping = True
        else:
            self.core.apply(command, time.perf_counter())

    def _wait_for_command(self, timeout_s: float) -> None:
        """Blocks until a command comes, and carries it out."""
        if (command := self._inbox.get(timeout_s)) is not None:
            self._handle(command)

    def _await_drafts(self, wait: AwaitDrafts) -> TargetPass | AwaitDrafts | Idle:
        """Publishes the step's report, or lets one command come in; then asks the core again."""
        if wait.report is not None:
            self._publish_report(wait.report)
        elif (left_s := wait.until_s - time.perf_counter()) > 0:
            self._wait_for_command(left_s)
        return self.core.begin(time.perf_counter())

    def _compute(self, begun: TargetPass) -> None:
        """Has the target compute a pass. A failure ends its sessions, and several in a row the engine."""
        sessions = len(begun.parts)
        self._clock.begin(sessions)
        try:
            outcome = self._forward(begun)
        except RankLost:
            raise
        except Exception as error:
            self._forward_failed(begun, error)
        else:
            self._failures = 0
            if (profile := self._take_profile()) is not None:
                self._costs.use(profile)
            times = self._clock.end(begun.rows, sessions, begun.depth, begun.nodes)
            self.core.finish(begun, outcome, times)

    def _forward(self, begun: TargetPass) -> PassOutcome:
        if self._noise is not None:
            self._noise.draw(_noise_wanted(begun))
        with self._inbox.computing():
            return self._target.forward(begun.sequences)

    def _forward_failed(self, begun: TargetPass, error: Exception) -> None:
        self._clock.pause()
        self._failures += 1
        log.error("the target's forward failed (%d in a row)", self._failures)
        self.core.abandon(begun, error)
        if self._failures >= _MOST_FAILURES:
            self._publish_report(self.core.collect())
            raise RuntimeError(f"the target's forward failed {self._failures} times in a row") from error


def _noise_wanted(begun: TargetPass) -> list[Wanted]:
    """The noise that the sampled sessions of a pass need at its end."""
    return [
        (session.noise, positions_ahead(len(session.ids), rows.tree))
        for session, rows in begun.parts
        if rows.final and session.noise is not None
    ]
