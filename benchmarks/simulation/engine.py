"""The engine of a simulated verifier: the real core over the toy target, with virtual time for a forward.

What stands here in place of `verifier_service.engine.thread` waits on the virtual loop, and nothing else.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.simulation.clock import VirtualLoop
from benchmarks.simulation.memory import ToyPool
from benchmarks.simulation.toy import ToyTarget
from verifier_service.engine.core import EngineCore, TargetPass
from verifier_service.engine.kv_cache import KVCache
from verifier_service.engine.messages import Command, Open, StepReport
from verifier_service.engine.stats import PassTimes
from verifier_service.engine.step import EngineLimits
from verifier_service.engine.step_cost import StepCostModel
from verifier_service.proposers.batched import BatchedProposer
from verifier_service.sessions.table import SessionTable

BEAT_S = 0.2
CHUNK = 24


class ToyEngine:
    """Decodes what is put into its inbox.

    Args:
        table: the worker's sessions, each with its seed.
        publish: called with each report.
        chance: varies how long steps take.
        step_s: usual duration of a step.
        blocks: number of blocks of memory.
        most_running: sessions that decode at once.
        proposers: batched proposers, by source name.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        table: SessionTable,
        publish: Callable[[StepReport], None],
        chance: random.Random,
        step_s: float,
        blocks: int,
        most_running: int,
        proposers: Mapping[str, BatchedProposer],
    ) -> None:
        limits = EngineLimits(CHUNK, beat_s=BEAT_S, most_running=most_running, adaptive=False)
        pool: Any = ToyPool(blocks)
        self._costs = StepCostModel()
        kv = KVCache(pool, limits.reuse_prefixes, limits.lease_s)
        self.core = EngineCore(kv, limits, self._costs, proposers=proposers)
        self._target = ToyTarget(pool)
        self._loop = loop
        self._table = table
        self._publish = publish
        self._chance = chance
        self._step_s = step_s
        self._commands: deque[Command] = deque()
        self._computing = False
        self._work = asyncio.Event()

    def put(self, command: Command) -> None:
        """Puts a command into the inbox; while the target computes, applies it at once."""
        if isinstance(command, Open):
            view = self._table.by_handle(command.session.handle)
            assert view is not None, "a session is in the table before it is opened"
            self._target.seeds[view.handle] = view.request.seed
        if self._computing:
            self.core.apply(command, self._loop.now)
        else:
            self._commands.append(command)
            self._work.set()

    def stop(self, timeout_s: float) -> bool:
        """Does nothing: the engine's task ends with its process."""
        return True

    async def run(self) -> None:
        """Steps and beats, until the task is cancelled."""
        while True:
            self._drain()
            begun = self.core.begin(self._loop.now)
            if begun.report is not None:
                self._publish(begun.report)
                self.core.published(begun.report, self._loop.now)
            if isinstance(begun, TargetPass):
                await self._compute(begun)
            elif begun.until_s > self._loop.now:
                await self._wait(begun.until_s)

    def _drain(self) -> None:
        while self._commands:
            self.core.apply(self._commands.popleft(), self._loop.now)

    async def _wait(self, until_s: float) -> None:
        """Waits until a time, or until a command comes."""
        self._work.clear()
        timer = self._loop.call_at(until_s, self._work.set)
        await self._work.wait()
        timer.cancel()

    async def _compute(self, begun: TargetPass) -> None:
        began = self._loop.now
        self._computing = True
        try:
            outcome = self._target.forward(begun)
        except Exception as error:
            outcome = None
            failure = error
        await asyncio.sleep(self._step_s * self._chance.uniform(0.7, 1.3))
        self._computing = False
        if outcome is None:
            self.core.abandon(begun, failure)
            return
        now = self._loop.now
        self._costs.record(begun.rows, (now - began) * 1000, len(begun.parts), begun.depth)
        self.core.finish(begun, outcome, PassTimes(began, now))
