"""Sends every class of hostile input to real services, beside a canary tenant's streams that must not notice.

Run as `outrider bench hostile --json`. docs/figures/hostile.md says what each field means.
"""

import argparse
import asyncio
import json
import os
import re
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.hostile import grpc_inputs, http_bodies, http_connections, worker_inputs
from benchmarks.hostile.attack import attack
from benchmarks.hostile.attacked_services import AttackedServices, Ports, until_calm, until_served
from benchmarks.hostile.figures import (
    Message,
    Window,
    beyond_usual,
    longest_stall,
    longest_waits,
    summed_up,
)
from benchmarks.hostile.inputs import HELD, HostileClass
from benchmarks.hostile.lying_source import LyingSources
from benchmarks.shared.envelope import add_pair, command_line, module_command, print_result, settings_of
from benchmarks.shared.services import HelperProcess

HONEST = 3
"""Least number of sources that do not lie: lookup, the drafter, past outputs."""
SETTLE_S = 120.0
"""Seconds after a class until a canary or a process that says nothing counts as hung."""
LEAST_PRIORITY = 19
CONTROL_S = 10.0
"""Seconds in which the class of no input sends nothing: as long as most classes take."""


async def _nothing(ports: Ports) -> str:
    await asyncio.sleep(CONTROL_S)
    return HELD


CONTROL = HostileClass("no input", lambda: [_nothing])
"""What the canary's waits do by themselves: a longer time has a longer longest wait."""
ALL = [CONTROL, *http_bodies.CLASSES, *http_connections.CLASSES, *grpc_inputs.CLASSES, *worker_inputs.CLASSES]


class CanaryLines:
    """The canary's process; a thread reads its lines."""

    def __init__(self, services: AttackedServices, target: str) -> None:
        ports = services.ports
        arguments = (ports.addresses["orchestrator"], ports.http, services.keys["canary"], target)
        self.process = HelperProcess(module_command("hostile.canary", *arguments))
        self.messages: list[Message] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the process."""
        self.process.__exit__(None, None, None)

    def wrong(self, began: float) -> list[str]:
        """What was wrong since a time."""
        return [f"{m.front}: {m.what}" for m in list(self.messages) if m.kind == "wrong" and m.at >= began]

    async def heard_since(self, moment: float) -> bool:
        """Waits until each front has had a message after a time; False where this takes too long."""
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline:
            recent = [m for m in self.messages[-500:] if m.kind != "wrong" and m.at - m.seconds >= moment]
            if {m.front for m in recent} == {"grpc", "http"}:
                return True
            await asyncio.sleep(0.05)
        return False

    def _read(self) -> None:
        assert self.process.process.stdout is not None
        for line in self.process.process.stdout:
            self.messages.append(Message.of_line(json.loads(line)))


class HostileRun:
    """Sends classes to running services and measures each."""

    def __init__(self, services: AttackedServices, canary: CanaryLines, settings: argparse.Namespace) -> None:
        self._services = services
        self._canary = canary
        self._quiet_s: float = settings.quiet_s
        self._at_once: int = settings.at_once

    async def measure(self, hostile: HostileClass, repeats: int) -> list[dict[str, Any]]:
        """Figures of each repeat of a class; a quiet time lies before and behind every repeat."""
        quiet = await self._quiet()
        figures = []
        for _ in range(repeats):
            one, attacked = await self._attacked(hostile)
            usual, quiet = quiet, await self._quiet()
            usual = {name: max(usual.get(name, 0.0), quiet.get(name, 0.0)) for name in usual.keys() | quiet}
            one |= beyond_usual(attacked, usual)
            one["usual_gap_ms"] = round(1000 * max(usual.values(), default=0.0), 1)
            figures.append(one)
        return figures

    async def _quiet(self) -> dict[str, float]:
        """The canary's longest waits in a time without inputs, by front and kind."""
        began = time.monotonic()
        await asyncio.sleep(self._quiet_s)
        return longest_waits(list(self._canary.messages), began, time.monotonic(), whole=True)

    async def _attacked(self, hostile: HostileClass) -> tuple[dict[str, Any], dict[str, float]]:
        """Figures of one repeat, and the canary's longest waits meanwhile, by front and kind."""
        inputs = await asyncio.to_thread(hostile.make)
        before, tracebacks = self._services.resident_bytes(), self._services.tracebacks()
        began, wall_began = time.monotonic(), time.time()
        at_once = hostile.at_once or self._at_once
        outcomes = await attack(self._services.ports, inputs, at_once)
        ended = time.monotonic()
        calm = await until_calm(self._services, SETTLE_S)
        heard = await self._canary.heard_since(ended)
        window = Window(began, ended, wall_began, time.time())
        if gone := self._services.ended():
            raise SystemExit(f"hostile: {', '.join(gone)} ended at {hostile.name}")
        attacked = longest_waits(list(self._canary.messages), began, ended, whole=False)
        wrong = self._canary.wrong(began)
        stalls = await asyncio.to_thread(self._services.stalls)
        figures = {
            **longest_stall(stalls, window),
            "inputs": len(inputs),
            "statuses": dict(outcomes.statuses),
            "faults": [*outcomes.faults, *wrong[:5]],
            "wrong": len(wrong),
            "hung": outcomes.hung + (not heard) + (not calm),
            "tracebacks": self._services.tracebacks() - tracebacks,
            "seconds": ended - began,
        }
        return figures | {"leaked_bytes": self._services.resident_bytes() - before}, attacked


