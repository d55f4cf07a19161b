"""The thread that writes: records in the order they were made, snapshots, and forgetting.

Records wait in a bounded queue. Where that is full or the disk is, a tenant goes on in memory, is marked
behind, and a snapshot brings its files up to date once there is room. Until then an earlier state is on the
disk, never a wrong one.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

from retrieval_service.past.tenant import Tenant
from retrieval_service.past.text import Added
from speculative.errors import Unavailable

_log = logging.getLogger(__name__)

Job = Callable[[], None]
Item = tuple[Tenant, Added] | Job | None


@dataclass(frozen=True, slots=True)
class DiskPolicy:
    """When and how often the disk is written.

    Attributes:
        sync_s: seconds between two syncs, after which records survive a loss of power, and between attempts
            after a failure.
        rotate_bytes: a log longer than this, and than its snapshot, is exchanged for a new snapshot.
        waiting: records that may wait to be written, of all tenants together.
    """

    sync_s: float = 1.0
    rotate_bytes: int = 4 << 20
    waiting: int = 10_000


class Writer:
    """Owns all files of all tenants. `close` it at the end: that writes the waiting records."""

    def __init__(self, policy: DiskPolicy, say: Callable[[str], None]) -> None:
        self._policy = policy
        self._say = say
        self._queue: queue.Queue[Item] = queue.Queue(policy.waiting)
        self._tenants: set[Tenant] = set()
        # Touched by the thread alone: whose last records may be lost with the power, whose disk failed.
        self._unsynced: set[Tenant] = set()
        self._failing: set[Tenant] = set()
        self._next_tick = time.monotonic() + policy.sync_s
        self._ending = False
        """Set by the thread before it looks at the queue for the last time."""
        self._thread = threading.Thread(target=self._run, name="past-outputs", daemon=True)
        self._thread.start()

    def write(self, tenant: Tenant, added: Added) -> bool:
        """Queue a record to be written, without waiting; False where the queue is full."""
        try:
            self._queue.put_nowait((tenant, added))
        except queue.Full:
            return False
        return True

    def start(self, tenant: Tenant) -> None:
        """Take on a tenant, and queue its first snapshot if it lacks files; does not wait."""
        self._tenants.add(tenant)
        if tenant.behind:
            with suppress(queue.Full):
                self._queue.put_nowait(lambda: self._snapshot(tenant))

    def flush(self, timeout: float) -> bool:
        """Wait until all records queued so far are durable; False where that failed.

        Raises Unavailable after `close`, as `forget` and `wipe` do.
        """
        return self._do(self._flush, timeout)

    def forget(self, tenant: Tenant, sessions: Sequence[str], timeout: float) -> None:
        """Remove sessions from the tenant's files; the text lacks them already. Raises OSError."""
        self._do(lambda: self._forget(tenant, sessions), timeout)

    def wipe(self, tenant: Tenant, timeout: float) -> None:
        """Remove a tenant's files. Raises OSError."""
        self._do(lambda: self._wipe(tenant), timeout)

    def close(self, timeout: float) -> bool:
        """Write the waiting records and end the thread; False where the disk did not take them in time."""
        if not self._thread.is_alive():
            return True
        ends = time.monotonic() + timeout
        try:
            self._queue.put(None, timeout=timeout)
        except queue.Full:
            return False
        self._thread.join(max(0.0, ends - time.monotonic()))
        return not self._thread.is_alive()

    def waiting(self) -> int:
        """Number of records and jobs that wait."""
        return self._queue.qsize()

    def _do(self, job: Callable[[], bool], timeout: float) -> bool:
        done: Future[bool] = Future()

        def run() -> None:
            try:
                done.set_result(job())
            except Exception as error:
                done.set_exception(error)

        try:
            self._queue.put(run, timeout=timeout)
        except queue.Full:
            raise TimeoutError(f"{self._queue.qsize()} records wait to be written") from None
        if self._ending:  # perhaps too late for the thread's last look
            self._thread.join(timeout)
            if not done.done():
                raise Unavailable("past outputs are closed, as the worker ends: ask again")
        return done.result(timeout)

    def _run(self) -> None:
        while not self._ending:
            self._carry_out(self._next_items(max(self._next_tick - time.monotonic(), 0.001)))
            if time.monotonic() >= self._next_tick:
                self._tick()
        while items := self._next_items(0.0):
            self._carry_out(items)
        self._tick()

    def _next_items(self, timeout: float) -> list[Item]:
        """Up to a thousand waiting records; empty if none arrives within `timeout` seconds."""
        items: list[Item] = []
        with suppress(queue.Empty):
            items.append(self._queue.get(timeout=timeout))
            while len(items) < 1000:
                items.append(self._queue.get_nowait())
        return items

    def _carry_out(self, items: Sequence[Item]) -> None:
        records: dict[Tenant, list[Added]] = {}
        for item in items:
            if isinstance(item, tuple):
                records.setdefault(item[0], []).append(item[1])
                continue
            # Whatever comes before a job is on the disk when it runs.
            self._append(records)
            records = {}
            if item is None:
                self._ending = True
            else:
                item()
        self._append(records)

    def _append(self, records: dict[Tenant, list[Added]]) -> None:
        for tenant, added in records.items():
            files = tenant.files
            if files is None or tenant.gone:
                continue
            if not tenant.behind:
                try:
                    files.append(added)
                    self._unsynced.add(tenant)
                except Exception as error:  # the thread serves all tenants
                    self._fell_behind(tenant, error)
            if tenant.behind:
                tenant.skipped_records += len(added)
            elif files.log_bytes > max(self._policy.rotate_bytes, files.snapshot_bytes):
                self._snapshot(tenant)

    def _snapshot(self, tenant: Tenant) -> None:
        if tenant.gone or tenant.files is None:
            return
        try:
            tenant.files.snapshot(*tenant.copy())
        except Exception as error:
            self._fell_behind(tenant, error)
            return
        self._unsynced.discard(tenant)
        if tenant in self._failing:
            self._failing.discard(tenant)
            self._say(f"past outputs of {tenant.name!r} are on the disk again")

    def _fell_behind(self, tenant: Tenant, error: Exception) -> None:
        """Inside an `except`: notes that the tenant's files lack something, and says so once."""
        tenant.behind = True
        if tenant not in self._failing:
            self._failing.add(tenant)
            self._say(f"past outputs of {tenant.name!r} are in memory only for now: {error}")
            if not isinstance(error, OSError):  # a fault of this program
                _log.exception("past outputs of %r could not be written", tenant.name)

    def _flush(self) -> bool:
        self._tick()
        return not any(tenant.behind for tenant in tuple(self._tenants))

    def _tick(self) -> None:
        """Sync the written records, and retry tenants that failed or were skipped."""
        self._next_tick = time.monotonic() + self._policy.sync_s
        for tenant in tuple(self._tenants):
            if tenant.gone:
                self._tenants.discard(tenant)
            elif tenant.behind:
                self._snapshot(tenant)
        for tenant in tuple(self._unsynced):
            self._unsynced.discard(tenant)
            try:
                if tenant.files is not None and not tenant.gone:
                    tenant.files.sync()
            except Exception as error:
                self._fell_behind(tenant, error)

    def _forget(self, tenant: Tenant, sessions: Sequence[str]) -> bool:
        # The feed may have made a Tenant of this name since the caller looked, and that one has the files.
        fed = (one for one in tuple(self._tenants) if one.name == tenant.name and not one.gone)
        tenant = next(fed, tenant)
        if tenant.files is None or tenant.gone:
            return True
        if not tenant.files.forget(sessions, *tenant.copy()):
            tenant.behind = True
        return True

    def _wipe(self, gone: Tenant) -> bool:
        if gone.files is not None:
            gone.files.wipe()
        for tenant in tuple(self._tenants):
            # Fed again already: what it had written went with the rest.
            if tenant.name == gone.name:
                tenant.behind = True
        return True
