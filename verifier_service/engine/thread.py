"""The engine's thread: takes commands, waits, has the target compute, and keeps the time of it all.

drain the inbox - begin a step - publish what the last one did, and this one's beat - one forward - finish.
What a step does is the core's; everything that touches the target is here, and nothing touches a socket.
"""

import logging
import threading
import time
from collections.abc import Callable

from outrider.lm.ranks import RankLost
from verifier_service.commands import Batch, Command, Stop
from verifier_service.engine.core import AwaitDrafts, EngineCore, Idle, Outcome, TargetPass
from verifier_service.intake import Intake
from verifier_service.kv_cache import KVCache
from verifier_service.limits import EngineLimits
from verifier_service.pace import StepPace
from verifier_service.step_clock import StepClock
from verifier_service.target import Target
from verifier_service.timings import Timings

log = logging.getLogger(__name__)

# After this many failed forwards in a row the next would fail too: the process ends, and its sessions go
# elsewhere.
_MOST_FAILURES = 3


class EngineThread:
    """Decodes sessions until it is stopped.

    Args:
        target: the model; the engine's thread alone uses it from `start` on.
        limits: bounds of a step.
        publish: called once per step, and per beat while idle, from the engine's thread.
        fail: called once if the engine cannot go on, from the engine's thread.
        pace: what steps of this target take, as far as it is known.
    """

    def __init__(
        self,
        target: Target,
        limits: EngineLimits,
        publish: Callable[[Batch], None],
        fail: Callable[[BaseException], None],
        pace: StepPace | None = None,
    ) -> None:
        self.timings = Timings()
        pace = pace or StepPace()
        self._clock = StepClock(self.timings, pace)
        kv = KVCache(target.pool, limits.reuse_prefixes, limits.lease_s)
        self.core = EngineCore(kv, limits, pace, self._clock)
        self._target = target
        self._publish = publish
        self._fail = fail
        self._intake = Intake(self.core.sessions.merge)
        self._stopping = False
        self._failures = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begins to take commands."""
        self._thread.start()

    def put(self, command: Command) -> None:
        """Hands a command over; from any thread."""
        self._intake.put(command)

    def stop(self, timeout_s: float) -> bool:
        """Ends the thread when the step in flight ends; returns whether it did in time. Blocks."""
        self.put(Stop())
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except BaseException as error:
            log.exception("the engine failed")
            self._fail(error)

    def _turn(self) -> None:
        """One step, or one beat of an idle engine."""
        with self._clock.taking_in():
            for command in self._intake.waiting():
                self._handle(command)
        if self._stopping:
            self._tell(self.core.collect())
            return
        begun = self.core.begin(time.perf_counter())
        while isinstance(begun, AwaitDrafts):
            begun = self._await_drafts(begun)
        if begun.batch is not None:
            self._tell(begun.batch)
        if isinstance(begun, TargetPass):
            self._compute(begun)
        elif (left_s := begun.until_s - time.perf_counter()) > 0:
            self._clock.pause()
            self._wait_for_command(left_s)

    def _tell(self, batch: Batch) -> None:
        self._publish(batch)
        self.core.published(batch, time.perf_counter())

    def _handle(self, command: Command) -> None:
        if isinstance(command, Stop):
            self._stopping = True
        else:
            self.core.apply(command, time.perf_counter())

    def _wait_for_command(self, timeout_s: float) -> None:
        """Blocks until a command comes, and carries it out."""
        if (command := self._intake.get(timeout_s)) is not None:
            self._handle(command)

    def _await_drafts(self, wait: AwaitDrafts) -> TargetPass | AwaitDrafts | Idle:
        """Lets a draft come in, if the step may wait for one."""
        if wait.batch is not None:
            self._tell(wait.batch)
        elif (left_s := wait.until_s - time.perf_counter()) > 0:
            self._wait_for_command(left_s)
        return self.core.begin(time.perf_counter())

    def _compute(self, begun: TargetPass) -> None:
        """One forward; where it fails, the sessions of the pass end, and after some in a row the engine."""
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
            times = self._clock.end(begun.rows, sessions, begun.depth)
            self.core.finish(begun, outcome, times)

    def _forward(self, begun: TargetPass) -> Outcome:
        with self._intake.computing():
            return self._target.forward(begun.shares).numpy()

    def _forward_failed(self, begun: TargetPass, error: Exception) -> None:
        self._clock.pause()
        self._failures += 1
        log.error("the target's forward failed (%d in a row)", self._failures)
        self.core.abandon(begun, error)
        if self._failures >= _MOST_FAILURES:
            self._tell(self.core.collect())
            raise RuntimeError(f"the target's forward failed {self._failures} times in a row") from error
