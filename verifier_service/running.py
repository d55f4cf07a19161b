"""The sessions of this worker, those that run and those that wait, and what has happened to them since it was
last told.

The engine's thread owns it, but for drafts that are merged while the target computes (`intake`). One
session's failure ends that session and no other.
"""

import logging
from collections.abc import Iterator

from speculative.commit import FinishReason
from speculative.errors import MalformedDraft
from speculative.merge import Fragment
from verifier_service.commands import Finish, Offers, Strike, Update
from verifier_service.counts import CountsByName, EngineTotals
from verifier_service.journal import Record, Step
from verifier_service.kv_cache import KVCache
from verifier_service.phases import Phases
from verifier_service.portion import Portion, Round
from verifier_service.scheduler import Scheduler, fit, may_start
from verifier_service.sessions import Session

log = logging.getLogger(__name__)

BUG = 13


class RunningSessions:
    """Sessions by handle; the scheduler says which of them have keys and values."""

    def __init__(self, kv: KVCache, scheduler: Scheduler, totals: EngineTotals, counts: CountsByName) -> None:
        self.kv = kv
        self.phases = Phases()
        self.step = Step(0, 0.0, 0.0, 0, 0, 0.0)
        """The last one."""
        self._now = 0.0
        self.scheduler = scheduler
        self._totals = totals
        self._counts = counts
        self._sessions: dict[int, Session] = {}
        self._crowded: tuple[int, int] | None = None
        self.updates: list[Update] = []
        """Updates that no batch has taken yet."""
        self._strikes: list[Strike] = []
        self._prompt_passes: dict[int, int] = {}
        """Of sessions whose prompt is being read, steps that did nothing else for them."""

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def __contains__(self, session: Session) -> bool:
        return session.handle in self._sessions

    def get(self, handle: int) -> Session | None:
        """The session of this handle, while it runs."""
        return self._sessions.get(handle)

    def tell(self) -> tuple[tuple[Update, ...], tuple[Strike, ...]]:
        """What has happened since the last call."""
        told = tuple(self.updates), tuple(self._strikes)
        self.updates.clear()
        self._strikes.clear()
        return told

    def guarded(self, session: Session) -> "_Guard":
        """Whatever goes wrong inside ends this session and nothing else."""
        return _Guard(self, session)

    def at(self, now_s: float) -> None:
        """The time, on time.perf_counter, from now on."""
        self._now = now_s
        self.kv.at(now_s)

    def open(self, session: Session, now_s: float) -> None:
        """Takes a session in; it waits for its turn."""
        self._sessions[session.handle] = session
        self.phases.opened(session.handle, now_s)
        self.scheduler.add(session.handle, session.key.tenant, session.begun)

    def ready(self) -> list[Session]:
        """Sessions that the next step is for, the oldest first; those whose turn it is begin."""
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
                break
        return [self._sessions[handle] for handle in self.scheduler.running]

    def _may_start(self, session: Session) -> bool:
        """Whether there is room; one that there was none for is looked at again when a session has left."""
        crowded = (session.handle, self.kv.released)
        if crowded == self._crowded:
            return False
        need, running = self.kv.blocks_to_begin(session), len(self.scheduler.running)
        starts = may_start(need, self.kv.free, running) or may_start(need, self.kv.available, running)
        self._crowded = None if starts else crowded
        return starts

    def fit(self, ready: list[Session], sizes: list[int]) -> bool:
        """Makes room for a step; whether it has room for drafted nodes too. Some may have to give way."""
        while True:
            needs = [
                self.kv.need(session, size, session.node_limit)
                for session, size in zip(ready, sizes, strict=True)
                if session in self.kv
            ]
            fitting = fit(needs, self.kv.free)
            if fitting.victims or not fitting.drafts:
                fitting = fit(needs, self.kv.available)
            if not fitting.victims:
                return fitting.drafts
            for handle in fitting.victims:
                self._preempt(self._sessions[handle])

    def _preempt(self, session: Session) -> None:
        """A session gives up its keys and values, and waits to be computed again from its ids."""
        self._totals.preempted += 1
        self.kv.release(session)
        session.resume_at(0)
        self.scheduler.preempt(session.handle)

    def take_offers(self, offers: Offers) -> None:
        """Merges what a source sent into the sessions that listen to it."""
        offers.in_flight.taken += len(offers.drafts)
        for handle, fragment in offers.drafts:
            session = self._sessions.get(handle)
            if session is not None and session.listens_to(fragment.source):
                try:
                    self._take_offer(session, fragment, offers.arrived_s)
                except Exception as error:
                    self.broken(session, error)

    def merge(self, handle: int, fragment: Fragment, arrived_s: float) -> bool:
        """Merges a draft while the target computes, which ends no session.

        Returns whether it did; else it is for `take_offers`: what the session is to hear first may be on its
        way still, and what goes wrong will do so again.
        """
        session = self._sessions.get(handle)
        if session is None or not session.listens_to(fragment.source):
            return False
        try:
            self._take_offer(session, fragment, arrived_s)
        except Exception:
            return False
        return True

    def prepare(self, session: Session, rows: int) -> None:
        """Lets local sources draft for a step of so many pending rows of the session."""
        for fragment, offer in session.prepare(rows):
            self._counts[session.name_of(fragment.source)].offer(len(fragment), offer)

    def skip(self, session: Session, portion: Portion) -> None:
        """A step computed part of the session's prompt."""
        self.kv.keep_rows(session, session.skip(portion))
        self._prompt_passes[session.handle] = self._prompt_passes.get(session.handle, 0) + 1

    def commit(self, session: Session, portion: Portion, done: Round) -> None:
        """A step committed something: what is cached, counted and told follows from it."""
        self.kv.keep_rows(session, done.path)
        self._totals.rounds += 1
        self._totals.committed += len(done.tokens)
        self._totals.drafted_rounds += bool(portion.tree.sources)
        self._totals.accepted(len(done.credits) - done.credits.count(0))
        self.phases.committed(session.handle, self.step.ended_s)
        sources, credits = portion.tree.sources, done.credits
        for credit in set(sources):
            counts = self._counts[session.name_of(credit)]
            counts.admitted += sources.count(credit)
            counts.accepted += credits.count(credit)
        record = self._record(session, portion, done)
        finish = None
        if done.reason is not None:
            finish = Finish(done.reason, session.usage())
            self._release(session)
        self.updates.append(
            Update(
                session.handle,
                done.position,
                done.tokens,
                done.credits,
                session.prefix_hash,
                finish,
                done.logprobs,
                session.resting,
                *session.cost,
                record=record,
            )
        )

    def _record(self, session: Session, portion: Portion, done: Round) -> Record:
        """Of what is there already: this is on every round's way."""
        return Record(
            self.step,
            done.position,
            len(portion.chain),
            self._prompt_passes.pop(session.handle, 0),
            portion.candidates,
            portion.tree.sources,
            done.credits,
            done.drafted,
        )

    def expire(self, now_s: float) -> None:
        """Ends sessions whose deadline has passed."""
        for session in self:
            if session.deadline_s is not None and now_s >= session.deadline_s:
                self.end(session, FinishReason.CANCELLED, "the request's deadline has passed")

    def broken(self, session: Session, error: Exception, what: str = "") -> None:
        """Something is wrong with one session: it ends."""
        fields = session.key.fields
        log.error("session %s failed", session.key, exc_info=error, extra={"fields": fields})
        if session not in self:
            return
        self._totals.failed_sessions += 1
        self.end(session, FinishReason.ERROR, f"{what}{type(error).__name__}: {error}", BUG)

    def end(self, session: Session, reason: FinishReason, message: str, code: int = 0) -> None:
        """Ends a running session before its time and frees its slots."""
        self._release(session)
        finish = Finish(reason, session.usage(), message, code)
        position = len(session.ids)
        self.updates.append(Update(session.handle, position, (), b"", session.prefix_hash, finish))

    def park(self, session: Session) -> None:
        """A session that nobody reads gives up its place and its memory; what it has cost is told."""
        self._release(session)
        position = len(session.ids)
        self.updates.append(
            Update(session.handle, position, (), b"", session.prefix_hash, parked=session.usage())
        )

    def _release(self, session: Session) -> None:
        del self._sessions[session.handle]
        self.scheduler.remove(session.handle)
        self.kv.release(session)
        self._prompt_passes.pop(session.handle, None)
        self.phases.ended(session.handle, self._now)

    def _take_offer(self, session: Session, fragment: Fragment, arrived_s: float) -> None:
        try:
            offer = session.offer(fragment)
        except MalformedDraft as error:
            self._counts[session.name_of(fragment.source)].malformed += 1
            session.mute(fragment.source)
            self._strikes.append(Strike(session.handle, fragment.source, str(error)))
            return
        self._counts[session.name_of(fragment.source)].offer(len(fragment), offer)
        if offer.kept and fragment.source in session.paces:
            session.paces[fragment.source].arrived(arrived_s * 1000)


class _Guard:
    """A class of its own: one is entered for each session several times a step."""

    __slots__ = ("_running", "_session")

    def __init__(self, running: RunningSessions, session: Session) -> None:
        self._running = running
        self._session = session

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self._running.broken(self._session, error)
        return True
