"""Quotas that hold for all orchestrators of a shared store together.

Each request asks the store in one step whether its key may begin another, and waits ASK_S at most. Tokens are
reported in batches, and so are requests that ended. While the store cannot be reached, nothing waits for it:
each orchestrator goes on by itself, with its share of every quota.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from orchestrator.front.quota import Allowance, Quota
from orchestrator.store import StoreUnavailable
from orchestrator.store.quotas import QuotaState, QuotaStore, QuotaUse

log = logging.getLogger(__name__)

ASK_S = 0.05
"""The longest that a request waits for the store, in seconds."""
AGAIN_S = 0.03
"""Pause before a request that too many running ones refuse asks once more, in seconds: the report of one that
has just ended elsewhere may be on its way."""
REPORT_EVERY_S = 1.0
"""Seconds between two reports; the end of a request is reported sooner."""
PAUSE_S = 0.01
"""Pause after a report, in seconds; what ends meanwhile goes into the next report together."""


@dataclass(slots=True)
class _KeyUse:
    """One key's use at this orchestrator."""

    quota: Quota
    allowance: Allowance
    held: int = 0
    """Requests that ask to begin, or that run."""
    running: int = 0
    """Requests that the store was asked for, and that have not ended."""
    tokens: int = 0
    """Tokens spent since the last report."""
    unreported: bool = False
    """Whether the store has yet to hear of an end."""

    @property
    def settled(self) -> bool:
        """Whether no request needs the entry, and the store has heard everything."""
        return not (self.held or self.tokens or self.unreported)


class ClusterQuotas:
    """Counts keys' use in a shared store, from `start` to `stop`.

    Args:
        seconds: is called with the time that each request has waited for the store, in seconds.
        clock: monotonic clock in seconds.
    """

    def __init__(
        self,
        store: QuotaStore,
        seconds: Callable[[float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._seconds = seconds
        self._clock = clock
        self._reporter = secrets.token_hex(8)
        self._uses: dict[str, _KeyUse] = {}
        self._orchestrators = 1
        self._reachable = True
        self._ended = asyncio.Event()
        self._reporting = asyncio.Lock()
        """One report at a time: reports name absolute numbers, and the last must not overtake another."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to report to the store."""
        self._task = asyncio.create_task(self._run(), name="quotas")

    async def stop(self) -> None:
        """Stop reporting; what this orchestrator has reported to run expires by itself."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def allowed_here(self, quota: Quota) -> Quota:
        """The part of a quota that this orchestrator may allow alone: all of it while the store counts."""
        return quota if self._reachable else quota.share(self._orchestrators)

    @asynccontextmanager
    async def running(self, key: str, quota: Quota, allowance: Allowance) -> AsyncIterator[None]:
        """Count one request of the key as running while the context lasts.

        Raises QuotaExceeded where the key's requests at all orchestrators leave no room for it.

        Args:
            key: the beginning of the key's digest.
            allowance: the key's allowance at this orchestrator, which learns what the store has counted.
        """
        if not quota.bounded:
            yield
            return
        use = self._uses.setdefault(key, _KeyUse(quota, allowance))
        use.quota, use.allowance = quota, allowance
        use.held += 1
        try:
            await self._admit(key, use)
            try:
                yield
            finally:
                use.running -= 1
                use.unreported = True
                self._ended.set()
        finally:
            use.held -= 1

    async def _admit(self, key: str, use: _KeyUse) -> None:
        """Count one request more as running. Raises QuotaExceeded where the store refuses it."""
        began = time.perf_counter()
        state = await self._begin(key, use)
        if state is not None and state.refused == "streams":
            await asyncio.sleep(AGAIN_S)
            state = await self._begin(key, use)
        self._seconds(time.perf_counter() - began)
        if state is not None and state.refused:
            raise use.allowance.refusal(state.refused, use.running + state.elsewhere, self._clock())

    def spent(self, key: str, tokens: int) -> None:
        """Note that a request of the key has read, or delivered, this many tokens."""
        if (use := self._uses.get(key)) is not None:
            use.tokens += tokens

    async def _begin(self, key: str, use: _KeyUse) -> QuotaState | None:
        """Count one request more unless the store refuses it; None where the store has not answered in time.

        One late answer says nothing of the store: whether it is lost is for the reports to find out.
        """
        state = None
        if self._reachable:
            try:
                async with asyncio.timeout(ASK_S), self._reporting:
                    (state,) = await self._exchange({key: use}, beginning=1)
            except StoreUnavailable as error:
                self._lose(error)
            except TimeoutError:
                pass
        if state is None:
            use.running += 1
        return state

    async def _exchange(self, uses: Mapping[str, _KeyUse], beginning: int = 0) -> list[QuotaState | None]:
        """Report these keys and learn their states; requests that may begin are counted as running."""
        reports = []
        for key, use in uses.items():
            tokens, use.tokens, use.unreported = use.tokens, 0, False
            reports.append(self._report_of(key, use, tokens, beginning))
        asking = asyncio.ensure_future(self._store.use_quotas(reports))
        try:
            states = await asyncio.shield(asking)
        except BaseException:
            for use in uses.values():
                use.unreported = True
            if not asking.done():
                asking.add_done_callback(lambda asked: self._arrived_late(uses, asked))
            raise
        for use, state in zip(uses.values(), states, strict=True):
            if state is not None:
                use.running += 0 if state.refused else beginning
                use.allowance.adopt(state.requests_left, state.tokens_left - use.tokens, self._clock())
        return states

    def _arrived_late(
        self, uses: Mapping[str, _KeyUse], asked: "asyncio.Future[list[QuotaState | None]]"
    ) -> None:
        """Report the keys again: the store may have taken the late report after newer ones."""
        if not asked.cancelled():
            asked.exception()  # its caller is gone
        for key, use in uses.items():
            self._uses.setdefault(key, use).unreported = True
        self._ended.set()

    def _report_of(self, key: str, use: _KeyUse, tokens: int, beginning: int) -> QuotaUse:
        quota = use.quota
        return QuotaUse(
            key,
            self._reporter,
            quota.streams,
            quota.requests_per_minute,
            quota.tokens_per_minute,
            use.running,
            tokens,
            beginning,
        )

    def _lose(self, error: StoreUnavailable) -> None:
        if self._reachable:
            fields = {"orchestrators": self._orchestrators, "why": str(error)}
            log.warning("quotas are counted here alone, each by its share", extra={"fields": fields})
        self._reachable = False

    async def _run(self) -> None:
        counted_at = 0.0
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(REPORT_EVERY_S):
                    await self._ended.wait()
            self._ended.clear()
            try:
                if (now := time.monotonic()) - counted_at >= REPORT_EVERY_S:
                    self._orchestrators = await self._store.count_orchestrators(self._reporter)
                    counted_at = now
                await self._report()
                if not self._reachable:
                    log.warning("quotas are counted together again", extra={"fields": {}})
                self._reachable = True
            except StoreUnavailable as error:
                self._lose(error)
                self._forget_tokens()
            except Exception:  # whatever is wrong with a report, requests go on
                log.exception("quotas were not reported")
            await asyncio.sleep(PAUSE_S)

    async def _report(self) -> None:
        """Report every key that is in use, or whose last request has ended; forget the others."""
        async with self._reporting:
            await self._exchange(
                {key: use for key, use in self._uses.items() if use.running or use.tokens or use.unreported}
            )
        self._uses = {key: use for key, use in self._uses.items() if not use.settled}

    def _forget_tokens(self) -> None:
        """Tokens of a time without the store are counted by the share alone: they have been made up for."""
        for use in self._uses.values():
            use.tokens = 0
