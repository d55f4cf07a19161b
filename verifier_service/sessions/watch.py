"""Readers of committed tokens: each Watch stream has cursors and no queue.

A beat wakes every reader that has news, and so does a new cursor. A reader then collects what lies
between each of its cursors and the committed length into one message, and collects again only when the stream
has taken that message. A cursor with an interval has news only once the interval or the session is over.
A reader without news gets at most one beat, or one notice, per `quiet_s`, which grows from QUIET_S to
MOST_QUIET_S with the number of readers: a message costs the event loop 0.1 to 0.2 ms, and a peer may hold
many streams.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import islice

from outrider.v1 import verifier_pb2
from outrider.wire.codec import (
    CommittedCode,
    epoch_to_text,
    finish_to_wire,
    key_from_wire,
    token_logprob_to_wire,
    usage_to_wire,
)
from outrider.wire.incoming.message_stream import CommonSavings
from outrider.wire.incoming.shape import BATCH_BYTES, BATCH_ENTRIES, Bounds
from speculative.errors import InvalidRequest
from speculative.request_bounds import MAX_INTERVAL_MS
from speculative.stop import FinishReason
from verifier_service.sessions.table import SessionTable, SessionView

WATCH_BOUNDS = Bounds(
    most_bytes=4 * BATCH_BYTES,
    most_fields=22 * BATCH_ENTRIES,
    because="an orchestrator sends cursors in batches",
)
"""Bounds of a WatchRequest: MOST_ADDED cursors have at most ten values each."""
MOST_ADDED = 2 * BATCH_ENTRIES
"""The most cursors that one request may add: four times what an orchestrator sends in one."""
MOST_DROPPED = 4 * BATCH_ENTRIES
"""The most cursors that one request may drop, likewise."""
WATCH_SHARE = 0.05
"""Lasting share of the event loop's time for reading requests of Watch streams: honest peers send few."""
CHANGES_AT_ONCE = 128
"""Cursors that are added or dropped between two pauses: some 2 ms."""
MOST_UNSENT = 16_384
"""The most sessions of one stream that cannot be read and of which the peer has not been told yet."""
QUIET_S = 0.05
"""Seconds between two messages of a stream that has no tokens and no end of a session to tell of."""
MOST_QUIET_S = 0.08
"""The most seconds between two such messages; an idle engine's beats are further apart, so each goes out."""
QUIET_READER_S = 0.005
"""Least seconds between two such messages for each reader that there is."""
LONG_US = 100_000
"""A step that is expected to take longer than this, in microseconds, is announced to every reader at once:
readers judge by what they were told whether the verifier stalls."""
MOST_OF_A_SESSION = 8
"""The most cursors that one stream may have in one session."""
IDS_PER_MESSAGE = 1 << 16
"""Token ids after which a message is sent: the rest goes into the next one."""
LOGPROBS_PER_MESSAGE = 1024
"""The most tokens of one session in one message where their log-probabilities come along."""


def request_pieces(message: verifier_pb2.WatchRequest) -> Iterator[verifier_pb2.WatchRequest]:
    """The request as several smaller ones, of the same effect. Raises InvalidRequest for a hopeless size."""
    for name, count, most in (
        ("add", len(message.add), MOST_ADDED),
        ("drop", len(message.drop), MOST_DROPPED),
    ):
        if count > most:
            raise InvalidRequest(f"{name} has {count} entries; one request may have {most}")
    if len(message.add) + len(message.drop) <= CHANGES_AT_ONCE:
        yield message
        return
    for at in range(0, len(message.drop), CHANGES_AT_ONCE):
        yield verifier_pb2.WatchRequest(drop=message.drop[at : at + CHANGES_AT_ONCE])
    for at in range(0, len(message.add), CHANGES_AT_ONCE):
        yield verifier_pb2.WatchRequest(add=message.add[at : at + CHANGES_AT_ONCE])


