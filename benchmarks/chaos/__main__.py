"""Kills, freezes, slows and restarts every process by a seeded plan while streams with known output run.

Run as `outrider bench chaos --seconds N --seed S --json`. docs/figures/chaos.md says what each field means.
"""

import argparse
import asyncio
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.chaos.device import DeviceFault
from benchmarks.chaos.fault_plan import ProcessFault, Schedule, draw_faults
from benchmarks.chaos.fleet_processes import ROLES, ChaosFleet
from benchmarks.chaos.harmed_run import add_stream_flags, all_streams_whole, failures_said, run_fleet
from benchmarks.chaos.stream_figures import CompletedFault, summary
from benchmarks.chaos.traffic import RepeatedStreams, decode_all_golden, scripts
from benchmarks.shared.envelope import command_line, print_result, settings_of
from benchmarks.shared.heldout import load_prompts
from benchmarks.upgrade.checkout import code_of, revision_of

CHECK_EVERY_S = 0.3
"""Seconds between two checks for faults that are due."""


async def carry_out(
    fleet: ChaosFleet, faults: list[ProcessFault], streams: RepeatedStreams, seconds: float
) -> list[CompletedFault]:
    """Carries out the faults that are allowed within `seconds`, each to its end, and returns them."""
    schedule, done = Schedule(faults), list[CompletedFault]()
    async with asyncio.TaskGroup() as harms:
        while streams.now() < seconds:
            while fault := schedule.due(streams.now(), await fleet.ready()):
                print(f"{streams.now():7.1f} s: {fault.harm} {fault.process}", file=sys.stderr)
                harms.create_task(_harm(fleet, fault, streams, done))
                await asyncio.sleep(0)  # let the harm begin before the next fault is taken
            await asyncio.sleep(CHECK_EVERY_S)
    return sorted(done, key=lambda completed: completed.began_s)


async def _harm(
    fleet: ChaosFleet, fault: ProcessFault, streams: RepeatedStreams, done: list[CompletedFault]
) -> None:
    began_s = streams.now()
    await fleet.harm(fault)
    done.append(CompletedFault(fault, began_s, streams.now()))


async def measure(fleet: ChaosFleet, settings: argparse.Namespace) -> dict[str, Any]:
    """Starts the fleet, decodes the golden output, carries the faults out, and compares."""
    await fleet.start()
    prompts = [ids[: settings.prompt] for ids in load_prompts(settings.target, settings.streams)]
    requested = scripts(prompts, settings.streams, settings.tokens)
    conversations = await decode_all_golden(fleet.addresses("orchestrator"), requested, settings.repeats)
    print(
        f"golden output of {len(conversations)} streams is known; {settings.seconds:g} s begin",
        file=sys.stderr,
    )
    streams = RepeatedStreams(fleet.addresses("orchestrator"), conversations)
    faults = draw_faults(settings.seed, settings.seconds, settings.every, ROLES)
    try:
        streams.start()
        done = await carry_out(fleet, faults, streams, settings.seconds)
        await streams.finish()
        found = summary(streams.records, streams.golden(), done)
        faults_of_devices = {str(fault): streams.device_faults[fault] for fault in tuple(DeviceFault)[1:]}
        return found | {
            "harmed_s": round(streams.now(), 1),
            "rolled": fleet.rolled,
            "learnt": fleet.learnt(),
            "device_faults": faults_of_devices,
        }
    finally:
        await streams.close()


def fleet_of(settings: argparse.Namespace, previous: Path | None) -> ChaosFleet:
    """The fleet that is harmed."""
    return ChaosFleet(
        settings.target,
        settings.drafter,
        log_level=settings.log_level,
        deterministic=settings.deterministic == "on",
        heads=settings.heads,
        learns=settings.learn,
        previous=previous,
    )


def parse() -> argparse.Namespace:
    """Parses the flags; the figures in the docs have the default flags."""
    parser = command_line("chaos", __doc__, is_curve=True)
    parser.add_argument(
        "--seconds", type=float, default=600.0, help="seconds of faults, without start and end"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the plan of faults")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two faults, on average")
    parser.add_argument(
        "--repeats", type=int, default=1, help="times to decode the golden output; all have to agree"
    )
    parser.add_argument(
        "--deterministic", choices=("on", "off"), default="on", help="deterministic profile of the verifiers"
    )
    parser.add_argument("--heads", default="", help="heads of the verifiers: folders or ids; default: none")
    parser.add_argument(
        "--learn", action="store_true", help="have the drafters learn from the streams, in short lessons"
    )
    parser.add_argument(
        "--previous",
        default="",
        help="another release, a folder or git revision: each restart moves a service there or back",
    )
    add_stream_flags(parser)
    return parser.parse_args()


def main() -> None:
    """Runs the benchmark and prints the result."""
    settings = parse()
    started = time.perf_counter()
    with failures_said("chaos"), ExitStack() as held:
        previous = held.enter_context(code_of(settings.previous)) if settings.previous else None
        fields = run_fleet(lambda: fleet_of(settings, previous), lambda fleet: measure(fleet, settings))
        fields["previous"] = None if previous is None else revision_of(previous)
    print_result(
        "chaos", settings_of(settings, "check"), started, fields | {"processes": ROLES}, settings.plot
    )
    if settings.check and not (fields["faults"] and all_streams_whole(fields, settings.streams)):
        raise SystemExit("chaos: not every stream gave its golden output once; see differences and errors")


if __name__ == "__main__":
    main()
