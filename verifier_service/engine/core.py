"""The engine as a plain object: a step is `begin`, a forward that the caller computes, and `finish`.

`begin` schedules and gives the rows of one pass; `finish` chooses tokens, commits them and says what came of
it. Commands may be applied at any time, between the two as well: drafts are merged while the target computes.
Knows no thread, queue or clock: time is an argument, in seconds. `thread.py` drives it with a real target,
the simulator on a virtual clock.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.lm.plan import Share
from speculative.acceptance.path_match import Match
from speculative.commit import FinishReason
from verifier_service.commands import Batch, Cancel, Command, Offers, Open, Park, Sources, Update
from verifier_service.counts import CountsByName, EngineTotals
from verifier_service.journal import Step
from verifier_service.kv_cache import KVCache
from verifier_service.limits import EngineLimits
from verifier_service.pace import StepPace
from verifier_service.planner import chunk_rows, pending_rows
from verifier_service.portion import Portion
from verifier_service.running import RunningSessions
from verifier_service.scheduler import Scheduler
from verifier_service.sessions import Session
from verifier_service.step_clock import PassTimes
from verifier_service.weighing import Weighing

Outcome = NDArray[np.float32]
"""What a pass returns: the logits of its wanted rows, float32[rows wanted, vocabulary]."""

Part = tuple[Session, Portion]
"""A session of a step, and its rows."""


class StepMeter(Protocol):
    """Measures what a step spends inside the core."""

    def sampling(self) -> AbstractContextManager[None]:
        """Entered while tokens are chosen."""

    def taking_in(self) -> AbstractContextManager[None]:
        """Entered while sources inside the verifier draft."""

    def waited_for_drafts(self, seconds: float) -> None:
        """A step was held back this long for drafts."""


class Unmeasured:
    """The StepMeter of a caller that measures nothing."""

    def sampling(self) -> AbstractContextManager[None]:
        """See StepMeter."""
        return nullcontext()

    def taking_in(self) -> AbstractContextManager[None]:
        """See StepMeter."""
        return nullcontext()

    def waited_for_drafts(self, seconds: float) -> None:
        """See StepMeter."""


@dataclass(frozen=True, slots=True, eq=False)
class TargetPass:
    """One forward to be computed; its outcome goes to `EngineCore.finish`."""

    parts: Sequence[Part]
    shares: Sequence[Share]
    """The rows of each part, as the target takes them."""
    rows: int
    """Input tokens of all parts."""
    depth: float
    """Cached positions that a row attends over, on average."""
    batch: Batch | None
    """To be published as the forward begins; None where that was done before a wait for drafts."""


@dataclass(frozen=True, slots=True)
class AwaitDrafts:
    """The step may wait: call `begin` again at `until_s`, or after a command that comes sooner."""

    until_s: float
    batch: Batch | None = None
    """To be published first: sources draft from what it says."""


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing is to be computed before a command comes; the next beat is due at `until_s`."""

    until_s: float
    batch: Batch


@dataclass(slots=True)
class _Plan:
    """What a step computes of each session, apart from drafted nodes."""

    ready: list[Session]
    sizes: list[int]
    depth: float
    drafts: bool
    """Whether drafted nodes may come on top."""
    step_ms: float
    """How long the step should take."""


@dataclass(slots=True)
class _Wait:
    """A step of one session that is held back for drafts."""

    plan: _Plan
    began_s: float | None = None
    """None until its batch is out."""
    waited_for: set[int] = field(default_factory=set)
    """Sources, by credit index."""
    came: set[int] = field(default_factory=set)
    """Sources that sent a draft meanwhile."""


