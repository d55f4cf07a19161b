"""The engine thread: one packed forward per step over every ready session.

drain the inbox - publish what the last step did, and the next one's beat - maybe wait for drafts - one
forward - match - commit. Everything that touches the model happens here; nothing here touches a socket.
"""

import logging
import threading
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from outrider.lm.ranks import RankLost
from speculative.acceptance.path_match import Match
from speculative.commit import FinishReason
from verifier_service.commands import Batch, Cancel, Command, Offers, Open, Park, Sources, Stop
from verifier_service.counts import CountsByName, EngineTotals
from verifier_service.intake import Intake
from verifier_service.kv_cache import KVCache
from verifier_service.limits import EngineLimits
from verifier_service.observe.round_log import Step
from verifier_service.pace import StepPace
from verifier_service.planner import chunk_rows, pending_rows
from verifier_service.portion import Portion
from verifier_service.running import RunningSessions
from verifier_service.scheduler import Scheduler
from verifier_service.sessions import Session
from verifier_service.step_clock import StepClock
from verifier_service.target import Target
from verifier_service.timings import Timings
from verifier_service.weighing import Weighing

log = logging.getLogger(__name__)

# A forward that fails so often in a row will not recover: the process ends, and its sessions go elsewhere.
_MOST_FAILURES = 3

Part = tuple[Session, Portion]


