"""What this orchestrator tells the store of its sessions, and asks it.

On a token's way there is `grew` alone, which names the session in a set. A task writes what has changed,
coalesced; what a store that was away has missed or lost is written again. A question is given a short time,
and its answer is a hint: without one everything goes on.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from orchestrator.front.admission import Admitted
from orchestrator.store import LEASE_S, Handle, SessionRecord, SessionStore, StoreUnavailable
from orchestrator.store.outbox import Batch, Ending, Outbox
from orchestrator.store.prefixes import hashes
from outrider.wire.codec import SessionKey
from speculative.hashing import prefix_hash

log = logging.getLogger(__name__)

EVERY_S = 0.02
"""Between two batches: what comes meanwhile is coalesced."""
AGAIN_S = 0.2
"""After a batch that could not be written."""
RENEW_S = LEASE_S / 3
HINT_S = 0.1
"""How long an opening waits for a place that is only a better one."""
CANCEL_S = 1.0
"""How long a Cancel of what runs elsewhere waits, and who needs recorded ids; a takeover half of it."""
TOLD_S = 5.0
"""How long a store may take to be told of a session's new place until nobody waits for that."""
MANY_IDS = 8192

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """What is known of a session that is to be opened."""

    verifier: str = ""
    """That has the session itself."""
    near: str = ""
    """That has a long prefix of its ids."""
    cancelled: bool = False
    """Whether its client gave up the request that this one would go on with."""
    epoch: int = 0
    """The highest under which it is on record; 0: none."""


