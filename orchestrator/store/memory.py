"""Session records in this process's memory: gone with it, invisible to other orchestrators."""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from orchestrator.store import LEASE_S, REPORT_S, STALE, Append, Handle, SessionRecord, Tokens, WorkerReport
from outrider.wire.codec import SessionKey
from outrider.wire.workers import BELIEVED_S, WorkerEntry

MOST = 65_536
"""The most entries of a kind; beyond it the entry that was renewed longest ago is dropped."""

Name = TypeVar("Name")
Value = TypeVar("Value")


class Leases(Generic[Name, Value]):
    """A dict whose entries expire `lease_s` seconds after they were put; `now` is any monotonic clock."""

    def __init__(self, lease_s: float, now: Callable[[], float]) -> None:
        self._lease_s = lease_s
        self._now = now
        self._entries: OrderedDict[Name, tuple[float, Value]] = OrderedDict()

    def get(self, name: Name) -> Value | None:
        """The value of this name, if its lease has not ended."""
        ends, value = self._entries.get(name, (0.0, None))
        return value if value is not None and self._now() < ends else None

    def put(self, name: Name, value: Value) -> None:
        """Keep a value with a new lease. All leases are equally long, so the first to end stand first."""
        now = self._now()
        self._entries[name] = (now + self._lease_s, value)
        self._entries.move_to_end(name)
        while self._entries:
            oldest = next(iter(self._entries))
            if len(self._entries) <= MOST and now < self._entries[oldest][0]:
                return
            del self._entries[oldest]

    def drop(self, name: Name) -> None:
        """Drop the entry of this name, if any."""
        self._entries.pop(name, None)

    def values(self) -> list[Value]:
        """All values whose leases have not ended."""
        now = self._now()
        return [value for ends, value in self._entries.values() if now < ends]


class MemoryStore:
    """A store in this process's memory, as dicts."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._records: Leases[SessionKey, SessionRecord] = Leases(LEASE_S, now)
        self._tokens: Leases[SessionKey, tuple[int, list[int]]] = Leases(LEASE_S, now)
        self._handles: Leases[SessionKey, Handle] = Leases(LEASE_S, now)
        self._prefixes: Leases[tuple[str, int], str] = Leases(LEASE_S, now)
        self._reports: Leases[tuple[str, str], WorkerReport] = Leases(REPORT_S, now)
        self._announced: Leases[str, WorkerEntry] = Leases(BELIEVED_S, now)

    async def put(self, records: Sequence[tuple[SessionRecord, int]]) -> list[bool]:
        return [self._put(record, lifts) for record, lifts in records]

    async def find(self, key: SessionKey) -> SessionRecord | None:
        return self._records.get(key)

    async def cancel(self, key: SessionKey) -> SessionRecord | None:
        known = self._records.get(key)
        if known is not None:
            self._records.put(key, known._replace(cancelled=True))
        return known

    async def forget(self, key: SessionKey, epoch: int) -> None:
        """Drop the session's record if it is of this epoch; a cancelled record stays until its lease ends."""
        known = self._records.get(key)
        if known is not None and known.epoch == epoch and not known.cancelled:
            self._records.drop(key)

    async def append(self, appends: Sequence[Append]) -> list[int]:
        return [self._append(it) for it in appends]

    async def tokens(self, key: SessionKey) -> Tokens | None:
        known = self._tokens.get(key)
        return None if known is None else Tokens(known[0], tuple(known[1]))

    async def put_handle(self, handle: Handle) -> None:
        known = self._handles.get(handle.key)
        if known is None or known.epoch <= handle.epoch:
            self._handles.put(handle.key, handle)

    async def handle(self, key: SessionKey) -> Handle | None:
        return self._handles.get(key)

    async def put_prefixes(self, scope: str, hashes: Sequence[int], verifier: str) -> None:
        for hash_ in hashes:
            self._prefixes.put((scope, hash_), verifier)

    async def longest_prefix(self, scope: str, hashes: Sequence[int]) -> tuple[int, str] | None:
        for index, hash_ in enumerate(hashes):
            if (verifier := self._prefixes.get((scope, hash_))) is not None:
                return index, verifier
        return None

    async def report(self, reports: Sequence[WorkerReport]) -> None:
        for it in reports:
            self._reports.put((it.address, it.reporter), it)

    async def workers(self) -> list[WorkerReport]:
        return self._reports.values()

    async def announce(self, entries: Sequence[WorkerEntry]) -> None:
        """Keep these workers for BELIEVED_S seconds, each in place of the earlier entry of its address."""
        for entry in entries:
            self._announced.put(entry.address, entry)

    async def announced(self) -> list[WorkerEntry]:
        """All announced workers whose entries have not expired."""
        return self._announced.values()

    async def close(self) -> None:
        """Do nothing: a store in memory has no connection."""

    def _put(self, record: SessionRecord, lifts: int) -> bool:
        known = self._records.get(record.key)
        if known is not None and known.epoch > record.epoch:
            return False
        theirs = known is not None and known.epoch >= lifts and known.may_be(record.request)
        still = known is not None and known.cancelled and theirs
        self._records.put(record.key, record._replace(cancelled=still or record.cancelled))
        return True

    def _append(self, it: Append) -> int:
        epoch, ids = self._tokens.get(it.key) or (0, [])
        if epoch > it.epoch:
            return STALE
        if epoch < it.epoch:
            if it.start:
                return 0
            ids = []
        if it.start <= len(ids):
            ids.extend(it.ids[len(ids) - it.start :])
            self._tokens.put(it.key, (it.epoch, ids))
        return len(ids)
