"""The engine of a simulated verifier: the real order, sessions and rounds, with virtual time for a forward.

Steps are as in verifier_service.engine; in place of logits there is the toy model, asked along the tree by
the real path match.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable
from typing import Any

from benchmarks.simulation.clock import VirtualLoop
from benchmarks.simulation.memory import CountedMemory
from benchmarks.simulation.toy import next_id
from speculative.acceptance.path_match import Match, path_match
from speculative.commit import FinishReason
from speculative.hashing import extend
from verifier_service.commands import Batch, Cancel, Command, Offers, Open, Park, Sources
from verifier_service.counts import CountsByName, EngineTotals
from verifier_service.observe.round_log import Step
from verifier_service.open_sessions.table import SessionTable
from verifier_service.planner import pending_rows
from verifier_service.portion import Portion
from verifier_service.running import RunningSessions
from verifier_service.scheduler import Scheduler
from verifier_service.sessions import Session

BEAT_S = 0.2
CHUNK = 24


class ToyEngine:
    """Decodes what is put into its inbox.

    Args:
        registry: the worker's; it says a session's seed.
        publish: told once per step, as the real engine tells the event loop.
        chance: how long steps take.
        step_s: usually.
        blocks: of memory.
        most_running: sessions that decode at once.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        registry: SessionTable,
        publish: Callable[[Batch], None],
        chance: random.Random,
        step_s: float,
        blocks: int,
        most_running: int,
    ) -> None:
        self.inbox = self  # the server puts commands into `inbox`
        self._loop = loop
        self._registry = registry
        self._publish = publish
        self._chance = chance
        self._step_s = step_s
        self._commands: deque[Command] = deque()
        self._work = asyncio.Event()
        self._steps = 0
        self.memory = CountedMemory(blocks)
        memory: Any = self.memory
        self._running = RunningSessions(memory, Scheduler(most_running), EngineTotals(), CountsByName())

    @property
    def sessions(self) -> int:
        """That it has."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """As the real one."""
        return self._running.waiting

    def put(self, command: Command) -> None:
        """Into the inbox."""
        self._commands.append(command)
        self._work.set()

    def stop(self, timeout_s: float) -> bool:
        """Its task ends with the process."""
        return True

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            if not self._running and not self._running.untold:
                await self._idle()
            self._drain()
            self._running.expire(self._loop.now)
            self._running.at(self._loop.now)
            ready = self._running.ready()
            if ready:
                await self._step(ready)
            else:
                self._tell(stepping=False)

    async def _idle(self) -> None:
        if not self._commands:
            self._work.clear()
            beat = self._loop.call_later(BEAT_S, self._work.set)
            await self._work.wait()
            beat.cancel()

    def _tell(self, stepping: bool) -> None:
        updates, strikes = self._running.tell()
        expected_us = int(self._step_s * 1e6) if stepping else 0
        self._publish(Batch(self._steps + stepping, expected_us, updates, strikes))
        for update in updates:
            if (session := self._running.get(update.handle)) is not None:
                session.committed(self._loop.now * 1000)

    def _drain(self) -> None:
        running = self._running
        while self._commands:
            match self._commands.popleft():
                case Offers() as offers:
                    running.take_offers(offers)
                case Open(session):
                    running.open(session, self._loop.now)
                case Cancel(handle, message):
                    if (cancelled := running.get(handle)) is not None:
                        running.end(cancelled, FinishReason.CANCELLED, message)
                case Park(handle):
                    if (parked := running.get(handle)) is not None:
                        running.park(parked)
                case Sources(handle, sources):
                    if (changed := running.get(handle)) is not None:
                        changed.use_sources(sources)

    async def _step(self, ready: list[Session]) -> None:
        nodes = [session.likely_nodes for session in ready]
        sizes = pending_rows([session.pending for session in ready], nodes, CHUNK)
        for session, size in zip(ready, sizes, strict=True):
            self._running.prepare(session, size)
        drafts = self._running.fit(ready, sizes)
        parts = []
        for session, size in zip(ready, sizes, strict=True):
            if size and session in self._running.kv:
                survivals = session.ranking(size).survivals if drafts else []
                portion = session.begin(size, len(survivals))
                self.memory.take(session, len(portion.tokens))
                parts.append((session, portion))
        self._tell(stepping=bool(parts))
        began = self._loop.now
        await asyncio.sleep(self._step_s * self._chance.uniform(0.7, 1.3))
        self._steps += 1
        self._running.step = Step(self._steps, began, self._loop.now, len(parts), sum(sizes), 0.0)
        self._drain()
        for session, portion in parts:
            if session in self._running:
                self._absorb(session, portion)

    def _absorb(self, session: Session, portion: Portion) -> None:
        if not portion.final:
            self._running.skip(session, portion)
            return
        match = self._match(session, portion)
        self._running.commit(session, portion, session.commit(portion, match))

    def _match(self, session: Session, portion: Portion) -> Match:
        mirror = self._registry.by_handle(session.handle)
        if mirror is None:  # taken over a moment ago: whatever is committed meets nobody
            return Match((), (1,))
        seed, root = mirror.request.seed, session.prefix_hash

        def token(node: int, path: tuple[int, ...]) -> int:
            hash_ = root
            for id_ in path:
                hash_ = extend(hash_, id_)
            return next_id(hash_, seed)

        return path_match(portion.tree, token)
