"""Carries out a plan's faults: processes die, freeze and come back, lines are cut, stores forget."""

import asyncio
from typing import TYPE_CHECKING, Any

from benchmarks.simulation.clock import Process
from benchmarks.simulation.plan import Fault

if TYPE_CHECKING:
    from benchmarks.simulation.world import World


class Faults:
    """Carries out the faults of a world's plan."""

    def __init__(self, world: "World") -> None:
        self._world = world

    async def run(self) -> None:
        """Returns once the last fault is over."""
        await asyncio.gather(*(self._carry_out(fault) for fault in self._world.plan.faults))

    async def _carry_out(self, fault: Fault) -> None:
        await asyncio.sleep(fault.at_s)
        self._world.outcome.counts[fault.kind] += 1
        verb, _, kind = fault.kind.partition(" ")
        match verb:
            case "kill" | "stop" | "freeze" if kind != "store":
                await self._process(fault, verb, kind)
            case "freeze":
                await self._freeze(fault, self._world.store.process)
            case "swap":
                await self._swap(fault)
            case "empty":
                self._note("the store is empty")
                self._world.store.empty()
            case "break":
                self._break(fault)
            case "cut":
                await self._cut(fault)
            case "clock":
                every = list(self._world.orchestrators.values())
                hit = every[fault.which % len(every)]
                self._note(f"the clock of {hit.process.name} jumps")
                hit.ahead_s += (fault.which - 2.5) * 100

    async def _process(self, fault: Fault, verb: str, kind: str) -> None:
        table: dict[str, Any] = getattr(self._world, f"{kind}s")
        if not table:
            return
        name = sorted(table)[fault.which % len(table)]
        process: Process = table[name].process
        if not process.alive or process.frozen:
            return
        if verb == "freeze":
            await self._freeze(fault, process)
            return
        self._note(f"{verb} {name}")
        if verb == "stop":
            await asyncio.wait((process.spawn(table[name].stop()),))
        process.kill()
        await asyncio.sleep(fault.seconds)
        if table[name].process.alive:  # another fault killed it while it stopped, and has started it already
            return  # its address cannot be bound twice
        self._note(f"start {name}")
        self._world.start(name)

    async def _swap(self, fault: Fault) -> None:
        """Swaps the weights of all sources, as a drafter that learns does while it follows sessions."""
        for name, source in sorted(self._world.sources.items()):
            self._note(f"{name} swaps its weights for {fault.seconds} s")
            source.swap(fault.seconds)
        await asyncio.sleep(fault.seconds)

    async def _freeze(self, fault: Fault, process: Process) -> None:
        if process.frozen:
            return
        self._note(f"freeze {process.name} for {fault.seconds} s")
        process.freeze()
        network = self._world.network
        for stream in list(network.streams):
            if stream.server is process:
                network.doubt(stream)
        await asyncio.sleep(fault.seconds)
        if process.alive:
            self._note(f"wake {process.name}")
            process.wake()

    def _break(self, fault: Fault) -> None:
        """Ends all streams of one living process; a server may hear late that its client is gone."""
        network, world = self._world.network, self._world
        everybody = [client.process for client in world.clients]
        everybody += [verifier.process for verifier in world.verifiers.values()]
        hit = everybody[fault.which % len(everybody)]
        self._note(f"streams of {hit.name} break")
        for stream in [it for it in network.streams if hit in (it.client, it.server)]:
            stream.break_off("connection reset", fault.seconds)

    async def _cut(self, fault: Fault) -> None:
        """Cuts the line between an orchestrator and a verifier or a client for a while."""
        world = self._world
        others = [*world.verifiers, *(client.process.name for client in world.clients)]
        one = f"orchestrator {fault.which % 2}"
        other = others[fault.which % len(others)]
        self._note(f"{one} and {other} are cut off from each other for {fault.seconds} s")
        world.network.cut(one, other, fault.seconds)
        await asyncio.sleep(fault.seconds)

    def _note(self, what: str) -> None:
        if self._world.note is not None:
            self._world.note(what)
