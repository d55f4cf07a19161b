"""One simulation: all processes at work, the plan's faults, and the checks once all is quiet."""

import asyncio
import gc
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from benchmarks.simulation.calls import Channel
from benchmarks.simulation.client import MOVED_S, SimulatedClient
from benchmarks.simulation.clock import Process, VirtualLoop, virtual_time
from benchmarks.simulation.conversations import Conversation
from benchmarks.simulation.faults import Faults
from benchmarks.simulation.logs import logged
from benchmarks.simulation.network import Network
from benchmarks.simulation.orchestrator import SimulatedOrchestrator
from benchmarks.simulation.plan import Plan, plan_of
from benchmarks.simulation.records import check_records
from benchmarks.simulation.source import SimulatedSource
from benchmarks.simulation.stores import StoreServer
from benchmarks.simulation.verifier import GRACE_S, LEASE_S, Verifier
from outrider.wire.incoming import message_stream

MOST_S = 120.0
"""Virtual seconds after which a request that has not ended never will."""
QUIET_S = 4 * (GRACE_S + LEASE_S)
"""Virtual seconds after the last request in which everything held for requests has to be gone."""
DIALS = (
    "orchestrator.fleet.verifier_link.open_channel",
    "orchestrator.fleet.source_probe.open_channel",
    "verifier_service.remote_sources.stream.open_channel",
)


@dataclass(slots=True)
class Outcome:
    """The violations and events of one seed."""

    seed: int
    violations: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    """How often each kind of event happened, which shows how much the simulation covers."""


class World:
    """All processes of one simulation, on one virtual loop."""

    def __init__(self, plan: Plan, loop: VirtualLoop, note: Callable[[str], None] | None) -> None:
        self.plan = plan
        self.loop = loop
        self.outcome = Outcome(plan.seed)
        self.note = note
        self.network = Network(loop, plan.weather, self.chance, note)
        self.verifiers: dict[str, Verifier] = {}
        self.orchestrators: dict[str, SimulatedOrchestrator] = {}
        self.sources: dict[str, SimulatedSource] = {}
        self.clients: list[SimulatedClient] = []
        self._starts: Counter[str] = Counter()
        self._faults_over = math.inf
        self.store = StoreServer(self.network)

    def chance(self, name: str) -> random.Random:
        """A random source that no other part of the simulation draws from."""
        return random.Random(f"{self.plan.seed} {name}")

    def violated(self, what: str) -> None:
        """Records that a rule does not hold."""
        self.outcome.violations.append(what)
        if self.note is not None:
            self.note(f"VIOLATION {what}")

    async def run(self) -> None:
        """Runs the plan from the first process to the last check."""
        plan = self.plan
        for index in range(len(plan.sources)):
            self.start(f"source {index}")
        for index in range(len(plan.verifiers)):
            self.start(f"verifier {index}")
        for index in range(len(plan.ahead_s)):
            self.start(f"orchestrator {index}")
        self.store.checked = lambda memory, appends: check_records(
            plan, self.conversations, memory, appends, self.violated
        )
        await self._reached()
        faults = Faults(self)
        faults_over = (lambda: self._faults_over) if plan.cancels_hold else None
        self.conversations = [
            Conversation(f"s{index}", self._client, turns, faults_over, self.violated)
            for index, (_, turns) in enumerate(plan.conversations)
        ]
        talks = [
            conversation.start(after_s)
            for conversation, (after_s, _) in zip(self.conversations, plan.conversations, strict=True)
        ]
        breaking = asyncio.ensure_future(self._break(faults))
        _, waiting = await asyncio.wait(talks, timeout=MOST_S + plan.asleep_s)
        for talk in waiting:
            self.violated(f"{self.conversations[talks.index(talk)].name}: never ended")
        breaking.cancel()
        await asyncio.wait((breaking,))
        self._heal()
        if not waiting:
            await self._quiet()

    async def _break(self, faults: Faults) -> None:
        """Carries the faults out and records when the last is over, which no plan says."""
        await faults.run()
        self._faults_over = self.loop.now

    async def _reached(self) -> None:
        """Returns once each orchestrator has found a verifier."""
        while True:
            await asyncio.sleep(0.01)
            if all(orchestrator.reaches for orchestrator in self.orchestrators.values()):
                return

    def start(self, name: str) -> None:
        """Starts a process, or its next incarnation."""
        kind, _, number = name.partition(" ")
        self._starts[name] += 1
        chance = self.chance(f"{name} {self._starts[name]}")
        plan, index = self.plan, int(number)
        match kind:
            case "verifier":
                self.verifiers[name] = Verifier(self.network, name, plan.verifiers[index], chance)
            case "orchestrator":
                self.orchestrators[name] = SimulatedOrchestrator(
                    self.network,
                    name,
                    [f"verifier {verifier}" for verifier in range(len(plan.verifiers))],
                    [f"source {source}" for source in range(len(plan.sources))],
                    self.store,
                    chance,
                    plan.ahead_s[index],
                )
            case "source":
                self.sources[name] = SimulatedSource(
                    self.network, name, plan.sources[index], chance, self.outcome.counts
                )

    def _client(self, name: str) -> SimulatedClient:
        session = name.removeprefix("client ").partition("/")[0]
        client = SimulatedClient(
            self.network,
            name,
            session,
            list(self.orchestrators),
            list(self.verifiers),
            self.violated,
            self.outcome.counts,
            MOVED_S if self.plan.moves_on else math.inf,
        )
        self.clients.append(client)
        return client

    def _heal(self) -> None:
        """Ends all bad weather and wakes the frozen processes; dead ones need not come back."""
        self.network.clear()
        for process in self._processes():
            process.wake()

    def _processes(self) -> list[Process]:
        workers: list[Any] = [*self.verifiers.values(), *self.orchestrators.values(), *self.sources.values()]
        return [*(it.process for it in (*workers, *self.clients)), self.store.process]

    async def _quiet(self) -> None:
        """Checks that everything held for requests goes once no request runs."""
        ends = self.loop.now + QUIET_S + self.network.weather.again_s
        while left := self._left():
            if self.loop.now > ends and not self.network.under_way:
                self.violated(f"not let go of: {left}")
                return
            await asyncio.sleep(0.1)

    def _left(self) -> dict[str, dict[str, int]]:
        found = {}
        tables: tuple[dict[str, Any], ...] = (self.verifiers, self.orchestrators)
        for table in tables:
            for name, process in table.items():
                held = {what: count for what, count in process.left().items() if count}
                if held and process.process.alive:
                    found[name] = held
        return found

    async def end(self) -> None:
        """Kills every process and leaves no task on the loop."""
        for process in self._processes():
            process.kill()
        own = asyncio.current_task()
        for _ in range(5):
            others = [task for task in asyncio.all_tasks() if task is not own]
            if not others:
                return
            for task in others:
                task.cancel()
            await asyncio.wait(others, timeout=1.0)