class Ledger:
    """`start` and `stop` it; `seconds` is told how long each call on a token's way took."""

    def __init__(self, store: SessionStore, seconds: Callable[[float], None]) -> None:
        self._store = store
        self._seconds = seconds
        self._outbox = Outbox()
        self._work = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None
        self.failures = 0
        """Batches that could not be written so far."""
        self.well = True
        """Whether the last one was."""

    @property
    def waiting(self) -> int:
        """Sessions that are kept track of."""
        return len(self._outbox)

    def start(self) -> None:
        """Begin to write."""
        self._writer = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Write what is left, if the store takes it, and let go of it."""
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.gather(self._writer, return_exceptions=True)
        with suppress(StoreUnavailable, TimeoutError):
            async with asyncio.timeout(CANCEL_S):
                while self._outbox:
                    await self._write(self._outbox.take())
        await self._store.close()

    def opened(self, record: SessionRecord, lifts: int, ids: dict[int, Sequence[int]]) -> None:
        """It is being opened; `ids` are its generated ones by choice, in lists that will grow."""
        self._outbox.opened(record, lifts, ids)
        self._work.set()

    def grew(self, key: SessionKey) -> None:
        """Its client has more ids."""
        began = time.perf_counter()
        self._outbox.grew(key)
        if not self._work.is_set():
            self._work.set()
        self._seconds(time.perf_counter() - began)

    def ended(self, request: Admitted, model: str, epoch: int, whole: bool) -> None:
        """The request has, or was not opened; where `whole`, its verifier keeps its KV for a while."""
        self._outbox.ended(request.key, epoch, _scope(request.key, model), request.ids if whole else ())
        self._work.set()

    def left(self, key: SessionKey, epoch: int) -> None:
        """It goes on without this orchestrator, for whoever comes for it."""
        self._outbox.left(key, epoch)
        self._work.set()

    async def whereabouts(self, request: Admitted, model: str) -> Whereabouts:
        """Where it would best be opened. Takes HINT_S at most."""
        key = request.key
        if (live := self._outbox.get(key)) is not None:
            gave_up = self._gave_up(live.record, request)
            return Whereabouts(live.record.verifier, cancelled=gave_up, epoch=live.record.epoch)
        prefixes = await _hashes(request.ids)
        scope = _scope(key, model)
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
        return Whereabouts(verifier, "" if near is None else near[1], cancelled, epoch)

    async def is_cancelled(self, key: SessionKey, epoch: int, request: int) -> bool:
        """Whether a Cancel is recorded of the request with this mark, which had this epoch."""
        record = await self._ask(lambda: self._store.find(key), CANCEL_S / 2)
        return record is not None and record.cancelled and record.epoch >= epoch and record.may_be(request)

    async def was_cancelled_meanwhile(self, key: SessionKey, epoch: int) -> bool:
        """Whether a Cancel went to where the session was before it was placed under this epoch: asked once
        the store knows of that, as later ones find the way."""
        for _ in range(round(TOLD_S / EVERY_S)):
            live = self._outbox.get(key)
            if live is None or live.record.epoch != epoch:
                return False
            if live.kept:
                return await self.is_cancelled(key, epoch, live.record.request)
            await asyncio.sleep(EVERY_S)
        return False

    async def recorded(self, key: SessionKey) -> Sequence[int]:
        """Generated ids of a choice, as far as is known."""
        live = self._outbox.get(key._replace(choice=0))
        if live is not None and key.choice in live.ids:
            return live.ids[key.choice]
        tokens = await self._ask(lambda: self._store.tokens(key), CANCEL_S)
        return () if tokens is None else tokens.ids

    async def cancel(self, key: SessionKey) -> SessionRecord | None:
        """Record that the client gave it up, as well as can be; its record before, where there was one."""
        live = self._outbox.get(key)
        if live is None:
            return await self._ask(lambda: self._store.cancel(key), CANCEL_S)
        record = live.record
        self._outbox.cancelled(key)
        self._work.set()
        return record

    @staticmethod
    def _gave_up(record: SessionRecord, request: Admitted) -> bool:
        goes_on = request.have is not None and record.epoch >= request.seen_epoch
        return record.cancelled and goes_on and record.may_be(request.mark)

    async def _ask(self, question: Callable[[], Awaitable[Answer]], seconds: float) -> Answer | None:
        """None where there is no answer in time. A question that nobody waits for any more is not asked."""
        try:
            async with asyncio.timeout(seconds):
                return await question()
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
        """Write a batch; whether it was. If not, all is written again: a store may come back empty."""
        batch = self._outbox.take()
        try:
            await self._write(batch)
        except StoreUnavailable as error:
            log.debug("not written", extra={"fields": {"why": str(error)}})
            self.failures += 1
            self._outbox.put_back(batch)
            self._outbox.repeat_all()
            return False
        except Exception:  # a fault of this code costs a batch, never the writer
            log.exception("a batch could not be written; its sessions go on without")
            self.failures += 1
        return True

    async def _write(self, batch: Batch) -> None:
        kept = await self._store.put(batch.puts)
        lengths = await self._store.append(batch.appends)
        ends = await asyncio.gather(*map(self._end, batch.endings), return_exceptions=True)
        if error := next((it for it in ends if it is not None), None):
            raise error
        self._outbox.wrote(batch, kept, lengths)

    async def _end(self, ending: Ending) -> None:
        record = ending.record
        if record.cancelled:  # it may have ended before this was written
            await self._store.put([(record, 0)])
        if ending.ids:
            hash_ = prefix_hash(ending.ids)
            await self._store.put_handle(
                Handle(record.key, record.epoch, record.verifier, len(ending.ids), hash_)
            )
            await self._store.put_prefixes(ending.scope, await _hashes(ending.ids), record.verifier)
        await self._store.forget(record.key, record.epoch)


async def _hashes(ids: Sequence[int]) -> list[int]:
    """In a thread where there are many: a hundred thousand take several milliseconds."""
    return hashes(ids) if len(ids) < MANY_IDS else await asyncio.to_thread(hashes, ids)


def _scope(key: SessionKey, model: str) -> str:
    """Who may meet whose prefixes: those of one tenant and model."""
    return f"{key.tenant}\0{model}"


def begins_with(ids: Sequence[int], handle: Handle) -> bool:
    """Whether these are the ids of which a verifier has the KV, or more."""
    return 0 < handle.length <= len(ids) and prefix_hash(ids[: handle.length]) == handle.prefix_hash
