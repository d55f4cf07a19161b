"""The draft source `edge`: what devices drafted, sent on to the verifiers that decode their sessions.

Verifiers attach here as to any source. A session is followed only while its device is connected here; all
else is routing, on the event loop. `account` has checked what the device sent.
"""

import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import grpc.aio

from outrider.source.events import Event, Follow, MalformedFollow, Outgoing, SessionEnded, StreamClosed
from outrider.source.streams import AttachStreams, Requests
from outrider.v1 import draft_source_pb2, draft_source_pb2_grpc
from outrider.wire.codec import SessionKey
from outrider.wire.names import EDGE
from outrider.wire.status import guarded, guarded_unparsed
from outrider.wire.workers import CONTRACT
from speculative.fragment import Fragment

log = logging.getLogger(__name__)

MOST_WAITING = 32
"""Most fragments of a session that wait until a verifier follows the session; the latest are kept."""
LONGEST = 1 << 24
"""The most tokens of a followed session: its ids are not kept here, so this only bounds a message."""

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class FollowedAs:
    """The verifier's stream that follows a session, the session's alias there, and its epoch."""

    stream: int
    alias: int
    epoch: int


@dataclass(slots=True)
class EdgeSession:
    """A session whose device is connected here."""

    key: SessionKey
    unplaced: Callable[[int], None]
    """Takes the number of nodes that no verifier asked for in time."""
    wait_ms: int = 0
    waiting: deque[Fragment] = field(default_factory=deque)
    """Fragments for the verifier that will follow the session."""
    followed: FollowedAs | None = None
    """The verifier's stream that follows the session; None: no verifier follows the session."""


class EdgeSource(draft_source_pb2_grpc.DraftSourceServicer):
    """Serves `edge` to verifiers. Belongs to the event loop that makes it.

    Args:
        unread: called with the number of nodes that were dropped because a verifier did not read them.
    """

    def __init__(self, unread: Callable[[int], None]) -> None:
        self._streams = AttachStreams(unread)
        self._sessions: dict[SessionKey, EdgeSession] = {}
        self._followed: dict[tuple[int, int], EdgeSession] = {}
        """By stream and alias."""

    @property
    def sessions(self) -> int:
        """Sessions whose device is connected here."""
        return len(self._sessions)

    @property
    def followed(self) -> int:
        """Sessions that verifiers follow now."""
        return len(self._followed)

    def add(self, session: EdgeSession) -> None:
        """Registers a device that drafts for this session, in place of an earlier device of the same
        session."""
        if (earlier := self._sessions.get(session.key)) is not None:
            self._drop(earlier)
        self._sessions[session.key] = session

    def remove(self, session: EdgeSession) -> None:
        """Removes the session's device: the verifier no longer waits, and gets no further drafts."""
        if self._sessions.get(session.key) is session:
            self.wait(session, 0)
            self._drop(session)

    def wait(self, session: EdgeSession, ms: int) -> None:
        """Lets rounds of the session wait this long for its device's drafts."""
        if ms == session.wait_ms:
            return
        session.wait_ms = ms
        if session.followed is not None:
            self._streams.put({session.followed.stream: Outgoing(waits={session.followed.alias: ms})})

    def send(self, session: EdgeSession, fragment: Fragment) -> None:
        """Sends a fragment to the session's verifier; the fragment waits until a verifier follows the
        session."""
        if session.followed is not None:
            followed = session.followed
            draft = followed.alias, under(fragment, followed.epoch)
            self._streams.put({followed.stream: Outgoing([draft])})
            return
        session.waiting.append(fragment)
        if len(session.waiting) > MOST_WAITING:
            session.unplaced(len(session.waiting.popleft()))

    def stop(self) -> None:
        """Ends every stream."""
        self._streams.close()

    @guarded
    async def Describe(
        self, request: draft_source_pb2.SourceDescribeRequest, context: Context
    ) -> draft_source_pb2.SourceDescription:
        """Describes the source: devices have tokenizers of their own, which the orchestrator has compared."""
        return draft_source_pb2.SourceDescription(
            name=EDGE,
            model="devices of clients",
            vocabulary_size=2**32 - 1,
            max_length=LONGEST,
            contract=CONTRACT,
            learns=False,
        )

    @guarded_unparsed
    async def Attach(
        self, request_iterator: Requests, context: Context
    ) -> AsyncIterator[draft_source_pb2.AttachResponse]:
        """Serves one verifier's stream."""
        responses = self._streams.attach(
            request_iterator,
            context,
            self._take,
            pending=lambda: 0,  # events are handled as they come
            model=EDGE,
            tokenizer_digest="",
            max_length=LONGEST,
        )
        async with contextlib.aclosing(responses):
            async for response in responses:
                yield response

    def _take(self, event: Event) -> None:
        """Handles one event of a verifier's stream; devices get their tokens from the relay instead."""
        match event:
            case Follow():
                self._follow(event)
            case SessionEnded(stream, alias):
                self._let_go(stream, alias)
            case StreamClosed(stream):
                for alias in [alias for of, alias in self._followed if of == stream]:
                    self._let_go(stream, alias)
            case MalformedFollow(stream, alias, why):
                self._refuse(stream, alias, why)

    def _follow(self, follow: Follow) -> None:
        self._let_go(follow.stream, follow.alias)
        session = self._sessions.get(follow.key)
        if session is None:
            self._refuse(follow.stream, follow.alias, f"no device drafts for session {follow.key} here")
            return
        epoch = follow.request.epoch
        if (earlier := session.followed) is not None:
            if earlier.epoch > epoch:
                why = f"epoch {epoch:016x} of session {follow.key} is older than {earlier.epoch:016x}"
                self._refuse(follow.stream, follow.alias, f"{why}, which is followed already")
                return
            self._let_go(earlier.stream, earlier.alias)
        session.followed = FollowedAs(follow.stream, follow.alias, epoch)
        self._followed[follow.stream, follow.alias] = session
        drafts = [(follow.alias, under(fragment, epoch)) for fragment in session.waiting]
        session.waiting.clear()
        waits = {follow.alias: session.wait_ms} if session.wait_ms else {}
        if drafts or waits:
            self._streams.put({follow.stream: Outgoing(drafts, waits=waits)})

    def _let_go(self, stream: int, alias: int) -> None:
        if (session := self._followed.pop((stream, alias), None)) is not None:
            session.followed = None

    def _refuse(self, stream: int, alias: int, why: str) -> None:
        log.info("not followed: %s", why, extra={"fields": {"stream": stream, "alias": alias}})
        self._streams.put({stream: Outgoing(refusals=[(alias, why)])})

    def _drop(self, session: EdgeSession) -> None:
        del self._sessions[session.key]
        for fragment in session.waiting:
            session.unplaced(len(fragment))
        session.waiting.clear()
        if session.followed is not None:
            self._let_go(session.followed.stream, session.followed.alias)


def under(fragment: Fragment, epoch: int) -> Fragment:
    """The fragment under the epoch of its verifier: a verifier that took over knows no other.

    The prefix hash vouches for the ids before the fragment, whichever verifier committed them.
    """
    return fragment if fragment.epoch == epoch else replace(fragment, epoch=epoch)
