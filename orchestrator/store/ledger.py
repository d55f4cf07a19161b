"""The ledger: what this orchestrator records of its sessions in the store, and what it looks up there.

On a token's way there is only `grew`, which puts the session's key into a set. A task writes what has
changed, in batches, and writes again what the store has missed or lost. A lookup has a short time, and its
answer is a hint: without an answer every request goes on.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from orchestrator.admitted_request import AdmittedRequest
from orchestrator.store import LEASE_S, Handle, SessionRecord, SessionStore, StoreUnavailable
from orchestrator.store.outbox import EndedRequest, StoreOutbox, WriteBatch
from orchestrator.store.prefixes import begins_with, hashes_off_loop, scope_of
from outrider.wire.codec import SessionKey
from speculative.hashing import prefix_hash

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between two looks into the store for the Cancel of a request that waits."""
EVERY_S = 0.02
"""Pause between two batches, in seconds; changes of that time go into one batch."""
AGAIN_S = 0.2
"""Pause after a batch that could not be written, in seconds."""
RENEW_S = LEASE_S / 3
HINT_S = 0.1
"""How long an opening waits for the store to name a better verifier, in seconds."""
CANCEL_S = 1.0
"""How long a Cancel of a request that runs elsewhere waits for the store, in seconds, and so does a lookup of
recorded tokens; a takeover waits half as long."""
RECORD_S = 5.0
"""How long a request waits for the store to have its new verifier on record, in seconds."""

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """The last known placement of a session that is to be opened."""

    verifier: str = ""
    """Address of the verifier that has the session itself, or empty."""
    near: str = ""
    """Address of a verifier that has a long prefix of the session's tokens, or empty."""
    cancelled: bool = False
    """Whether the client cancelled the request that this one resumes."""
    epoch: int = 0
    """The highest epoch on record of the session; 0: none."""
    choices: int = 1
    """Choices of the request that has the session, as far as is known."""