class _SessionCursor:
    """One reader's place in one session. A ViewCursor."""

    __slots__ = ("alias", "behind", "done", "due_s", "interval_s", "position", "reader", "view")

    def __init__(
        self, reader: "WatchReader", alias: int, view: SessionView, position: int, interval_s: float
    ) -> None:
        self.reader = reader
        self.alias = alias
        self.view = view
        self.position = position
        self.interval_s = interval_s
        self.due_s = 0.0
        """When the next message may go out, in seconds of the monotonic clock; ends go out at once."""
        self.done = False
        self.behind = False

    def updated(self) -> None:
        rests = self.interval_s and self.view.finish is None
        self.reader.mark_updated(self.alias, self.due_s if rests else 0.0)

    def superseded(self) -> None:
        self.reader.supersede(self.alias, f"session {self.view.key} was taken over under a higher epoch")

    def collect(self, now: float) -> verifier_pb2.Committed | None:
        """A message with the tokens since the last call, or the session's end; None if nothing is new.

        Where there are too many tokens for one message, `behind` is true afterwards.
        """
        view, start = self.view, self.position
        most = LOGPROBS_PER_MESSAGE if view.logprobs else IDS_PER_MESSAGE
        end = min(max(start, len(view.ids)), start + most)
        self.behind = end < len(view.ids)
        if self.done or (end == start and view.finish is None):
            return None
        message = verifier_pb2.Committed(
            alias=self.alias,
            position=start,
            ids=view.ids[start:end],
            token_sources=bytes(view.token_sources[start:end]),
            logprobs=map(token_logprob_to_wire, view.logprobs_between(start, end)),
            rounds=view.rounds,
            admitted=view.admitted,
        )
        self.position, self.due_s = end, now + self.interval_s
        if view.finish is not None and not self.behind:
            self.done = True
            message.finished = finish_to_wire(view.finish.reason)
            message.usage.CopyFrom(usage_to_wire(view.finish.usage))
            message.message = view.finish.message
            message.code = view.finish.code
        return message