async def run(settings: argparse.Namespace) -> dict[str, Any]:
    """All fields of the result except the envelope's."""
    liars = LyingSources(settings.target)
    sent = chosen([*ALL, *liars.classes], settings.classes)
    addresses = await liars.start()
    try:
        with AttackedServices(settings.target, settings.drafter, addresses) as services:
            await until_served(services, HONEST + len(addresses))
            canary = await asyncio.to_thread(CanaryLines, services, settings.target)
            give_way()
            try:
                return await measure_all(HostileRun(services, canary, settings), sent, settings.repeats)
            finally:
                canary.close()
    finally:
        await liars.stop()


def give_way() -> None:
    """Lets every other process have the cores first: an attacker has cores of its own."""
    for thread in Path("/proc/self/task").iterdir():  # on Linux each thread has its own
        os.setpriority(os.PRIO_PROCESS, int(thread.name), LEAST_PRIORITY)


async def measure_all(hostile_run: HostileRun, sent: Sequence[HostileClass], repeats: int) -> dict[str, Any]:
    """Figures of all classes, and their totals; prints each class's figures on standard error."""
    classes = {}
    for hostile in sent:
        classes[hostile.name] = summed_up(await hostile_run.measure(hostile, repeats))
        print(f"{hostile.name}: {json.dumps(classes[hostile.name])}", file=sys.stderr)
    return summary(classes)


def chosen(classes: Sequence[HostileClass], pattern: str) -> list[HostileClass]:
    """The classes whose names a regular expression finds. Raises SystemExit where it finds none."""
    found = [hostile for hostile in classes if re.search(pattern, hostile.name)]
    if not found:
        names = ", ".join(hostile.name for hostile in classes)
        raise SystemExit(f"hostile: no class is named like {pattern!r}; there are: {names}")
    return found


def summary(classes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Totals over all classes, and the classes."""
    totals: dict[str, Any] = {
        name: sum(figures[name] for figures in classes.values())
        for name in ("inputs", "wrong", "hung", "tracebacks", "leaked_bytes")
    }
    worst = {
        name: max(figures[name] for figures in classes.values())
        for name in ("longest_stall_ms", "longest_gap_ms")
    }
    return totals | worst | {"classes": classes}


def parse() -> argparse.Namespace:
    """Parses the flags; the figures in the docs have the default flags."""
    parser = command_line("hostile", __doc__)
    add_pair(parser)
    parser.add_argument(
        "--classes", default="", help="regular expression of the classes' names; default: all"
    )
    parser.add_argument("--repeats", type=int, default=3, help="times to send each class")
    parser.add_argument("--at-once", type=int, default=4, help="inputs at a time")
    parser.add_argument(
        "--quiet-s", type=float, default=2.0, help="seconds without inputs around each repeat"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="exit with 1 where an id is wrong, an input hangs or a status is a fault",
    )
    return parser.parse_args()


def main() -> None:
    """Runs the benchmark and prints the result."""
    settings = parse()
    started = time.perf_counter()
    fields = asyncio.run(run(settings))
    print_result("hostile", settings_of(settings, "check"), started, fields)
    faults = [fault for figures in fields["classes"].values() for fault in figures["faults"]]
    if settings.check and (faults or fields["wrong"] or fields["hung"] or fields["tracebacks"]):
        raise SystemExit(
            "hostile: a client could tell; see wrong, hung, tracebacks and faults of the classes"
        )


if __name__ == "__main__":
    main()
