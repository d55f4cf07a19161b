"""Readers of committed tokens: each has cursors, none has a queue.

A reader is woken by a beat or by a session it reads; it then collects what lies between each cursor and the
committed length in one message, and does so again only when the stream has taken that one.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable

from outrider.v1 import verifier_pb2
from outrider.wire.codec import (
    epoch_to_text,
    finish_to_wire,
    key_from_wire,
    token_logprob_to_wire,
    usage_to_wire,
)
from speculative.commit import FinishReason
from speculative.errors import InvalidRequest
from verifier_service.registry import Mirror, Registry

UNKNOWN = 5
TAKEN_OVER = 10


class _Cursor:
    """Where one reader stands in one session."""

    __slots__ = ("alias", "done", "mirror", "position", "reader")

    def __init__(self, reader: "Reader", alias: int, mirror: Mirror, position: int) -> None:
        self.reader = reader
        self.alias = alias
        self.mirror = mirror
        self.position = position
        self.done = False

    def touched(self) -> None:
        self.reader.touched(self.alias)

    def superseded(self) -> None:
        self.reader.superseded(self.alias, f"session {self.mirror.key} was taken over under a higher epoch")

    def collect(self) -> verifier_pb2.Committed | None:
        """What has been committed since the last call; None where there is nothing new."""
        mirror, start = self.mirror, self.position
        end = max(start, len(mirror.ids))
        if self.done or (end == start and mirror.finish is None):
            return None
        message = verifier_pb2.Committed(
            alias=self.alias,
            position=start,
            ids=mirror.ids[start:end],
            credits=bytes(mirror.credits[start:end]),
            logprobs=map(token_logprob_to_wire, mirror.logprobs_between(start, end)),
            rounds=mirror.rounds,
            admitted=mirror.admitted,
        )
        self.position = end
        if mirror.finish is not None:
            self.done = True
            message.finished = finish_to_wire(mirror.finish.reason)
            message.usage.CopyFrom(usage_to_wire(mirror.finish.usage))
            message.message = mirror.finish.message
            message.code = mirror.finish.code
        return message


class Reader:
    """One Watch stream."""

    def __init__(self, watchers: "Watchers") -> None:
        self._watchers = watchers
        self._cursors: dict[int, _Cursor] = {}
        self._touched: set[int] = set()
        self._notices: dict[int, verifier_pb2.Committed] = {}
        self._wake = asyncio.Event()
        self._failure: Exception | None = None

    def request(self, message: verifier_pb2.WatchRequest) -> None:
        """Takes cursors in and drops others."""
        for alias in message.drop:
            self._forget(alias)
        for cursor in message.add:
            self._forget(cursor.alias)
            self._add(cursor)

    def beat(self) -> None:
        """The engine announced a step."""
        self._wake.set()

    def touched(self, alias: int) -> None:
        """A session has something new."""
        self._touched.add(alias)

    def superseded(self, alias: int, message: str) -> None:
        """A session was taken over: that is the last this reader hears of it."""
        del self._cursors[alias]
        self._notice(alias, TAKEN_OVER, message)

    def fail(self, error: Exception) -> None:
        """What the peer sends cannot be read: `responses` raises this."""
        self._failure = error
        self._wake.set()

    async def responses(self) -> AsyncIterator[verifier_pb2.WatchResponse]:
        """One message per wake, for as long as the stream is held and the worker runs."""
        self._wake.set()
        while not self._watchers.closed:
            await self._wake.wait()
            self._wake.clear()
            if self._failure is not None:
                raise self._failure
            yield self._collect()

    def close(self) -> None:
        """The stream ended."""
        for alias in list(self._cursors):
            self._forget(alias)

    def _add(self, cursor: verifier_pb2.Cursor) -> None:
        alias = cursor.alias
        try:
            mirror = self._watchers.registry.find(key_from_wire(cursor.key))
        except InvalidRequest as error:
            self._notice(alias, UNKNOWN, str(error))
            return
        if mirror is None or cursor.epoch > mirror.epoch:
            name, epoch = cursor.key.session, epoch_to_text(cursor.epoch)
            self._notice(alias, UNKNOWN, f"session {name!r} is not known here under epoch {epoch}; open it")
        elif cursor.epoch < mirror.epoch:
            newer = epoch_to_text(mirror.epoch)
            self._notice(alias, TAKEN_OVER, f"session {mirror.key} was taken over under epoch {newer}")
        else:
            self._cursors[alias] = _Cursor(self, alias, mirror, cursor.position)
            mirror.subscribe(self._cursors[alias])
            self._watchers.returned(mirror)
            self._touched.add(alias)
            self._wake.set()

    def _forget(self, alias: int) -> None:
        self._touched.discard(alias)
        self._notices.pop(alias, None)
        cursor = self._cursors.pop(alias, None)
        if cursor is not None:
            cursor.mirror.unsubscribe(cursor, time.monotonic())

    def _notice(self, alias: int, code: int, message: str) -> None:
        finished = finish_to_wire(FinishReason.ERROR)
        self._notices[alias] = verifier_pb2.Committed(
            alias=alias, finished=finished, message=message, code=code
        )
        self._wake.set()

    def _collect(self) -> verifier_pb2.WatchResponse:
        response = verifier_pb2.WatchResponse(beat=self._watchers.beat)
        touched, self._touched = self._touched, set()
        for alias in touched:
            if (cursor := self._cursors.get(alias)) and (committed := cursor.collect()):
                response.committed.append(committed)
        response.committed.extend(self._notices.values())
        self._notices.clear()
        return response


class Watchers:
    """All readers of this worker, and the latest beat."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.beat = verifier_pb2.Beat()
        self.closed = False
        self.step_s = 0.0
        """How long the latest step was expected to take, in seconds; 0: there was none yet."""
        self._draining = False
        self.returned: Callable[[Mirror], None] = lambda mirror: None
        """Told of each session that a reader names."""
        self._readers: dict[Reader, None] = {}  # told in the order in which they came

    def open(self) -> Reader:
        """A new reader; to be given to `close`."""
        reader = Reader(self)
        self._readers[reader] = None
        return reader

    def close(self, reader: Reader) -> None:
        """The reader's stream ended."""
        self._readers.pop(reader, None)
        reader.close()

    def announce(self, step: int, expected_us: int) -> None:
        """A step begins, or the engine is idle: every reader is told, with whatever is new for it."""
        self.beat = verifier_pb2.Beat(step=step, expected_us=expected_us, draining=self._draining)
        self.step_s = expected_us * 1e-6 or self.step_s
        for reader in self._readers:
            reader.beat()

    def drain(self) -> None:
        """Tells every reader that its sessions should go elsewhere."""
        self._draining = True
        self.announce(self.beat.step, self.beat.expected_us)

    def close_all(self) -> None:
        """Ends every stream after one last message."""
        self.closed = True
        for reader in self._readers:
            reader.beat()
