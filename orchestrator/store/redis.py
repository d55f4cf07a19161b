"""Session records in a Redis server (6.2 or later, or Valkey) that several orchestrators share.

Soft state, as in every store: only takeovers and Cancels wait for it, and only for a short while.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from redis.exceptions import ResponseError

from orchestrator.store import (
    LEASE_S,
    REPORT_S,
    STALE,
    Append,
    Handle,
    SessionRecord,
    Tokens,
    WorkerReport,
    entries,
    scripts,
)
from orchestrator.store.connection import RedisConnection, is_wrong_kind
from orchestrator.store.entries import VERSION, BrokenEntry, ForeignEntry, epoch_to_bytes
from orchestrator.store.quotas import STREAMS_S, QuotaState, QuotaUse
from outrider.wire.codec import SessionKey
from outrider.wire.epochs import MOST_AHEAD_MS, RANDOM_BITS, wall_clock_ms
from outrider.wire.workers import BELIEVED_S, WorkerEntry

log = logging.getLogger(__name__)

LEASE_MS = int(LEASE_S * 1000)
REPORT_MS = int(REPORT_S * 1000)
BELIEVED_MS = int(BELIEVED_S * 1000)
STREAMS_MS = int(STREAMS_S * 1000)

Entry = TypeVar("Entry")
Dated = TypeVar("Dated", SessionRecord | None, Handle | None, Tokens)


class RedisStore:
    """The server at a redis://, rediss:// or unix:// URL. Raises ValueError for an invalid URL.

    ``ca``, ``cert`` and ``key`` are the paths of PEM files for a rediss:// URL, or empty: the server's
    authority, and the certificate that this end shows.
    """

    def __init__(self, url: str, ca: str = "", cert: str = "", key: str = "") -> None:
        self._connection = RedisConnection(url, ca, cert, key)
        self._logged: set[str] = set()

    @property
    def reachable(self) -> bool:
        """Whether the server has answered lately."""
        return self._connection.breaker.closed

    async def put(self, records: Sequence[tuple[SessionRecord, int]]) -> list[bool]:
        ceiling = _ceiling()
        calls = [
            (
                entries.record_name(record.key),
                (
                    VERSION,
                    epoch_to_bytes(record.epoch),
                    record.verifier,
                    record.choices,
                    int(record.cancelled),
                    epoch_to_bytes(lifts),
                    LEASE_MS,
                    ceiling,
                    epoch_to_bytes(record.request),
                ),
            )
            for record, lifts in records
        ]
        # An entry that is not ours stays; the session goes on without a record, as if its record were kept.
        return [bool(answer) for answer in await self._run(scripts.PUT, calls)]

    async def find(self, key: SessionKey) -> SessionRecord | None:
        name = entries.record_name(key)
        fields = await self._fields(name)
        return self._read(name, lambda: _of_now(entries.record_from(key, fields)))

    async def cancel(self, key: SessionKey) -> SessionRecord | None:
        name = entries.record_name(key)
        (answer,) = await self._run(scripts.CANCEL, [(name, (VERSION, LEASE_MS))])
        if not isinstance(answer, list):
            return None
        fields = dict(zip(answer[::2], answer[1::2], strict=True))
        return self._read(name, lambda: _of_now(entries.record_from(key, fields)))

    async def forget(self, key: SessionKey, epoch: int) -> None:
        """Drop the session's record if it is of this epoch; a cancelled record stays until its lease ends."""
        await self._run(scripts.FORGET, [(entries.record_name(key), (VERSION, epoch_to_bytes(epoch)))])

    async def append(self, appends: Sequence[Append]) -> list[int]:
        ceiling = _ceiling()
        calls = [
            (
                entries.tokens_name(it.key),
                (
                    VERSION,
                    epoch_to_bytes(it.epoch),
                    it.start,
                    entries.ids_to_bytes(it.ids),
                    LEASE_MS,
                    ceiling,
                ),
            )
            for it in appends
        ]
        answers = await self._run(scripts.APPEND, calls)
        return [STALE if answer == scripts.FOREIGN else int(answer) for answer in answers]

    async def tokens(self, key: SessionKey) -> Tokens | None:
        name = entries.tokens_name(key)
        data = await self._ask(name, lambda redis: redis.get(name))
        return self._read(name, lambda: _of_now(entries.tokens_from(data))) if data else None

    async def put_handle(self, handle: Handle) -> None:
        arguments = (
            VERSION,
            epoch_to_bytes(handle.epoch),
            handle.verifier,
            handle.length,
            epoch_to_bytes(handle.prefix_hash),
            LEASE_MS,
            _ceiling(),
        )
        await self._run(scripts.PUT_HANDLE, [(entries.handle_name(handle.key), arguments)])

    async def handle(self, key: SessionKey) -> Handle | None:
        name = entries.handle_name(key)
        fields = await self._fields(name)
        return self._read(name, lambda: _of_now(entries.handle_from(key, fields)))

    async def put_prefixes(self, scope: str, hashes: Sequence[int], verifier: str) -> None:
        async def write(redis: Any) -> None:
            pipe = redis.pipeline(transaction=False)
            for hash_ in hashes:
                pipe.set(entries.prefix_name(scope, hash_), VERSION + verifier.encode(), px=LEASE_MS)
            await pipe.execute()

        if hashes:
            await self._connection.ask(write)

    async def longest_prefix(self, scope: str, hashes: Sequence[int]) -> tuple[int, str] | None:
        names = [entries.prefix_name(scope, hash_) for hash_ in hashes]
        found: list[Any] = await self._connection.ask(lambda redis: redis.mget(names)) if names else []
        for index, value in enumerate(found):
            if value and value.startswith(VERSION):
                return index, value[len(VERSION) :].decode(errors="replace")
        return None

    async def report(self, reports: Sequence[WorkerReport]) -> None:
        arguments: list[Any] = [REPORT_MS]
        for it in reports:
            arguments += [f"{it.address}|{it.reporter}", entries.report_to_bytes(it)]
        await self._run(scripts.REPORT, [(entries.WORKERS, arguments)])

    async def workers(self) -> list[WorkerReport]:
        (found,) = await self._run(scripts.WORKERS, [(entries.WORKERS, (VERSION,))])
        reports = found if isinstance(found, list) else []
        read = [self._read(entries.WORKERS, partial(entries.report_from, data)) for data in reports]
        return [report for report in read if report is not None]

    async def announce(self, announced: Sequence[WorkerEntry]) -> None:
        """Keep these workers for BELIEVED_S seconds, each in place of the earlier entry of its address."""
        arguments: list[Any] = [BELIEVED_MS]
        for it in announced:
            arguments += [it.address, entries.entry_to_bytes(it)]
        if announced:
            await self._run(scripts.REPORT, [(entries.REGISTERED, arguments)])

    async def announced(self) -> list[WorkerEntry]:
        """All announced workers whose entries have not expired."""
        (found,) = await self._run(scripts.WORKERS, [(entries.REGISTERED, (VERSION,))])
        stored = found if isinstance(found, list) else []
        read = [self._read(entries.REGISTERED, partial(entries.entry_from, data)) for data in stored]
        return [entry for entry in read if entry is not None]

    async def use_quotas(self, uses: Sequence[QuotaUse]) -> list[QuotaState | None]:
        calls = [
            (
                entries.quota_name(it.key),
                (
                    VERSION,
                    it.reporter,
                    STREAMS_MS,
                    *(
                        -1 if most is None else most
                        for most in (it.streams, it.requests_per_minute, it.tokens_per_minute)
                    ),
                    it.running,
                    it.tokens,
                    it.beginning,
                ),
            )
            for it in uses
        ]
        answers = await self._run(scripts.USE_QUOTA, calls)
        return [
            QuotaState(answer[0].decode(), int(answer[1]), float(answer[2]), float(answer[3]))
            if isinstance(answer, list)
            else None
            for answer in answers
        ]

    async def count_orchestrators(self, reporter: str) -> int:
        await self._run(
            scripts.REPORT, [(entries.ORCHESTRATORS, (REPORT_MS, reporter, VERSION + reporter.encode()))]
        )
        (alive,) = await self._run(scripts.WORKERS, [(entries.ORCHESTRATORS, (VERSION,))])
        return max(1, len(alive)) if isinstance(alive, list) else 1

    async def close(self) -> None:
        await self._connection.close()

    async def _run(self, script: str, calls: Sequence[tuple[str, Sequence[Any]]]) -> list[Any]:
        """The answer to each call; FOREIGN where its key holds an entry that is not ours."""
        answers = await self._connection.run(script, calls) if calls else []
        for (name, _), answer in zip(calls, answers, strict=True):
            if answer == scripts.FOREIGN or is_wrong_kind(answer):
                self._ignored(name, "it is of another version, or of another kind")
        return [scripts.FOREIGN if is_wrong_kind(answer) else answer for answer in answers]

    async def _fields(self, name: str) -> Mapping[bytes, bytes]:
        return await self._ask(name, lambda redis: redis.hgetall(name)) or {}

    async def _ask(self, name: str, command: Callable[[Any], Awaitable[Any]]) -> Any:
        """The answer to a command; None where the key holds an entry of another type."""

        async def asked(redis: Any) -> Any:
            try:
                return await command(redis)
            except ResponseError as error:
                if not is_wrong_kind(error):
                    raise
                self._ignored(name, "it is of another kind")
                return None

        return await self._connection.ask(asked)

    def _read(self, name: str, read: Callable[[], Entry]) -> Entry | None:
        """The entry; None where it is not ours, or broken.

        A broken entry is written over with its session.
        """
        try:
            return read()
        except ForeignEntry as error:
            self._ignored(name, f"it is of version {error}, this process writes {VERSION.decode()}")
        except BrokenEntry as error:
            self._ignored(name, f"it is broken: {error}")
        return None

    def _ignored(self, name: str, why: str) -> None:
        """Log that an entry is ignored, once for each name and a thousand names at most."""
        if name not in self._logged and len(self._logged) < 1000:
            self._logged.add(name)
            what = "a store's entry is ignored; delete it where nobody else needs it"
            log.warning(what, extra={"fields": {"name": name, "why": why}})


def _of_now(entry: Dated) -> Dated:
    """The entry. Raises BrokenEntry for an epoch that no clock can have made.

    No later epoch would pass such an epoch.
    """
    if entry is not None and (epoch := epoch_to_bytes(entry.epoch)) > _ceiling():
        raise BrokenEntry(f"epoch {epoch.decode()} is of the far future")
    return entry


def _ceiling() -> bytes:
    """The latest epoch that a clock anywhere can have made."""
    return epoch_to_bytes((wall_clock_ms() + MOST_AHEAD_MS + 1) << RANDOM_BITS)