class EngineCore:
    """Decodes sessions, one pass at a time.

    Args:
        kv: over the target's pool.
        limits: bounds of a step.
        pace: what steps of this target take, as far as that is known.
        meter: measures what is spent in here.
    """

    def __init__(
        self,
        kv: KVCache,
        limits: EngineLimits,
        pace: StepPace | None = None,
        meter: StepMeter | None = None,
    ) -> None:
        self.totals = EngineTotals()
        self.counts = CountsByName()
        self.kv = kv
        self.sessions = RunningSessions(kv, Scheduler(limits.most_running), self.totals, self.counts)
        self._limits = limits
        self._pace = pace or StepPace()
        self._meter = meter or Unmeasured()
        self._weighing = Weighing(self._pace, limits.adaptive)
        self._wait: _Wait | None = None
        self._computing: TargetPass | None = None
        self._postponed: list[Command] = []

    def apply(self, command: Command, now_s: float) -> None:
        """Carries out a command; `Stop` is the caller's.

        While a pass is computed, sessions are opened and drafts merged at once. What could end one of its
        sessions waits for `finish`, as the target uses their blocks.
        """
        if self._computing is not None and not isinstance(command, Open):
            later = self._merged(command) if isinstance(command, Offers) else command
            if later is not None:
                self._postponed.append(later)
            return
        if self._wait is not None and isinstance(command, Offers):
            self._wait.came |= {fragment.source for _, fragment in command.drafts}
        self._carry_out(command, now_s)

    def begin(self, now_s: float) -> TargetPass | AwaitDrafts | Idle:
        """Begins a step, or goes on with one that waits for drafts."""
        assert self._computing is None, "one pass is computed at a time"
        if self._wait is not None:
            return self._go_on_waiting(self._wait, now_s)
        self.sessions.expire(now_s)
        self.sessions.at(now_s)
        ready = self.sessions.ready()
        if not ready:
            return self._idle(now_s)
        plan = self._schedule(ready)
        # A step that may wait for drafts has its batch published first. Else that is done as the forward
        # begins: what the event loop then does overlaps with the forward, not with what is done in here.
        if len(ready) == 1 and ready[0].paces and self._limits.wait_ms_most > 0:
            self._wait = _Wait(plan)
            return AwaitDrafts(now_s, self._batch(stepping=True, step_ms=plan.step_ms))
        parts = self._parts(plan)
        batch = self._batch(stepping=bool(parts), step_ms=plan.step_ms)
        return self._pass(parts, batch) if parts else Idle(now_s, batch)

    def published(self, batch: Batch, now_s: float) -> None:
        """A batch is out: the clocks of its sessions' sources start."""
        for update in batch.updates:
            if (session := self.sessions.get(update.handle)) is not None:
                session.committed(now_s * 1000)

    def finish(self, computed: TargetPass, outcome: Outcome, times: PassTimes) -> tuple[Update, ...]:
        """Chooses tokens and commits them; returns what that did to each session.

        The updates go out with the batch of the next `begin`.
        """
        assert computed is self._computing, "this pass is not the one that is computed"
        self._computing = None
        self.totals.steps += 1
        self.totals.rows += computed.rows
        self.sessions.step = Step(
            self.totals.steps,
            times.began_s,
            times.ended_s,
            len(computed.parts),
            computed.rows,
            times.waited_s,
        )
        before = len(self.sessions.updates)
        self._commit_all(computed.parts, outcome)
        done = tuple(self.sessions.updates[before:])
        self._carry_out_postponed()
        return done

    def abandon(self, computed: TargetPass, error: Exception) -> None:
        """The forward failed: all sessions of the pass end."""
        assert computed is self._computing, "this pass is not the one that is computed"
        self._computing = None
        for session, _ in computed.parts:
            self.sessions.broken(session, error, "the target's forward failed: ")
        self._carry_out_postponed()

    def collect(self) -> Batch:
        """What has happened since the last batch, where no step follows."""
        return self._batch(stepping=False, step_ms=0.0)

    def _batch(self, stepping: bool, step_ms: float) -> Batch:
        updates, strikes = self.sessions.tell()
        step, expected_us = self.totals.steps + stepping, int(step_ms * 1000)
        return Batch(step, expected_us, updates, strikes, self._weighing.least_survival)

    def _idle(self, now_s: float) -> Idle:
        return Idle(now_s if self.sessions else now_s + self._limits.beat_s, self.collect())

    def _carry_out(self, command: Command, now_s: float) -> None:
        sessions = self.sessions
        match command:
            case Offers():
                sessions.take_offers(command)
            case Open(session):
                sessions.open(session, now_s)
            case Cancel(handle, message):
                if (cancelled := sessions.get(handle)) is not None:
                    sessions.end(cancelled, FinishReason.CANCELLED, message)
            case Park(handle):
                if (parked := sessions.get(handle)) is not None:
                    sessions.park(parked)
            case Sources(handle, sources):
                if (changed := sessions.get(handle)) is not None:
                    with sessions.guarded(changed):
                        changed.use_sources(sources)

    def _carry_out_postponed(self) -> None:
        postponed, self._postponed = self._postponed, []
        for command in postponed:
            self._carry_out(command, 0.0)  # none of them is an Open, which alone needs the time

    def _merged(self, offers: Offers) -> Offers | None:
        """Merges what can be merged while a pass is computed; returns the rest, if there is any."""
        merge = self.sessions.merge
        left = tuple([draft for draft in offers.drafts if not merge(*draft, offers.arrived_s)])
        offers.in_flight.taken += len(offers.drafts) - len(left)
        return Offers(left, offers.arrived_s, offers.in_flight) if left else None

    def _schedule(self, ready: list[Session]) -> _Plan:
        """How many uncomputed ids of each session the step computes, and whether drafts may come on top."""
        nodes = [session.likely_nodes for session in ready]
        sizes = pending_rows([session.pending for session in ready], nodes, self._chunk(ready))
        taking = [(session.pending, size) for session, size in zip(ready, sizes, strict=True)]
        depth = sum(size * session.cached for session, size in zip(ready, sizes, strict=True)) / sum(sizes)
        drafts = self._weighing.may_pay(taking, [session.node_limit for session in ready], depth)
        if drafts:
            self._prepare(ready, sizes)
        drafts &= self.sessions.fit(ready, sizes)
        step_ms = self._pace.expected_ms(sum(sizes) + sum(nodes), len(ready), depth)
        return _Plan(ready, sizes, depth, drafts, step_ms)

    def _chunk(self, ready: list[Session]) -> int:
        """Rows that prompts may share with decoding in this step."""
        reading = next((session.cached for session in ready if session.pending > 1), 0)
        decoding = sum(session.pending == 1 for session in ready)

        def expected_ms(rows: int) -> float:
            return self._pace.expected_ms(rows, decoding + 1, reading + rows / 2)

        return chunk_rows(self._limits.prefill_chunk, decoding, expected_ms, self._limits.stall_ms)

    def _prepare(self, ready: list[Session], sizes: list[int]) -> None:
        with self._meter.taking_in():
            for session, size in zip(ready, sizes, strict=True):
                with self.sessions.guarded(session):
                    self.sessions.prepare(session, size)

    def _parts(self, plan: _Plan) -> list[Part]:
        """Every session's rows in this step: its uncomputed ids, and the drafted nodes that are admitted."""
        sizes = zip(plan.ready, plan.sizes, strict=True)
        taking = [(session, size) for session, size in sizes if size and session in self.kv]
        rankings = [session.ranking(size).survivals if plan.drafts else [] for session, size in taking]
        uncomputed = [(session.pending, size) for session, size in taking]
        admitted = self._weighing.admit(rankings, uncomputed, plan.depth)
        parts: list[Part] = []
        for (session, size), nodes in zip(taking, admitted, strict=True):
            with self.sessions.guarded(session):
                parts.append((session, session.begin(size, nodes)))
        return parts

    def _pass(self, parts: list[Part], batch: Batch | None) -> TargetPass:
        shares = [self.kv.share(session, portion) for session, portion in parts]
        rows = sum(len(share.tokens) for share in shares)
        depth = sum(len(share.tokens) * share.table.length for share in shares) / rows
        self._computing = TargetPass(parts, shares, rows, depth, batch)
        return self._computing

    def _go_on_waiting(self, wait: _Wait, now_s: float) -> TargetPass | AwaitDrafts | Idle:
        """Waits on while drafts of the only ready session are worth more than the time."""
        if wait.began_s is None:
            wait.began_s = now_s
        (session,), patience = wait.plan.ready, {}
        if len(self.sessions) == 1 and session in self.sessions:
            with self.sessions.guarded(session):
                patience = self._patience_ms(session, wait, now_s)
        if patience:
            wait.waited_for |= patience.keys()
            return AwaitDrafts(now_s + min(patience.values()) / 1000)
        self._wait = None
        if wait.waited_for:
            self.totals.waits += 1
            self._meter.waited_for_drafts(now_s - wait.began_s)
            for credit in wait.waited_for & session.paces.keys():
                session.paces[credit].waited(fruitful=credit in wait.came)
        parts = self._parts(wait.plan)
        return self._pass(parts, None) if parts else Idle(now_s, self.collect())

    def _patience_ms(self, session: Session, wait: _Wait, now_s: float) -> dict[int, float]:
        """Sources whose next draft is worth waiting for, and how long."""
        assert wait.began_s is not None
        (rows,) = wait.plan.sizes
        left_ms = self._limits.wait_ms_most - (now_s - wait.began_s) * 1000
        ranking, taking = session.ranking(rows).survivals, [(session.pending, rows)]
        (nodes,) = self._weighing.admit([ranking], taking, session.cached)
        step_ms = self._pace.expected_ms(rows + nodes, depth=session.cached)
        return session.patience_ms(now_s * 1000, step_ms, left_ms, nodes)

    def _commit_all(self, parts: Sequence[Part], outcome: Outcome) -> None:
        # All tokens first: choosing them goes through much memory, and what comes after stays in the caches.
        with self._meter.sampling():
            matched = self._match_all(parts, outcome)
        for session, portion, match in matched:
            with self.sessions.guarded(session):
                if match is None:
                    self.sessions.skip(session, portion)
                else:
                    step = self.sessions.step
                    done = session.commit(portion, match, step.sessions, step.number)
                    self.sessions.commit(session, portion, done)

    def _match_all(
        self, parts: Sequence[Part], outcome: Outcome
    ) -> list[tuple[Session, Portion, Match | None]]:
        """What each session's target follows of its drafts; None where only a part of its prompt was read."""
        matched: list[tuple[Session, Portion, Match | None]] = []
        low = 0
        for session, portion in parts:
            high = low + portion.wanted
            with self.sessions.guarded(session):
                match = session.match(portion, outcome[low:high]) if portion.final else None
                matched.append((session, portion, match))
            low = high
        return matched
