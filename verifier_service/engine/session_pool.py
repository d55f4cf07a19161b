"""The sessions of this worker, running and waiting, and their updates for the next report.

Belongs to the engine's core. One session's failure ends that session and no other.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from outrider.lm.kv.blocks import BLOCK
from outrider.wire.codec import CommittedCode
from speculative.acceptance.path_match import Match
from speculative.digest import RowDigest
from speculative.errors import DeadEnd, MalformedDraft
from speculative.fragment import Fragment, Offer
from speculative.observed import Observed
from speculative.reading_order import reading_order
from speculative.stop import FinishReason
from speculative.target_sampler import TargetSampler, sample_together
from verifier_service.engine.kv_cache import KVCache
from verifier_service.engine.messages import Finish, Observe, Offers, Strike, Update, WaitFor, load_of
from verifier_service.engine.prompt_scorer import PromptScores
from verifier_service.engine.scheduler import Need, Scheduler, fit, may_start
from verifier_service.engine.session import Session
from verifier_service.engine.stats import CountsByName, EngineTotals, Phases
from verifier_service.engine.step import PassOutcome, Round, StepRows
from verifier_service.observe.round_log import UNTIMED_STEP, RoundRecord, RoundTree, SourceState

log = logging.getLogger(__name__)

Part = tuple[Session, StepRows]
"""A session of a step, and its rows in it."""


class Matched(NamedTuple):
    """The target's choices at one session's rows of a pass, before they are committed."""

    session: Session
    step_rows: StepRows
    match: Match | None
    """The tokens to commit; None where the pass only read a part of the prompt, or tells nothing."""
    observed: Observed | None
    first_row: int
    """The session's first row in the pass."""
    scores: PromptScores | None = None
    """Scores of the prompt's tokens, if the request asks for scores."""