class Ledger:
    """Writes to one store, from `start` to `stop`.

    Args:
        seconds: is called with the duration of each call on a token's way, in seconds.
    """

    def __init__(self, store: SessionStore, seconds: Callable[[float], None]) -> None:
        self._store = store
        self._seconds = seconds
        self._outbox = StoreOutbox()
        self._work = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None
        self.failures = 0
        """Number of batches that could not be written so far."""
        self.well = True
        """Whether the last batch was written."""

    @property
    def waiting(self) -> int:
        """Number of sessions whose records are kept up to date."""
        return len(self._outbox)

    def start(self) -> None:
        """Begin to write records to the store."""
        self._writer = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Write the remaining changes, if the store takes them, and close the store."""
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.gather(self._writer, return_exceptions=True)
        with suppress(StoreUnavailable, TimeoutError):
            async with asyncio.timeout(CANCEL_S):
                while self._outbox:
                    await self._write(self._outbox.take())
        await self._store.close()

    def opened(self, record: SessionRecord, lifts: int, ids: dict[int, Sequence[int]]) -> None:
        """Record where a session is being opened.

        Args:
            lifts: recorded Cancels of epochs below this one are lifted; 0: none.
            ids: generated token ids by choice, in lists that will grow.
        """
        self._outbox.opened(record, lifts, ids)
        self._work.set()

    def grew(self, key: SessionKey) -> None:
        """Note that a session has new tokens, which its record lacks."""
        began = time.perf_counter()
        self._outbox.grew(key)
        if not self._work.is_set():
            self._work.set()
        self._seconds(time.perf_counter() - began)

    def ended(self, request: AdmittedRequest, model: str, epoch: int, whole: bool) -> None:
        """The request has ended, or was not opened.

        Args:
            whole: whether every choice ended at a verifier, which keeps the keys and values for a while.
        """
        self._outbox.ended(request.key, epoch, scope_of(request.key, model), request.ids if whole else ())
        self._work.set()

    def lost(self, key: SessionKey, epoch: int) -> None:
        """No verifier has the session of this epoch any more; the request may be opened elsewhere."""
        self._outbox.lost(key, epoch)
        self._work.set()

    def left(self, key: SessionKey, epoch: int) -> None:
        """The session goes on without this orchestrator, and its client may resume it anywhere."""
        self._outbox.left(key, epoch)
        self._work.set()

    async def whereabouts(self, request: AdmittedRequest, model: str) -> Whereabouts:
        """Look up the last known placement of the request's session, for HINT_S seconds at most."""
        key = request.key
        if (live := self._outbox.get(key)) is not None:
            known, gave_up = live.record, self._gave_up(live.record, request)
            return Whereabouts(known.verifier, "", gave_up, known.epoch, known.choices)
        prefixes = await hashes_off_loop(request.ids)
        scope = scope_of(key, model)
        record, handle, near = await asyncio.gather(
            self._ask(lambda: self._store.find(key), HINT_S),
            self._ask(lambda: self._store.handle(key), HINT_S),
            self._ask(lambda: self._store.longest_prefix(scope, prefixes), HINT_S),
        )
        verifier = "" if record is None else record.verifier
        if handle is not None and not verifier and begins_with(request.ids, handle):
            verifier = handle.verifier
        cancelled = record is not None and self._gave_up(record, request)
        epoch = max((known.epoch for known in (record, handle) if known is not None), default=0)
        choices = 1 if record is None else record.choices
        return Whereabouts(verifier, "" if near is None else near[1], cancelled, epoch, choices)

    async def is_cancelled(self, key: SessionKey, epoch: int, request: int) -> bool:
        """Whether the store has a Cancel of the request with this mark, which had this epoch."""
        record = await self._ask(lambda: self._store.find(key), CANCEL_S / 2)
        return record is not None and record.cancelled and record.epoch >= epoch and record.may_be(request)

    async def cancel_of(self, key: SessionKey, epoch: int, request: int) -> None:
        """Return once the store has such a Cancel, which another orchestrator may have received."""
        while True:
            await asyncio.sleep(LOOK_S)
            if await self.is_cancelled(key, epoch, request):
                return

    async def was_cancelled_meanwhile(self, key: SessionKey, epoch: int) -> bool:
        """Whether a Cancel went to the verifier that the session left when it was opened under this epoch.

        Looks once the store has the new epoch on record: later Cancels go to the new verifier.
        """
        for _ in range(round(RECORD_S / EVERY_S)):
            live = self._outbox.get(key)
            if live is None or live.record.epoch != epoch:
                return False
            if live.kept:
                return await self.is_cancelled(key, epoch, live.record.request)
            await asyncio.sleep(EVERY_S)
        return False

    async def recorded(self, key: SessionKey) -> Sequence[int]:
        """Generated token ids of a choice, as far as they are on record."""
        live = self._outbox.get(key._replace(choice=0))
        if live is not None and key.choice in live.ids:
            return live.ids[key.choice]
        tokens = await self._ask(lambda: self._store.tokens(key), CANCEL_S)
        return () if tokens is None else tokens.ids

    async def cancel(self, key: SessionKey) -> SessionRecord | None:
        """Record that the client cancelled the session's request, if the store can be reached.

        Returns the session's record as it was before, if any.
        """
        live = self._outbox.get(key)
        if live is None:
            return await self._ask(lambda: self._store.cancel(key), CANCEL_S)
        record = live.record
        self._outbox.cancelled(key)
        self._work.set()
        return record

    @staticmethod
    def _gave_up(record: SessionRecord, request: AdmittedRequest) -> bool:
        goes_on = request.have is not None and record.epoch >= request.seen_epoch
        return record.cancelled and goes_on and record.may_be(request.mark)

    async def _ask(self, lookup: Callable[[], Awaitable[Found]], seconds: float) -> Found | None:
        """The result of a lookup; None where the store does not answer in time."""
        try:
            async with asyncio.timeout(seconds):
                return await lookup()
        except (StoreUnavailable, TimeoutError):
            return None

    async def _run(self) -> None:
        renews_at = time.monotonic() + RENEW_S
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, renews_at - time.monotonic())):
                    await self._work.wait()
            if time.monotonic() >= renews_at:
                renews_at = time.monotonic() + RENEW_S
                self._outbox.repeat_all()
            self._work.clear()
            self.well = well = await self._flush()
            if self._outbox:
                self._work.set()
            await asyncio.sleep(EVERY_S if well else AGAIN_S)

    async def _flush(self) -> bool:
        """Write a batch; returns whether the store took it.

        After a failure every session is written again, since a store may come back empty.
        """
        batch = self._outbox.take()
        try:
            await self._write(batch)
        except asyncio.CancelledError:
            self._outbox.put_back(batch)  # `stop` writes the batch, the parts again that were written
            raise
        except StoreUnavailable as error:
            log.debug("not written", extra={"fields": {"why": str(error)}})
            self.failures += 1
            self._outbox.put_back(batch)
            self._outbox.repeat_all()
            return False
        except Exception:  # a fault of this code costs a batch, never the writing task
            log.exception("a batch could not be written; its sessions go on without")
            self.failures += 1
        return True

    async def _write(self, batch: WriteBatch) -> None:
        kept = await self._store.put(batch.puts)
        lengths = await self._store.append(batch.appends)
        ends = await asyncio.gather(*map(self._end, batch.endings), return_exceptions=True)
        if error := next((it for it in ends if it is not None), None):
            raise error
        self._outbox.wrote(batch, kept, lengths)

    async def _end(self, ending: EndedRequest) -> None:
        record = ending.record
        if record.cancelled:  # the request may have ended before the Cancel was written
            await self._store.put([(record, 0)])
        if ending.ids:
            hash_ = prefix_hash(ending.ids)
            await self._store.put_handle(
                Handle(record.key, record.epoch, record.verifier, len(ending.ids), hash_)
            )
            await self._store.put_prefixes(ending.scope, await hashes_off_loop(ending.ids), record.verifier)
        await self._store.forget(record.key, record.epoch)
