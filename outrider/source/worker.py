"""A source's worker: the one thread that takes in what verifiers send, drafts, and hands drafts over.

`SourceWorker` takes events in between two pieces of work; `AnsweringWorker` drafts once for every session
that has new ids. Knows nothing of sockets: events come in through `submit`, drafts go out through `publish`.
"""

import logging
import queue
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from outrider.source.events import (
    Event,
    Follow,
    LeastSurvival,
    MalformedFollow,
    NotFollowed,
    Outgoing,
    Progress,
    SessionEnded,
    StreamClosed,
)
from outrider.source.followed import FollowedIds, FollowedSession, SourceProfile
from outrider.source.roster import Roster
from outrider.wire.observed import observed_from_wire
from speculative.errors import InvalidRequest, Overloaded, Unavailable
from speculative.fragment import Fragment
from speculative.observed import Observed

log = logging.getLogger(__name__)

S = TypeVar("S", bound=FollowedSession)
T = TypeVar("T")
Publish = Callable[[dict[int, Outgoing]], None]
"""Takes the drafts and refusals to send, by stream."""


@dataclass(slots=True)
class WorkerCounts:
    """Counts since the worker's start; each field is one metric."""

    nodes_drafted: int = 0
    refusals: int = 0
    unknown_aliases: int = 0
    failed_sessions: int = 0


@dataclass(frozen=True, slots=True)
class _Call:
    """A function to run between two pieces of work."""

    function: Callable[[], Any]
    result: "Future[Any]"

    def run(self) -> None:
        """Runs the function unless its caller gave up."""
        if not self.result.set_running_or_notify_cancel():
            return
        try:
            self.result.set_result(self.function())
        except BaseException as error:
            self.result.set_exception(error)

    def refuse(self) -> None:
        """Tells the caller that the function will not run."""
        if self.result.set_running_or_notify_cancel():
            self.result.set_exception(Unavailable("the source has stopped; ask another one"))