@contextmanager
def _dialling(network: Network) -> Iterator[None]:
    """Gives every dialler a channel of this network inside the block."""

    def dial(address: str, *_: Any, **__: Any) -> Channel:
        return Channel(network, address)

    with ExitStack() as stack:
        for name in DIALS:
            stack.enter_context(patch(name, dial))
        yield


@contextmanager
def _new_accounts() -> Iterator[None]:
    """Gives message streams accounts of loop time that no other simulation draws on, inside the block."""
    with (
        patch.object(message_stream, "NEWCOMERS", message_stream.Newcomers()),
        patch.object(message_stream, "COMMON", message_stream.CommonSavings()),
        patch.object(message_stream, "OVERDRAWN", message_stream.Overdrawn()),
    ):
        yield


def simulate(seed: int, note: Callable[[str], None] | None = None, plan: Plan | None = None) -> Outcome:
    """Simulates one seed from beginning to end; `note` takes the trace's lines, with the virtual time."""
    loop = VirtualLoop()

    def noted(what: str) -> None:
        if note is not None:
            note(f"{loop.now - 100.0:9.4f} {what}")

    world = World(plan or plan_of(seed), loop, None if note is None else noted)
    random.seed(seed)  # the pauses between two dials are drawn from the module's source
    collecting = gc.isenabled()
    gc.disable()
    try:
        with (
            virtual_time(loop),
            _new_accounts(),
            _dialling(world.network),
            logged(world.violated, world.note),
        ):
            try:
                loop.run_until_complete(world.run())
            finally:
                loop.run_until_complete(world.end())
                loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()
        if collecting:
            gc.enable()
    for fault in loop.faults:
        world.violated(f"nobody took an exception: {fault}")
    return world.outcome