class SessionPool:
    """All sessions by handle; the scheduler says which of them have keys and values."""

    def __init__(self, kv: KVCache, scheduler: Scheduler, totals: EngineTotals, counts: CountsByName) -> None:
        self.kv = kv
        self.phases = Phases()
        self.step = UNTIMED_STEP
        """The last step."""
        self._now = 0.0
        self.scheduler = scheduler
        self._totals = totals
        self._counts = counts
        self._sessions: dict[int, Session] = {}
        self._crowded: tuple[int, int] | None = None
        self.updates: list[Update] = []
        """Updates that no report has taken yet."""
        self._strikes: list[Strike] = []
        self._has_recovered = False
        """Whether sessions came, since the last step, that ran on another verifier."""
        self._patient: set[int] = set()
        """Handles of the sessions whose rounds wait for a source's drafts."""
        self._held_until_s = 0.0
        """Earliest time at which a running session stops waiting for drafts."""
        self._prompt_passes: dict[int, int] = {}
        """Steps so far that only read a part of a session's prompt, by handle."""

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def __contains__(self, session: Session) -> bool:
        return session.handle in self._sessions

    def get(self, handle: int) -> Session | None:
        """The session of this handle; None where it has ended."""
        return self._sessions.get(handle)

    def take_events(self) -> tuple[tuple[Update, ...], tuple[Strike, ...]]:
        """Updates and strikes since the last call."""
        events = tuple(self.updates), tuple(self._strikes)
        self.updates.clear()
        self._strikes.clear()
        return events

    def guarded(self, session: Session) -> "_Guard":
        """A context in which an exception ends this session and no other."""
        return _Guard(self, session)

    def at(self, now_s: float) -> None:
        """Sets the time, on the engine's clock."""
        self._now = now_s
        self.kv.at(now_s)

    def open(self, session: Session, now_s: float) -> None:
        """Takes a session in; it waits for its turn."""
        self._sessions[session.handle] = session
        session.chains_only = self.kv.pool.chains_only
        self.phases.opened(session.handle, now_s)
        self.scheduler.add(session.handle, session.key.tenant, session.begun)
        self._has_recovered |= session.begun

    def ready(self) -> list[Session]:
        """Starts the sessions whose turn it is; returns all that run, the oldest first.

        Sessions whose rounds wait for a draft are left out.
        """
        if self._has_recovered:
            self._plan_reading()
        for arrived in self.kv.take_arrived():
            self.scheduler.resume(arrived)
        while (handle := self.scheduler.next()) is not None:
            session = self._sessions[handle]
            if not self._may_start(session):
                break
            begun = False
            with self.guarded(session):
                begun = self.kv.begin(session)
            if begun:
                self.scheduler.start(handle)
                self.phases.began(handle, self._now)
            elif session in self:
                self.scheduler.put_off(handle)  # others, of other tenants among them, need not wait with it
        running = [self._sessions[handle] for handle in self.scheduler.running]
        self._held_until_s = 0.0
        return self._without_held(running) if self._patient else running

    def ready_s(self, latest_s: float) -> float:
        """The time, at the latest `latest_s`, at which a session may be ready, on the engine's clock."""
        if not self._sessions:
            return latest_s
        return min(latest_s, max(self._now, self._held_until_s))

    def _plan_reading(self) -> None:
        """Puts the sessions that ran elsewhere and are not read yet in the order with the shortest waits."""
        self._has_recovered = False
        unread = [
            session
            for handle in self.scheduler.in_order
            if (session := self._sessions[handle]).begun and session.uncomputed > 1
        ]
        if len(unread) > 1:
            self.scheduler.reorder(reading_order([self.kv.unread(session) for session in unread], BLOCK))

    def _without_held(self, running: list[Session]) -> list[Session]:
        ready, held = [], []
        for session in running:
            until_s = session.held_until_s if session.handle in self._patient else 0.0
            if until_s > self._now:
                session.sources.waits.held()
                held.append(until_s)
            else:
                ready.append(session)
        self._held_until_s = min(held, default=0.0)
        return ready

    def _may_start(self, session: Session) -> bool:
        """Whether there is room for a session; where there was none, a table has to be given back first."""
        crowded = (session.handle, self.kv.released)
        if crowded == self._crowded:
            return False
        need, running = self.kv.blocks_to_begin(session), len(self.scheduler.running)
        starts = may_start(need, self.kv.free, running) or may_start(need, self.kv.available, running)
        self._crowded = None if starts else crowded
        return starts

    def fit(self, ready: list[Session], sizes: list[int]) -> bool:
        """Makes room for a step, if need be by preempting sessions; returns whether drafted nodes fit too."""
        if self.kv.surely_fit(sum(sizes) + sum([session.node_limit for session in ready]), len(ready)):
            return True
        while True:
            needs = self._needs(ready, sizes)
            fitting = fit(needs, self.kv.free)
            if fitting.victims or not fitting.drafts:
                fitting = fit(needs, self.kv.available)
            if not fitting.victims:
                return fitting.drafts
            for handle in fitting.victims:
                self._preempt(self._sessions[handle])

    def _needs(self, ready: list[Session], sizes: list[int]) -> list[Need]:
        """Needs of the sessions that run: the step's oldest first, then all others, which could give way."""
        needs = {
            session.handle: self.kv.need(session, size, session.node_limit)
            for session, size in zip(ready, sizes, strict=True)
            if session in self.kv
        }
        oldest = next(iter(needs), None)
        others = [handle for handle in self.scheduler.running if handle != oldest]
        # A session whose round waits for drafts holds blocks, too, and a step leaves one session at least.
        waiting = [self._sessions[handle] for handle in others if handle not in needs]
        needs |= {session.handle: self.kv.need(session, 0, 0) for session in waiting}
        return [needs[handle] for handle in ([] if oldest is None else [oldest, *others])]

    def _preempt(self, session: Session) -> None:
        """Takes a session's keys and values; it waits, to be computed again from its ids."""
        self._totals.preempted += 1
        self.kv.release(session)
        session.resume_at(0)
        self.scheduler.preempt(session.handle)

    def take_wish(self, wish: Observe | WaitFor) -> None:
        """Notes how long a source asks a session's rounds to wait, or what it wants to hear of them."""
        session = self._sessions.get(wish.handle)
        if session is None or not session.sources.listens_to(wish.source):
            return
        if isinstance(wish, Observe):
            session.sources.want_tops(wish.source, wish.tops)
            return
        session.sources.waits.ask(wish.source, wish.ms)
        (self._patient.add if session.sources.waits.wanted else self._patient.discard)(session.handle)

    def take_offers(self, offers: Offers) -> None:
        """Merges the drafts of a source into the sessions that listen to it."""
        offers.in_flight.taken += load_of(offers.drafts)
        for handle, fragment in offers.drafts:
            session = self._sessions.get(handle)
            if session is not None and session.sources.listens_to(fragment.source):
                try:
                    self._take_offer(session, fragment, offers.arrived_s)
                except Exception as error:
                    self.broken(session, error)

    def merge(self, handle: int, fragment: Fragment, arrived_s: float) -> bool:
        """Takes in a draft while the target computes. False: the draft was left for `take_offers`.

        Merging must not end a session. A draft is left if its session's Open may still be on the way, or if
        merging it raises an error, which `take_offers` will raise again.
        """
        session = self._sessions.get(handle)
        if session is None or not session.sources.listens_to(fragment.source):
            return False
        try:
            self._take_offer(session, fragment, arrived_s)
        except Exception:
            return False
        return True

    def prepare(self, session: Session, rows: int, least: float = 0.0) -> int:
        """Lets the session's proposers draft; returns how many drafts they held back."""
        self._count(session, session.prepare(rows, least))
        return session.sources.held_back

    def prepare_below(self, session: Session, rows: int) -> None:
        """Lets the drafts of a session be continued for a step of `rows` uncomputed ids."""
        if rows == session.uncomputed:
            self._count(session, session.prepare_below())

    def _count(self, session: Session, offered: Sequence[tuple[Fragment, Offer]]) -> None:
        for fragment, offer in offered:
            self._counts[session.name_of(fragment.source)].offer(len(fragment), offer)

    def match_all(self, parts: Sequence[Part], outcome: PassOutcome) -> list[Matched]:
        """The target's choices at each session's rows of a pass, in order."""
        matched: list[Matched] = []
        wanted = first_row = 0
        targets = self._targets(parts, outcome)
        for (session, step_rows), (digests, target) in zip(parts, targets, strict=True):
            with self.guarded(session):
                scores = None
                if session.scorer is not None and step_rows.scored:
                    scores = session.scorer.score(step_rows.scored, session.cached, _digests(outcome, wanted))
                match = session.match(step_rows, target) if step_rows.final else None
                observed = None if match is None else session.observe(step_rows, match, digests)
                matched.append(Matched(session, step_rows, match, observed, first_row, scores))
            wanted += step_rows.wanted
            first_row += step_rows.row_count
        return matched

    def _targets(
        self, parts: Sequence[Part], outcome: PassOutcome
    ) -> list[tuple[Callable[[int], RowDigest], TargetSampler]]:
        """Each session's digests by node, with a sampler that has the tokens that were sampled together."""
        targets, wanted = [], 0
        for session, step_rows in parts:
            digests = _digests(outcome, wanted + len(step_rows.scored) + 1)
            targets.append((digests, session.target(digests, self._totals.choices)))
            wanted += step_rows.wanted
        sample_together(
            [
                (target, rows.tree)
                for (_, target), (session, rows) in zip(targets, parts, strict=True)
                if rows.final and not session.judges_draws
            ]
        )
        return targets

    def skip(self, session: Session, kept: Sequence[int]) -> None:
        """Keeps the rows of a step that only read a part of the session's prompt."""
        self.kv.keep_rows(session, kept)
        self._prompt_passes[session.handle] = self._prompt_passes.get(session.handle, 0) + 1

    def scored(self, session: Session, scores: PromptScores) -> None:
        """Adds the update of a part of a prompt that was scored: its tokens count as committed."""
        none = bytes(len(scores.tokens))
        self.updates.append(
            Update(
                session.handle,
                scores.position,
                scores.tokens,
                none,
                session.prefix_hash,
                logprobs=scores.logprobs,
            )
        )

    def commit(
        self, session: Session, step_rows: StepRows, done: Round, observed: Observed | None = None
    ) -> None:
        """Keeps a round's rows, counts the round, and adds its update."""
        self.kv.keep_rows(session, done.path)
        session.round_ended_s = self.step.ended_s
        self._totals.rounds += 1
        self._totals.committed += len(done.tokens)
        self._totals.drafted_rounds += bool(step_rows.tree.sources)
        self.phases.committed(session.handle, self.step.ended_s)
        sources, token_sources = step_rows.tree.sources, done.token_sources
        for source_index in set(sources):
            self._counts[session.name_of(source_index)].admitted += sources.count(source_index)
        for place, source_index in enumerate(token_sources):
            if source_index:
                self._counts[session.name_of(source_index)].accept(place)
        for source_index, count in done.own.items():
            self._counts[session.name_of(source_index)].own += count
        standing = session.sources.standing(self.step.sessions)
        record = self._record(session, step_rows, done, standing.states)
        finish = None
        if done.reason is not None:
            finish = Finish(done.reason, session.usage())
            self._release(session)
        self.updates.append(
            Update(
                session.handle,
                done.position,
                done.tokens,
                done.token_sources,
                session.prefix_hash,
                finish,
                done.logprobs,
                standing.resting,
                *session.cost,
                record=record,
                observed=observed,
            )
        )

    def _record(
        self, session: Session, step_rows: StepRows, done: Round, states: tuple[SourceState, ...]
    ) -> RoundRecord:
        """The round's record. It only refers to what is there already: every round makes one."""
        return RoundRecord(
            self.step,
            done.position,
            len(step_rows.chain),
            self._prompt_passes.pop(session.handle, 0),
            step_rows.candidates,
            step_rows.tree.sources,
            done.token_sources,
            done.drafted,
            done.tokens,
            RoundTree.of(step_rows.tree),
            states,
        )

    def expire(self, now_s: float) -> None:
        """Ends sessions whose deadline has passed."""
        for session in self:
            if session.deadline_s is not None and now_s >= session.deadline_s:
                self.end(session, FinishReason.CANCELLED, "the request's deadline has passed")

    def broken(self, session: Session, error: Exception, what: str = "") -> None:
        """Ends a session in which something went wrong."""
        fields = {"fields": session.key.fields}
        if isinstance(error, DeadEnd) and session in self:
            log.info("session %s ended: %s", session.key, error, extra=fields)
            self.end(session, FinishReason.ERROR, str(error), CommittedCode.DEAD_END)
            return
        log.error("session %s failed", session.key, exc_info=error, extra=fields)
        if session not in self:
            return
        self._totals.failed_sessions += 1
        self.end(session, FinishReason.ERROR, f"{what}{type(error).__name__}: {error}", CommittedCode.BUG)

    def end(self, session: Session, reason: FinishReason, message: str, code: int = 0) -> None:
        """Ends a session before its request is complete, and frees its blocks."""
        self._release(session)
        finish = Finish(reason, session.usage(), message, code)
        self.updates.append(Update(session.handle, len(session.ids), (), b"", session.prefix_hash, finish))

    def park(self, session: Session) -> None:
        """Frees a session that nobody reads; its update holds its cost so far."""
        self._release(session)
        position = len(session.ids)
        self.updates.append(
            Update(session.handle, position, (), b"", session.prefix_hash, parked=session.usage())
        )

    def _release(self, session: Session) -> None:
        del self._sessions[session.handle]
        self.scheduler.remove(session.handle)
        self.kv.release(session)
        self._patient.discard(session.handle)
        session.sources.calibrator.learn()
        self._prompt_passes.pop(session.handle, None)
        self.phases.ended(session.handle, self._now)

    def _take_offer(self, session: Session, fragment: Fragment, arrived_s: float) -> None:
        try:
            offer = session.offer(fragment)
        except MalformedDraft as error:
            self._counts[session.name_of(fragment.source)].malformed += 1
            session.sources.mute(fragment.source)
            self._strikes.append(Strike(session.handle, fragment.source, str(error)))
            return
        self._counts[session.name_of(fragment.source)].offer(len(fragment), offer)
        if offer.kept and fragment.source in session.sources.latencies:
            session.sources.latencies[fragment.source].arrived(arrived_s * 1000)


def _digests(outcome: PassOutcome, first: int) -> Callable[[int], RowDigest]:
    """Digests of wanted rows, counted from `first`; a node counts from the row behind the root's."""
    return lambda index: outcome.digest(first + index)


class _Guard:
    """The context of `guarded`; a class, since each session enters several in a step."""

    __slots__ = ("_pool", "_session")

    def __init__(self, pool: SessionPool, session: Session) -> None:
        self._pool = pool
        self._session = session

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self._pool.broken(self._session, error)
        return True