class SourceWorker(ABC, Generic[S]):
    """Follows sessions and drafts for them. Subclasses say how: `open` and `work`, and hooks as they need.

    Everything but `submit`, `call` and `stop` belongs to the worker's thread.

    Args:
        publish: called in the worker's thread with what goes out; must not block.
    """

    failure = "the source failed on this session; its log says why"
    """What a verifier reads when one session failed here."""

    def __init__(
        self,
        profile: SourceProfile,
        publish: Publish,
        *,
        counts: WorkerCounts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.profile = profile
        self.counts = WorkerCounts() if counts is None else counts
        self.step_s = 0.0
        """Duration of recent passes in seconds; 0 for a source that runs no model."""
        self.version = 0
        """Version of the learnt weights that draft; 0: those that the source was given, or it has none."""
        self.roster: Roster[S] = Roster(profile, self.leave, self.close)
        self.clock = clock
        self._publish = publish
        self._inbox: queue.SimpleQueue[Event | _Call | None] = queue.SimpleQueue()
        self._outgoing: dict[int, Outgoing] = {}
        self._stopping = False
        self._has_ended = False

    # What a source is made of.

    @abstractmethod
    def open(self, follow: Follow, ids: FollowedIds, kept: S | None) -> S:
        """Starts to follow a session.

        Args:
            kept: the session as it was followed here before, within the grace period; this method owns it,
                even if it raises.

        Raises:
            NotFollowed, Overloaded: the session cannot be followed; the verifier reads why.
        """

    @abstractmethod
    def work(self) -> bool:
        """Does one piece of work; False if nothing is left to do until the next event."""

    def opened(self, session: S) -> None:
        """Called when a session is followed from now on."""

    def observed(self, session: S, said: Observed) -> None:
        """Called before `progressed` with what the target said, where the profile asks for `tops`.

        `said.tops` belong to the last ids of `session.ids`, as many as there are tops. Keep them beyond the
        session only where `session.request.learn` is set, and for the session's own tenant.
        """

    def progressed(self, session: S, fresh: Sequence[int]) -> None:
        """Called when a session reported progress; `fresh` ids, possibly none, are new in `session.ids`."""

    def leave(self, session: S) -> None:
        """Called when a session is no longer followed but kept for the grace period."""

    def close(self, session: S) -> None:
        """Called when a session is over: frees its resources."""

    def least_survival(self, stream: int, survival: float) -> None:
        """Called when a verifier reports the survival below which nodes are hardly admitted now."""

    def stream_closed(self, stream: int) -> None:
        """Called when a stream broke and its sessions were let go."""

    def shut_down(self) -> None:
        """Called at the end of `run`: closes every session."""
        self.roster.close()

    def gauges(self) -> dict[str, float]:
        """Present values of the worker's gauges, by metric; safe from any thread."""
        return {"sessions": len(self.roster)}

    # For any thread.

    def submit(self, event: Event) -> None:
        """Queues an event."""
        self._inbox.put(event)

    def pending(self) -> int:
        """How many events and calls wait for the worker's thread."""
        return self._inbox.qsize()

    def call(self, function: Callable[[], T]) -> "Future[T]":
        """Has a function run in the worker's thread, between two pieces of work.

        The future raises Unavailable where `run` ends before that.
        """
        result: Future[T] = Future()
        self._inbox.put(_Call(function, result))
        if self._has_ended:  # looked at behind `put`: either this thread refuses the call, or the worker's
            self._refuse_calls()
        return result

    def stop(self) -> None:
        """Makes `run` return after the work in hand."""
        self._inbox.put(None)

    # For the worker's thread.

    def run(self) -> None:
        """The thread's function: works until `stop`."""
        idle = True
        try:
            while not self._stopping:
                self.take_in(wait=idle)
                idle = not self.work()
            self.shut_down()
        finally:
            self._has_ended = True
            self._refuse_calls()

    def take_in(self, *, wait: bool) -> None:
        """Handles all events that have arrived; with `wait` at least one, or the end of a grace period."""
        until_s = self.roster.expire(self.clock())
        try:
            if wait:
                timeout_s = None if until_s is None else max(0.0, until_s - self.clock())
                self._handle(self._inbox.get(timeout=timeout_s))
        except queue.Empty:
            pass
        for _ in range(self._inbox.qsize()):  # what arrives meanwhile is for after the next piece of work
            self._handle(self._inbox.get_nowait())
        self.flush()

    def send(self, session: S, fragments: Sequence[Fragment]) -> None:
        """Sends drafts with the next `flush`."""
        if fragments:
            self.counts.nodes_drafted += sum(map(len, fragments))
            drafts = self._out(session.stream).drafts
            drafts.extend((session.alias, fragment) for fragment in fragments)

    def refuse(self, refused: Follow | MalformedFollow | S, message: str) -> None:
        """Sends a refusal with the next `flush`; the session itself stays as it is."""
        self.counts.refusals += 1
        log.info(
            "not followed: %s", message, extra={"fields": {"stream": refused.stream, "alias": refused.alias}}
        )
        self._out(refused.stream).refusals.append((refused.alias, message))

    def end(self, session: S, message: str) -> None:
        """Refuses a session that is followed, and closes it."""
        self.refuse(session, message)
        self.roster.end(session)

    def fail(self, failed: Follow | S) -> None:
        """Inside an `except`: logs the error and refuses the one session that it concerns."""
        log.exception("session %s failed; it is refused", failed.key, extra={"fields": failed.key.fields})
        self.counts.failed_sessions += 1
        self.refuse(failed, self.failure)
        if not isinstance(failed, Follow):
            self.roster.end(failed)

    def flush(self) -> None:
        """Publishes the drafts and refusals of all streams."""
        if self._outgoing:
            outgoing, self._outgoing = self._outgoing, {}
            self._publish(outgoing)

    def _refuse_calls(self) -> None:
        """Refuses all calls that wait, once nobody takes them in any more. For any thread."""
        with suppress(queue.Empty):
            while True:
                if isinstance(event := self._inbox.get_nowait(), _Call):
                    event.refuse()

    def _out(self, stream: int) -> Outgoing:
        return self._outgoing.setdefault(stream, Outgoing(weights_version=self.version))

    def _handle(self, event: Event | _Call | None) -> None:
        match event:
            case Progress():
                self._progress(event)
            case Follow():
                self._follow(event)
            case SessionEnded(stream, alias):
                if (session := self._session(stream, alias)) is not None:
                    self.roster.end(session)
            case LeastSurvival(stream, survival):
                self.least_survival(stream, survival)
            case StreamClosed(stream):
                self.roster.let_go_stream(stream, self.clock())
                self._outgoing.pop(stream, None)
                self.stream_closed(stream)
            case MalformedFollow():
                self.refuse(event, event.why)
            case _Call():
                event.run()
            case None:
                self._stopping = True

    def _follow(self, follow: Follow) -> None:
        try:
            ids = self.roster.check(follow)
            displaced, kept = self.roster.make_way(follow, self.clock())
            if displaced is not None:
                self.refuse(displaced, f"session {follow.key} is followed by someone else since")
            session = self.open(follow, ids, kept)
        except (NotFollowed, Overloaded) as error:
            self.refuse(follow, str(error))
        except Exception:
            self.fail(follow)
        else:
            self.roster.add(session)
            self._opened(session)

    def _opened(self, session: S) -> None:
        try:
            self.opened(session)
        except Exception:
            self.fail(session)

    def _progress(self, progress: Progress) -> None:
        session = self._session(progress.stream, progress.alias)
        if session is None:
            return
        try:
            fresh = session.ids.extend(progress.position, progress.ids, progress.prefix_hash)
            if self.profile.tops and (progress.tops or progress.off_path):
                count = min(self.profile.tops, session.request.vocabulary_size)
                self.observed(session, observed_from_wire(progress.tops, progress.off_path, count))
            self.progressed(session, fresh)
        except (NotFollowed, InvalidRequest) as error:
            self.refuse(session, str(error))
            self.roster.let_go(session, self.clock())
        except Exception:
            self.fail(session)

    def _session(self, stream: int, alias: int) -> S | None:
        session = self.roster.get(stream, alias)
        if session is None:
            self.counts.unknown_aliases += 1
        return session


class AnsweringWorker(SourceWorker[S]):
    """A worker whose `draft` is called once for each session with new ids, however many messages came."""

    def __init__(
        self,
        profile: SourceProfile,
        publish: Publish,
        *,
        counts: WorkerCounts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(profile, publish, counts=counts, clock=clock)
        self._waiting: dict[S, None] = {}  # sessions with new ids, in the order in which they came

    @abstractmethod
    def draft(self, session: S) -> Iterable[Fragment]:
        """Fragments of tokens that may follow the session's ids."""

    def opened(self, session: S) -> None:
        """Has `draft` called for a session that is followed from now on."""
        self._waiting[session] = None

    def progressed(self, session: S, fresh: Sequence[int]) -> None:
        """Has `draft` called for the session if it has new ids."""
        if fresh:
            self._waiting[session] = None

    def work(self) -> bool:
        """Drafts for all waiting sessions; publishes each session's drafts at once."""
        while self._waiting:
            session = next(iter(self._waiting))
            del self._waiting[session]
            if session.wants_drafts and self.roster.get(session.stream, session.alias) is session:
                try:
                    self.send(session, list(self.draft(session)))
                except Exception:
                    self.fail(session)
                self.flush()
        return False
