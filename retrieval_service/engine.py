"""The engine: one thread that takes in what verifiers say, looks it up, and answers with fragments.

All that has arrived is taken in before anything is looked up, so that a session is looked up once however
much it has committed meanwhile. What changes the corpora runs in the same thread, between two lookups. Knows
nothing of sockets: events come in through `submit`, and whatever goes out is given to `publish`.
"""

import logging
import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from outrider.source.events import (
    Broken,
    End,
    Event,
    Follow,
    NotFollowed,
    Outgoing,
    Progress,
    Wrong,
)
from retrieval_service.holdings import Holdings
from retrieval_service.ranking import Shape
from retrieval_service.roster import Followed, Roster
from retrieval_service.sessions import Drawing

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True)
class Counts:
    """What the engine has done since it started."""

    lookups: int = 0
    matches: int = 0
    nodes_drafted: int = 0
    tokens_learnt: int = 0
    refusals: int = 0
    unknown_aliases: int = 0
    failed_sessions: int = 0


@dataclass(frozen=True, slots=True)
class _Call:
    """Something to do between two lookups."""

    work: Callable[[], Any]
    done: "Future[Any]"


class Engine:
    """Drafts for every followed session.

    Args:
        publish: called in the engine's thread with what goes out, by stream; must not block.
        observe: told of every lookup: under which name, and seconds.
        grace_s: how long a session is remembered after its stream broke.
    """

    def __init__(
        self,
        holdings: Holdings,
        publish: Callable[[dict[int, Outgoing]], None],
        observe: Callable[[str, float], None],
        *,
        shape: Shape,
        grace_s: float,
        max_sessions: int,
        max_length: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.holdings = holdings
        self.counts = Counts()
        self.roster = Roster(shape, grace_s=grace_s, most=max_sessions, max_length=max_length)
        self._drawing = Drawing(holdings, shape, self.counts, observe)
        self._publish = publish
        self._clock = clock
        self._inbox: queue.SimpleQueue[Event | _Call | None] = queue.SimpleQueue()
        self._outgoing: dict[int, Outgoing] = {}
        self._waiting: dict[Followed, None] = {}  # sessions to look up, in the order in which they moved
        self._stopping = False

    def submit(self, event: Event) -> None:
        """Takes an event in, from any thread."""
        self._inbox.put(event)

    def call(self, work: Callable[[], T]) -> "Future[T]":
        """Has something done in the engine's thread, between two lookups; from any thread."""
        done: Future[T] = Future()
        self._inbox.put(_Call(work, done))
        return done

    def stop(self) -> None:
        """Makes `run` return after the lookup in flight, from any thread."""
        self._inbox.put(None)

    def run(self) -> None:
        """The engine's thread: works until `stop`."""
        while not self._stopping:
            self.take_in(wait=True)
            self.look_up()
        for followed in self.roster:
            self._drawing.finish(followed.key)
        self.holdings.close()

    def take_in(self, *, wait: bool) -> None:
        """Handles all events that have arrived; if asked to, waits for one, or for a session's end."""
        over, until_s = self.roster.expire(self._clock())
        for key in over:
            self._drawing.finish(key)
        try:
            if wait:
                timeout_s = None if until_s is None else max(0.0, until_s - self._clock())
                self._handle(self._inbox.get(timeout=timeout_s))
        except queue.Empty:
            pass
        for _ in range(self._inbox.qsize()):
            self._handle(self._inbox.get_nowait())

    def look_up(self) -> None:
        """One lookup in each of its memories for every session that has moved; each is answered at once."""
        while self._waiting:
            followed = next(iter(self._waiting))
            del self._waiting[followed]
            try:
                fragments = self._drawing.draft(followed)
            except Exception:
                self._failed(followed)
            else:
                self.counts.nodes_drafted += sum(map(len, fragments))
                if fragments:
                    drafts = self._out(followed.stream).drafts
                    drafts.extend((followed.alias, fragment) for fragment in fragments)
            self._flush()
        self._flush()

    def _handle(self, event: Event | _Call | None) -> None:
        match event:
            case Progress():
                self._progress(event)
            case Follow():
                self._follow(event)
            case End(stream, alias):
                self._end(stream, alias)
            case Broken(stream):
                for followed in self.roster:
                    if followed.stream == stream:
                        self._waiting.pop(followed, None)
                self.roster.let_go_stream(stream, self._clock())
                self._outgoing.pop(stream, None)
            case Wrong():
                self._refuse(event, event.why)
            case _Call():
                _run(event)
            case None:
                self._stopping = True

    def _follow(self, follow: Follow) -> None:
        try:
            followed, before, over = self.roster.follow(follow, self._clock())
        except NotFollowed as error:
            self._refuse(follow, str(error))
            return
        except Exception:
            self._failed(follow)
            return
        if before is not None:
            self._waiting.pop(before, None)
            self._refuse(before, f"session {follow.key} is followed by someone else since")
        try:
            if over:
                self._drawing.finish(follow.key)
            self._drawing.begin(followed)
        except NotFollowed as error:
            self._refuse(followed, str(error))
            self._over(followed)
        except Exception:
            self._failed(followed)
        else:
            self._moved(followed)

    def _progress(self, progress: Progress) -> None:
        followed = self.roster.get(progress.stream, progress.alias)
        if followed is None:
            self.counts.unknown_aliases += 1
            return
        try:
            if followed.follower.progress(progress.position, progress.ids, progress.prefix_hash):
                self._drawing.progress(followed)
                self._moved(followed)
        except NotFollowed as error:
            self._waiting.pop(followed, None)
            self._refuse(followed, str(error))
            self.roster.let_go(followed, self._clock())
        except Exception:
            self._failed(followed)

    def _end(self, stream: int, alias: int) -> None:
        followed = self.roster.get(stream, alias)
        if followed is None:
            self.counts.unknown_aliases += 1
            return
        self._over(followed)

    def _over(self, followed: Followed) -> None:
        """The session is no longer followed here, and what its memories hold for it goes."""
        self._waiting.pop(followed, None)
        self.roster.end(followed)
        self._drawing.finish(followed.key)

    def _moved(self, followed: Followed) -> None:
        if followed.follower.wants_drafts:
            self._waiting[followed] = None

    def _failed(self, whom: Follow | Followed) -> None:
        """Inside an `except`: the trouble of one session is no other's."""
        log.exception("session %s failed; it is refused", whom.key, extra={"fields": whom.key.fields})
        self.counts.failed_sessions += 1
        self._refuse(whom, "the retrieval service failed on this session; its log says why")
        if isinstance(whom, Followed):
            self._over(whom)

    def _refuse(self, whom: Follow | Followed | Wrong, message: str) -> None:
        self.counts.refusals += 1
        log.info("not followed: %s", message, extra={"fields": {"stream": whom.stream, "alias": whom.alias}})
        self._out(whom.stream).refusals.append((whom.alias, message))

    def _out(self, stream: int) -> Outgoing:
        return self._outgoing.setdefault(stream, Outgoing())

    def _flush(self) -> None:
        if self._outgoing:
            outgoing, self._outgoing = self._outgoing, {}
            self._publish(outgoing)


def _run(call: _Call) -> None:
    if not call.done.set_running_or_notify_cancel():
        return
    try:
        call.done.set_result(call.work())
    except BaseException as error:
        call.done.set_exception(error)