class Engine:
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
        self.totals = EngineTotals()
        self.timings = Timings()
        self.counts = CountsByName()
        self._target = target
        self._limits = limits
        self._publish = publish
        self._fail = fail
        self.kv = KVCache(target.pool, limits.reuse_prefixes, limits.lease_s)
        scheduler = Scheduler(limits.most_running)
        self._running = RunningSessions(self.kv, scheduler, self.totals, self.counts)
        self._intake = Intake(self._running.merge)
        self.phases = self._running.phases
        self._pace = pace or StepPace()
        self._weighing = Weighing(self._pace, limits.adaptive)
        self._clock = StepClock(self.timings, self._pace)
        self._stopping = False
        self._failures = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def waiting(self) -> int:
        """Sessions that wait for memory or for others to end; from any thread."""
        return self._running.waiting

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
        if not self._running and not self._running.untold:
            self._idle()
        self._drain()
        now = time.perf_counter()
        self._running.expire(now)
        self._running.at(now)
        ready = self._running.ready()
        if not ready or self._stopping:
            self._tell(stepping=False, step_ms=0.0)
        else:
            self._step(ready)

    def _tell(self, stepping: bool, step_ms: float) -> None:
        updates, strikes = self._running.tell()
        least, step = self._weighing.least_survival, self.totals.steps + stepping
        self._publish(Batch(step, int(step_ms * 1000), updates, strikes, least))
        now_ms = time.perf_counter() * 1000
        for update in updates:
            if (session := self._running.get(update.handle)) is not None:
                session.committed(now_ms)

    def _idle(self) -> None:
        """Blocks for a command, up to a beat."""
        self._clock.pause()
        if (command := self._intake.get(self._limits.beat_s)) is not None:
            self._handle(command)

    def _drain(self) -> None:
        with self._clock.taking_in():
            for command in self._intake.waiting():
                self._handle(command)

    def _handle(self, command: Command) -> None:
        running = self._running
        match command:
            case Offers():
                running.take_offers(command)
            case Open(session):
                running.open(session, time.perf_counter())
            case Cancel(handle, message):
                if (cancelled := running.get(handle)) is not None:
                    running.end(cancelled, FinishReason.CANCELLED, message)
            case Park(handle):
                if (parked := running.get(handle)) is not None:
                    running.park(parked)
            case Sources(handle, sources):
                if (changed := running.get(handle)) is not None:
                    with running.guarded(changed):
                        changed.use_sources(sources)
            case Stop():
                self._stopping = True

    def _step(self, ready: list[Session]) -> None:
        nodes = [session.likely_nodes for session in ready]
        sizes = pending_rows([session.pending for session in ready], nodes, self._chunk(ready))
        taking = [(session.pending, size) for session, size in zip(ready, sizes, strict=True)]
        depth = sum(size * session.cached for session, size in zip(ready, sizes, strict=True)) / sum(sizes)
        drafts = self._weighing.may_pay(taking, [session.node_limit for session in ready], depth)
        if drafts:
            self._prepare(ready, sizes)
        drafts &= self._running.fit(ready, sizes)
        step_ms = self._pace.expected_ms(sum(sizes) + sum(nodes), len(ready), depth)
        # Whoever may wait for drafts tells sources first. Else it is told as the forward begins: what the
        # event loop then does overlaps with the forward and not with this thread's own bookkeeping.
        waits = len(ready) == 1 and bool(ready[0].paces) and self._limits.wait_ms_most > 0
        if waits:
            self._tell(stepping=True, step_ms=step_ms)
            with self._running.guarded(ready[0]):
                self._await_drafts(ready[0], sizes[0])
        parts = self._begin(ready, sizes, depth, drafts)
        if not waits:
            self._tell(stepping=bool(parts), step_ms=step_ms)
        logits = self._forward(parts) if parts else None
        if logits is not None:
            self._absorb_all(parts, logits)

    def _prepare(self, ready: list[Session], sizes: list[int]) -> None:
        with self._clock.taking_in():
            for session, size in zip(ready, sizes, strict=True):
                with self._running.guarded(session):
                    self._running.prepare(session, size)

    def _chunk(self, ready: list[Session]) -> int:
        """Rows that prompts may share with decoding in this step."""
        reading = next((session.cached for session in ready if session.pending > 1), 0)
        decoding = sum(session.pending == 1 for session in ready)

        def expected_ms(rows: int) -> float:
            return self._pace.expected_ms(rows, decoding + 1, reading + rows / 2)

        return chunk_rows(self._limits.prefill_chunk, decoding, expected_ms, self._limits.stall_ms)

    def _begin(self, ready: list[Session], sizes: list[int], depth: float, drafts: bool) -> list[Part]:
        """Every session's rows in this step: its pending ids, and the drafted nodes that are admitted."""
        taking = [(s, size) for s, size in zip(ready, sizes, strict=True) if size and s in self._running.kv]
        rankings = [session.ranking(size).survivals if drafts else [] for session, size in taking]
        pending = [(session.pending, size) for session, size in taking]
        admitted = self._weighing.admit(rankings, pending, depth)
        parts: list[Part] = []
        for (session, size), nodes in zip(taking, admitted, strict=True):
            with self._running.guarded(session):
                parts.append((session, session.begin(size, nodes)))
        return parts

    def _absorb_all(self, parts: list[Part], logits: NDArray[np.float32]) -> None:
        # All tokens first: choosing them goes through much memory, and what comes after stays in the caches.
        with self._clock.sampling():
            matched = self._match_all(parts, logits)
        for session, portion, match in matched:
            with self._running.guarded(session):
                if match is None:
                    self._running.skip(session, portion)
                else:
                    step = self._running.step
                    done = session.commit(portion, match, step.sessions, step.number)
                    self._running.commit(session, portion, done)

    def _match_all(
        self, parts: list[Part], logits: NDArray[np.float32]
    ) -> list[tuple[Session, Portion, Match | None]]:
        """What each session's target follows of its drafts; None where the step did not come to its end."""
        matched: list[tuple[Session, Portion, Match | None]] = []
        low = 0
        for session, portion in parts:
            high = low + portion.wanted
            with self._running.guarded(session):
                match = session.match(portion, logits[low:high]) if portion.final else None
                matched.append((session, portion, match))
            low = high
        return matched

    def _forward(self, parts: list[Part]) -> NDArray[np.float32] | None:
        """Logits of all wanted rows; None where the pass failed, which ends its sessions."""
        shares = [self._running.share(session, portion) for session, portion in parts]
        self._clock.begin(len(parts))
        try:
            with self._intake.computing():
                logits = self._target.forward(shares).numpy()
        except RankLost:
            raise
        except Exception as error:
            self._forward_failed(parts, error)
            return None
        self._failures = 0
        rows = sum(len(share.tokens) for share in shares)
        depth = sum(len(share.tokens) * share.table.length for share in shares) / rows
        ended = self._clock.end(rows, len(parts), depth)
        self.totals.steps += 1
        self.totals.rows += rows
        clock = self._clock
        self._running.step = Step(self.totals.steps, clock.began, ended, len(parts), rows, clock.waited)
        return logits

    def _forward_failed(self, parts: list[Part], error: Exception) -> None:
        self._clock.pause()
        self._failures += 1
        log.error("the target's forward failed (%d in a row)", self._failures)
        for session, _ in parts:
            self._running.broken(session, error, "the target's forward failed: ")
        if self._failures >= _MOST_FAILURES:
            self._tell(stepping=False, step_ms=0.0)
            raise RuntimeError(f"the target's forward failed {self._failures} times in a row") from error

    def _await_drafts(self, session: Session, rows: int) -> None:
        """Lets drafts of the only ready session come in while they are worth more than the time."""
        began = time.perf_counter()
        waited_for: set[int] = set()
        came: set[int] = set()
        while len(self._running) == 1 and session in self._running and not self._stopping:
            now = time.perf_counter()
            left_ms = self._limits.wait_ms_most - (now - began) * 1000
            (nodes,) = self._weighing.admit(
                [session.ranking(rows).survivals], [(session.pending, rows)], session.cached
            )
            step_ms = self._pace.expected_ms(rows + nodes, depth=session.cached)
            patience = session.patience_ms(now * 1000, step_ms, left_ms, nodes)
            if not patience:
                break
            waited_for |= patience.keys()
            command = self._intake.get(min(patience.values()) / 1000)
            if isinstance(command, Offers):
                came |= {fragment.source for _, fragment in command.drafts}
            if command is not None:
                self._handle(command)
        if not waited_for:
            return
        self.totals.waits += 1
        self._clock.waited_for_drafts(time.perf_counter() - began)
        for credit in waited_for & session.paces.keys():
            session.paces[credit].waited(fruitful=credit in came)