class WatchReader:
    """The reader behind one Watch stream."""

    def __init__(self, readers: "WatchReaders") -> None:
        self._readers = readers
        self._cursors: dict[int, _SessionCursor] = {}
        """By the peer's alias of the session."""
        self._updated: set[int] = set()
        """Aliases of the sessions that have something new."""
        self._resting: dict[int, float] = {}
        """By alias of sessions that have something new: when the message about it is due."""
        self._next_due_s = math.inf
        """The earliest of these times, or one before it."""
        self._later: set[int] = set()
        """Aliases of the sessions of which a message under way holds a part."""
        self._notices: dict[int, verifier_pb2.Committed] = {}
        """Last messages of the sessions that cannot be read, by alias."""
        self._wake = asyncio.Event()
        self._told_at = -QUIET_S
        """When the latest message was collected, in seconds of the monotonic clock."""
        self._notice_timer: asyncio.TimerHandle | None = None
        """Runs while a notice waits for the end of the quiet time."""
        self._failure: Exception | None = None

    def request(self, message: verifier_pb2.WatchRequest) -> None:
        """Adds the cursors that the peer asks for, and removes those that the peer drops."""
        for alias in message.drop:
            self._forget(alias)
        for cursor in message.add:
            self._forget(cursor.alias)
            self._add(cursor)

    def wake(self, until_s: float = math.inf) -> None:
        """Has the reader collect and send a message, with what rests and is due until then."""
        self._end_rests(until_s)
        self._wake.set()

    def wake_if_due(self, now: float) -> None:
        """Wakes a reader that has news, or whose last message is old enough."""
        if now >= self._next_due_s:
            self._end_rests(now)
        if self._updated or now - self._told_at >= self._readers.quiet_s:
            self._wake.set()

    def mark_updated(self, alias: int, due_s: float = 0.0) -> None:
        """Marks a session that has something new, for the next message, or the next one from `due_s` on."""
        if due_s > time.monotonic() and not self._readers.ending:
            self._resting[alias] = due_s
            self._next_due_s = min(self._next_due_s, due_s)
        else:
            self._resting.pop(alias, None)
            self._updated.add(alias)

    def supersede(self, alias: int, message: str) -> None:
        """Ends a cursor whose session was taken over, with a last message that says so.

        A peer that leaves too many such messages unread loses its stream. Whoever takes the session over is
        somebody else, and hears nothing of it.
        """
        del self._cursors[alias]
        self._resting.pop(alias, None)
        try:
            self._notice(alias, CommittedCode.TAKEN_OVER, message)
        except InvalidRequest as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Ends the stream because the peer's requests cannot be read: `responses` raises `error`."""
        self._failure = error
        self._wake.set()

    async def responses(self) -> AsyncIterator[verifier_pb2.WatchResponse]:
        """One message per wake, until the stream breaks or the worker stops."""
        self._wake.set()
        ended = False
        while not ended:
            await self._wake.wait()
            self._wake.clear()
            if self._failure is not None:
                raise self._failure
            closed = self._readers.closed
            yield self._collect()
            # A slow peer takes a message long after: what came meanwhile goes out, too.
            ended = closed and not (self._updated or self._notices)

    def close(self) -> None:
        """Removes every cursor and notice."""
        self._notices.clear()
        self._end_notice_timer()
        for alias in list(self._cursors):
            self._forget(alias)

    def _add(self, cursor: verifier_pb2.Cursor) -> None:
        alias = cursor.alias
        try:
            view = self._readers.table.find(key_from_wire(cursor.key))
        except InvalidRequest as error:
            self._notice(alias, CommittedCode.UNKNOWN_SESSION, str(error))
            return
        if view is not None and self._cursors_in(view) >= MOST_OF_A_SESSION:
            raise InvalidRequest(f"session {view.key} has {MOST_OF_A_SESSION} cursors of this stream already")
        if view is None or cursor.epoch > view.epoch:
            name, epoch = cursor.key.session, epoch_to_text(cursor.epoch)
            self._notice(
                alias,
                CommittedCode.UNKNOWN_SESSION,
                f"session {name!r} is not known here under epoch {epoch}; open it",
            )
        elif cursor.epoch < view.epoch:
            newer = epoch_to_text(view.epoch)
            self._notice(
                alias, CommittedCode.TAKEN_OVER, f"session {view.key} was taken over under epoch {newer}"
            )
        else:
            interval_s = min(cursor.interval_ms, MAX_INTERVAL_MS) / 1000
            self._cursors[alias] = _SessionCursor(self, alias, view, cursor.position, interval_s)
            view.add_cursor(self._cursors[alias])
            self._readers.on_read(view)
            self._updated.add(alias)
            self._wake.set()

    def _cursors_in(self, view: SessionView) -> int:
        return sum(isinstance(other, _SessionCursor) and other.reader is self for other in view.cursors)

    def _end_rests(self, now: float) -> None:
        """Marks the resting sessions whose messages are due for the next message."""
        due = {alias for alias, due_s in self._resting.items() if due_s <= now}
        self._updated |= due
        self._resting = {alias: due_s for alias, due_s in self._resting.items() if alias not in due}
        self._next_due_s = min(self._resting.values(), default=math.inf)

    def _forget(self, alias: int) -> None:
        self._updated.discard(alias)
        self._resting.pop(alias, None)
        self._notices.pop(alias, None)
        cursor = self._cursors.pop(alias, None)
        if cursor is not None:
            cursor.view.remove_cursor(cursor, time.monotonic())

    def _notice(self, alias: int, code: CommittedCode, message: str) -> None:
        if len(self._notices) >= MOST_UNSENT:
            raise InvalidRequest(f"{MOST_UNSENT} cursors name no session that can be read; read the answers")
        finished = finish_to_wire(FinishReason.ERROR)
        self._notices[alias] = verifier_pb2.Committed(
            alias=alias, finished=finished, message=message, code=code
        )
        wait_s = self._told_at + self._readers.quiet_s - time.monotonic()
        if wait_s <= 0:
            self._wake.set()
        elif self._notice_timer is None:  # a long step has no beat that would bring the notice
            self._notice_timer = asyncio.get_running_loop().call_later(wait_s, self._wake.set)

    def _end_notice_timer(self) -> None:
        if self._notice_timer is not None:
            self._notice_timer.cancel()
            self._notice_timer = None

    def _collect(self) -> verifier_pb2.WatchResponse:
        self._told_at = time.monotonic()
        self._end_notice_timer()
        response = verifier_pb2.WatchResponse(beat=self._readers.beat)
        count = size = 0
        while self._updated and count < IDS_PER_MESSAGE and size < BATCH_BYTES:
            alias = self._updated.pop()
            self._resting.pop(alias, None)
            if (cursor := self._cursors.get(alias)) and (committed := cursor.collect(self._told_at)):
                response.committed.append(committed)
                count += len(committed.ids) + 64
                size += committed.ByteSize()
                if cursor.behind:
                    self._later.add(alias)
        for alias in list(islice(self._notices, BATCH_ENTRIES)) if size < BATCH_BYTES else ():
            response.committed.append(self._notices.pop(alias))
        self._updated |= self._later
        self._later.clear()
        if self._updated or self._notices:
            self._wake.set()
        return response


