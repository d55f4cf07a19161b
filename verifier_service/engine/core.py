"""The engine as a plain object: a step is `begin`, a forward that the caller computes, and `finish`.

`begin` schedules and returns the rows of one pass; `finish` chooses tokens, commits them and returns updates.
Commands may be applied at any time, between the two as well, so that drafts are merged while the target
computes. Knows no thread, queue or clock: time is an argument, in seconds. `thread.py` drives it with a real
target, the simulator with a toy target on a virtual clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from outrider.lm.plan import SequenceRows
from speculative.observed import Observed
from speculative.stop import FinishReason
from verifier_service.engine.draft_budget import DraftBudget
from verifier_service.engine.kv_cache import KVCache
from verifier_service.engine.messages import (
    Cancel,
    Command,
    Observe,
    Offers,
    Open,
    Park,
    Sources,
    StepReport,
    SwapProposer,
    Update,
    WaitFor,
    load_of,
)
from verifier_service.engine.prompt_scorer import rows_with_scores
from verifier_service.engine.scheduler import Scheduler
from verifier_service.engine.session import Session
from verifier_service.engine.session_pool import Matched, Part, SessionPool
from verifier_service.engine.stats import CountsByName, EngineTotals, PassTimes, StepMeter, Unmeasured
from verifier_service.engine.step import (
    DraftWait,
    EngineLimits,
    PassOutcome,
    StepPlan,
    chunk_size,
    schedule_rows,
)
from verifier_service.engine.step_cost import StepCostModel
from verifier_service.observe.round_log import Step
from verifier_service.proposers.batched import BatchedProposer, SeenRound
from verifier_service.proposers.host import ProposerHost
from verifier_service.remote_sources.source_presence import PresenceTrials


@dataclass(frozen=True, slots=True, eq=False)
class TargetPass:
    """A forward to be computed; its outcome goes to `EngineCore.finish`."""

    parts: Sequence[Part]
    sequences: Sequence[SequenceRows]
    """The rows of each part, as the target takes them."""
    rows: int
    """Number of input tokens of all parts."""
    nodes: int
    """Number of drafted nodes and scouts among the rows."""
    depth: float
    """Number of cached positions that a row attends over, on average."""
    report: StepReport | None
    """To be published as the forward begins; None where it was published before a wait for drafts."""


@dataclass(frozen=True, slots=True)
class AwaitDrafts:
    """The step may wait: call `begin` again at `until_s`, or after a command that comes sooner."""

    until_s: float
    report: StepReport | None = None
    """To be published first: sources draft from its updates."""


@dataclass(frozen=True, slots=True)
class Idle:
    """There is nothing to compute until a command comes; the next beat is due at `until_s`."""

    until_s: float
    report: StepReport


class EngineCore:
    """Decodes sessions, one pass at a time.

    Args:
        kv: keys and values in the target's pool.
        limits: bounds of a step.
        costs: what steps of this target take, as far as that is known.
        meter: measures the time spent in here; None: nothing is measured.
        proposers: batched proposers, by source name.
    """

    def __init__(
        self,
        kv: KVCache,
        limits: EngineLimits,
        costs: StepCostModel | None = None,
        meter: StepMeter | None = None,
        proposers: Mapping[str, BatchedProposer] = MappingProxyType({}),
    ) -> None:
        self.totals = EngineTotals()
        self.counts = CountsByName()
        self.kv = kv
        self.sessions = SessionPool(
            kv, Scheduler(min(limits.most_running, kv.pool.most_tables)), self.totals, self.counts
        )
        self._limits = limits
        self._costs = costs or StepCostModel()
        self._meter = meter or Unmeasured()
        self._budget = DraftBudget(self._costs, limits.adaptive, limits.most_rows)
        self.proposers = ProposerHost(proposers, self.sessions, self.counts, self._meter.awake_s)
        self.presences = PresenceTrials()
        """What remote sources cost the target, measured."""
        self._began_s: float | None = None
        """When the step began, by the meter's clock; None: it reads prompts, too, or the budget is fixed."""
        self._wait: DraftWait | None = None
        self._computing: TargetPass | None = None
        self._postponed: list[Command] = []

    def apply(self, command: Command, now_s: float) -> None:
        """Carries out a command; `Stop` is for the caller.

        While a pass is computed, sessions are opened and drafts merged at once. Commands that could end one
        of its sessions wait for `finish`, as the target is using its blocks.
        """
        if self._computing is not None and not isinstance(command, Open):
            later = self._merged(command) if isinstance(command, Offers) else command
            if later is not None:
                self._postponed.append(later)
            return
        if self._wait is not None and isinstance(command, SwapProposer):
            self._postponed.append(command)  # the step's proposers have been told of its sessions
            return
        if self._wait is not None and isinstance(command, Offers):
            self._wait.came |= {fragment.source for _, fragment in command.drafts}
        self._carry_out(command, now_s)

    def begin(self, now_s: float) -> TargetPass | AwaitDrafts | Idle:
        """Begins a step, or resumes the step that waits for drafts."""
        assert self._computing is None, "one pass is computed at a time"
        if self._wait is not None:
            return self._go_on_waiting(self._wait, now_s)
        self._carry_out_postponed()  # of a wait that ended without a pass
        self.sessions.expire(now_s)
        self.sessions.at(now_s)
        ready = self.sessions.ready()
        self.proposers.attend(ready)
        if not ready:
            return self._idle(now_s)
        plan = self._schedule(ready)
        # A step that may wait for drafts has its report published first. Any other step has it published as
        # the forward begins, so that the event loop's work overlaps with that and not with this thread's.
        if len(ready) == 1 and ready[0].sources.may_be_awaited and self._limits.wait_ms_most > 0:
            self._wait = DraftWait(plan)
            return AwaitDrafts(now_s, self._report(stepping=True, step_ms=plan.step_ms))
        parts = self._parts(plan)
        report = self._report(stepping=bool(parts), step_ms=plan.step_ms)
        return self._pass_or_idle(parts, report, now_s)

    def published(self, report: StepReport, now_s: float) -> None:
        """Notes that the report was sent: from now on the time until each source's next draft counts."""
        for update in report.updates:
            if (session := self.sessions.get(update.handle)) is not None:
                session.published(now_s * 1000)

    def finish(self, computed: TargetPass, outcome: PassOutcome, times: PassTimes) -> tuple[Update, ...]:
        """Chooses tokens and commits them; returns the update of each session that committed some.

        These updates go out with the report of the next `begin`.
        """
        assert computed is self._computing, "another pass is being computed, or none"
        self._computing = None
        self.totals.steps += 1
        self.totals.rows += computed.rows
        number, sessions, rows = self.totals.steps, len(computed.parts), computed.rows
        self.sessions.step = Step(number, times.began_s, times.ended_s, sessions, rows, times.waited_s)
        self._measure_presence(computed)
        before, committed = len(self.sessions.updates), self.totals.committed
        self._commit_all(computed.parts, outcome)
        took_s = 0.0 if self._began_s is None else self._meter.now_s() - self._began_s - times.waited_s
        self.proposers.stepped(self.totals.committed - committed, 1000 * took_s)
        done = tuple(self.sessions.updates[before:])
        self._carry_out_postponed()
        return done

    def abandon(self, computed: TargetPass, error: Exception) -> None:
        """Ends all sessions of a pass whose forward failed."""
        assert computed is self._computing, "another pass is being computed, or none"
        self._computing = None
        self.presences.idle()
        for session, _ in computed.parts:
            self.sessions.broken(session, error, "the target's forward failed: ")
        self._carry_out_postponed()

    def collect(self) -> StepReport:
        """A report of what has happened since the last one, where no step follows."""
        return self._report(stepping=False, step_ms=0.0)

    def _report(self, stepping: bool, step_ms: float) -> StepReport:
        updates, strikes = self.sessions.take_events()
        step, expected_us = self.totals.steps + stepping, int(step_ms * 1000)
        return StepReport(step, expected_us, updates, strikes, self._budget.least_survival)

    def _measure_presence(self, computed: TargetPass) -> None:
        """Compares the pass that was just computed with others, where sources outside draft and where not."""
        sessions, work = len(computed.parts), 0.0
        if self._began_s is not None:
            work = self._costs.work(computed.rows, sessions, computed.depth, computed.nodes)
        uses = [use for session, _ in computed.parts for use in session.sources.uses]
        self.presences.stepped(self._meter.now_s(), sessions, uses, work)

    def _idle(self, now_s: float) -> Idle:
        self.presences.idle()
        return Idle(self.sessions.ready_s(now_s + self._limits.beat_s), self.collect())

    def _carry_out(self, command: Command, now_s: float) -> None:
        sessions = self.sessions
        match command:
            case Offers():
                sessions.take_offers(command)
            case Open(session):
                session.sources.may_rest = self._limits.adaptive
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
            case Observe() | WaitFor():
                sessions.take_wish(command)
            case SwapProposer():
                self.proposers.swap(command)

    def _carry_out_postponed(self) -> None:
        postponed, self._postponed = self._postponed, []
        for command in postponed:
            self._carry_out(command, 0.0)  # none of them is an Open, which alone needs the time

    def _merged(self, offers: Offers) -> Offers | None:
        """Merges what can be merged while a pass is computed; returns the rest, if there is any."""
        merge = self.sessions.merge
        left = tuple([draft for draft in offers.drafts if not merge(*draft, offers.arrived_s)])
        offers.in_flight.taken += load_of(offers.drafts) - load_of(left)
        return Offers(left, offers.arrived_s, offers.in_flight) if left else None

    def _schedule(self, ready: list[Session]) -> StepPlan:
        """Uncomputed ids that the step computes of each session, and whether it may admit drafts."""
        nodes = [session.likely_nodes for session in ready]
        sizes = uncomputed = [session.uncomputed for session in ready]
        compared = self._limits.adaptive and max(uncomputed) == 1
        self._began_s = self._meter.now_s() if compared else None
        if max(uncomputed) > 1:
            tenants = [session.key.tenant for session in ready]
            rows = schedule_rows(uncomputed, nodes, self._chunk(ready), tenants)
            sizes = rows_with_scores([session.scorer for session in ready], rows)
        taking = list(zip(uncomputed, sizes, strict=True))
        depth = sum(size * session.cached for session, size in zip(ready, sizes, strict=True)) / sum(sizes)
        drafts = self._budget.asks_for_drafts(taking, [session.node_limit for session in ready], depth)
        held_back = 0
        if drafts:
            held_back = self._prepare(ready, sizes)
            self._propose(ready, sizes, depth)
        drafts &= self.sessions.fit(ready, sizes)
        step_ms = self._costs.expected_ms(sum(sizes) + sum(nodes), len(ready), depth)
        return StepPlan(ready, sizes, depth, drafts, held_back if drafts else 0, step_ms)

    def _chunk(self, ready: list[Session]) -> int:
        """Number of rows that prompts may share with decoding in this step."""
        reading = next((session.cached for session in ready if session.uncomputed > 1), 0)
        decoding = sum(session.uncomputed == 1 for session in ready)

        def expected_ms(rows: int) -> float:
            return self._costs.expected_ms(rows, decoding + 1, reading + rows / 2)

        return chunk_size(self._limits.prefill_chunk, decoding, expected_ms, self._limits.stall_ms)

    def _prepare(self, ready: list[Session], sizes: list[int]) -> int:
        """Lets the sessions' own proposers draft; returns how many drafts they held back."""
        drafting = [each for each in zip(ready, sizes, strict=True) if each[0].sources.may_propose]
        if not drafting:
            return 0
        held_back, least = 0, self._budget.first_needs
        with self._meter.taking_in():
            for session, size in drafting:
                with self.sessions.guarded(session):
                    held_back += self.sessions.prepare(session, size, least)
        return held_back

    def _propose(self, ready: list[Session], sizes: list[int], depth: float) -> None:
        """Lets batched proposers draft, as far as that pays beside the drafts that there are already."""
        drafting = [
            session
            for session, size in zip(ready, sizes, strict=True)
            if session.sources.batched and session.uncomputed == size and session in self.sessions
        ]
        if not drafting or self.proposers.rest_on(len(drafting)):
            return
        survivals: list[float] = []
        for session, size in zip(ready, sizes, strict=True):
            with self.sessions.guarded(session):
                survivals += session.ranking(size).survivals[: session.likely_nodes]
        drafting = [session for session in drafting if session in self.sessions]
        taking = [(session.uncomputed, size) for session, size in zip(ready, sizes, strict=True)]
        expected = self._budget.yield_of(taking, survivals, depth)
        with self._meter.proposing():
            self.proposers.draft(drafting, expected)

    def _parts(self, plan: StepPlan) -> list[Part]:
        """Every session's rows in this step: its uncomputed ids, and the drafted nodes that are admitted."""
        taking: list[tuple[Session, int]] = []
        rankings: list[Sequence[float]] = []
        # Scouts are weighed like nodes, by what they are worth to their proposer.
        scouts: list[Sequence[float]] = []
        for session, size in zip(plan.ready, plan.sizes, strict=True):
            if not size or session not in self.kv:
                continue
            with self.sessions.guarded(session):
                if plan.drafts:
                    self.sessions.prepare_below(session, size)
                nodes = session.ranking(size).survivals if plan.drafts else []
                scouts.append(session.scout_worths(size) if plan.drafts else [])
                rankings.append(nodes)
                taking.append((session, size))
        uncomputed = [(session.uncomputed, size) for session, size in taking]
        admitted = self._budget.admit(rankings + scouts, uncomputed, plan.depth, held_back=plan.held_back)
        parts: list[Part] = []
        for (session, size), count, behind in zip(
            taking, admitted[: len(taking)], admitted[len(taking) :], strict=True
        ):
            with self.sessions.guarded(session):
                parts.append((session, session.step_rows(size, count, behind)))
        return parts

    def _pass_or_idle(self, parts: list[Part], report: StepReport | None, now_s: float) -> TargetPass | Idle:
        if parts:
            return self._pass(parts, report)
        self.presences.idle()
        return Idle(now_s, report or self.collect())

    def _pass(self, parts: list[Part], report: StepReport | None) -> TargetPass:
        sequences = [self.kv.sequence_rows(session, step_rows) for session, step_rows in parts]
        counts = [len(sequence.tokens) for sequence in sequences]
        rows = sum(counts)
        nodes = rows - sum([len(step_rows.chain) for _, step_rows in parts])
        depth = sum([count * each.table.length for count, each in zip(counts, sequences, strict=True)]) / rows
        self._computing = TargetPass(parts, sequences, rows, nodes, depth, report)
        return self._computing

    def _go_on_waiting(self, wait: DraftWait, now_s: float) -> TargetPass | AwaitDrafts | Idle:
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
            for source_index in wait.waited_for & session.sources.latencies.keys():
                session.sources.latencies[source_index].waited(fruitful=source_index in wait.came)
        parts = self._parts(wait.plan)
        return self._pass_or_idle(parts, None, now_s)

    def _patience_ms(self, session: Session, wait: DraftWait, now_s: float) -> dict[int, float]:
        """Milliseconds that each source's next draft is worth waiting for; others are left out."""
        assert wait.began_s is not None
        (rows,) = wait.plan.sizes
        left_ms = self._limits.wait_ms_most - (now_s - wait.began_s) * 1000
        ranking, taking = session.ranking(rows).survivals, [(session.uncomputed, rows)]
        (nodes,) = self._budget.admit([ranking], taking, session.cached)
        step_ms = self._costs.expected_ms(rows + nodes, depth=session.cached)
        return session.patience_ms(now_s * 1000, step_ms, left_ms, nodes)

    def _commit_all(self, parts: Sequence[Part], outcome: PassOutcome) -> None:
        # All tokens first: choosing them reads much memory. What follows stays in the processor's caches.
        with self._meter.sampling():
            matched = self.sessions.match_all(parts, outcome)
        seen = []
        for entry in matched:
            with self.sessions.guarded(entry.session):
                shown = self._commit(entry)
                if shown is not None:
                    seen.append((entry.session, shown))
        if seen:
            with self._meter.proposing():
                self.proposers.saw(seen, outcome.features)

    def _commit(self, entry: Matched) -> SeenRound | None:
        """Commits what one session's rows brought; returns what batched proposers are shown of it, if any."""
        session, step_rows, match, observed, _, scores = entry
        first, watched = session.cached, bool(self.proposers.names)
        if scores is not None:
            self.sessions.scored(session, scores)
        if match is None and step_rows.final:  # once more, without drafts
            self.kv.keep_rows(session, ())
            session.go_alone()
            return None
        if match is None:
            kept = session.skip(step_rows)
            shown = self._shown(entry, first, kept, len(session.ids), ()) if watched else None
            self.sessions.skip(session, kept)
        else:
            done = session.commit(step_rows, match, self.sessions.step, self._budget.node_cost)
            observed = None if observed is None else observed.first(len(done.tokens))
            self.totals.scouts += len(step_rows.scouts.tokens)
            shown = None
            if watched:
                # Before the commit: that may end the session, which gives its slots back.
                shown = self._shown(entry, first, done.path, done.position, done.tokens, observed)
            self.sessions.commit(session, step_rows, done, observed)
        return shown

    def _shown(
        self,
        entry: Matched,
        first: int,
        kept: Sequence[int],
        position: int,
        tokens: tuple[int, ...],
        observed: Observed | None = None,
    ) -> SeenRound | None:
        """What batched proposers are shown of one session's rows; None where none of them looks.

        Notes the positions that proposers with planes are not shown.
        """
        session, planes = entry.session, self.proposers.has_planes
        if self.proposers.shows_nothing:
            self.proposers.missed(session, first, first + len(kept))
            return None
        if not session.sources.batched and not planes:
            return None
        rows = tuple([entry.first_row + row for row in kept])
        runs = self.kv.runs(session, first, first + len(rows)) if planes else ()
        return SeenRound(session.handle, position, tokens, observed, first, rows, runs)