class WatchReaders:
    """All readers of this worker, and the latest beat."""

    def __init__(self, table: SessionTable) -> None:
        self.table = table
        """The sessions that can be read."""
        self.account = CommonSavings(WATCH_SHARE)
        """What reading the requests of all readers draws on."""
        self.beat = verifier_pb2.Beat()
        """The engine's latest beat."""
        self.closed = False
        """Whether all streams are to end."""
        self.step_s = 0.0
        """Expected duration of the latest step, in seconds; 0 before the first step."""
        self.on_read: Callable[[SessionView], None] = lambda view: None
        """Called with each session for which a reader adds a cursor."""
        self._draining = False
        self._readers: dict[WatchReader, None] = {}  # woken in the order in which they came

    @property
    def quiet_s(self) -> float:
        """Seconds between two messages of a stream without news."""
        return min(MOST_QUIET_S, max(QUIET_S, QUIET_READER_S * len(self._readers)))

    @property
    def ending(self) -> bool:
        """Whether the worker drains or closes: no token rests any more."""
        return self._draining or self.closed

    def open(self) -> WatchReader:
        """Adds the reader of a new stream; give the reader to `close` in the end."""
        reader = WatchReader(self)
        self._readers[reader] = None
        return reader

    def close(self, reader: WatchReader) -> None:
        """Removes a reader whose stream has ended."""
        self._readers.pop(reader, None)
        reader.close()

    def announce(self, step: int, expected_us: int) -> None:
        """Sends a beat to every reader that has news or has been quiet, together with the news.

        `expected_us` is the expected duration of the step that begins, in microseconds; 0 while idle.
        """
        self.beat = verifier_pb2.Beat(step=step, expected_us=expected_us, draining=self._draining)
        self.step_s = expected_us * 1e-6 or self.step_s
        now = time.monotonic()
        if expected_us > LONG_US:
            self._wake_all(now + expected_us * 1e-6)
            return
        for reader in self._readers:
            reader.wake_if_due(now)

    def drain(self) -> None:
        """Marks this and every later beat as draining: readers should move their sessions elsewhere."""
        self._draining = True
        self.beat.draining = True
        self._wake_all()

    def close_all(self) -> None:
        """Ends every stream after one last message."""
        self.closed = True
        self._wake_all()

    def _wake_all(self, until_s: float = math.inf) -> None:
        for reader in self._readers:
            reader.wake(until_s)
