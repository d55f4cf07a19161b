"""Rolls a fleet from the previous release to this checkout and back, while streams with known output run.

Run as `outrider bench upgrade --previous REVISION --json`. docs/figures/upgrade.md says what each field
means.
"""

import argparse
import asyncio
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.chaos.fault_plan import Harm, ProcessFault
from benchmarks.chaos.fleet_processes import ROLES, ChaosFleet
from benchmarks.chaos.harmed_run import add_stream_flags, all_streams_whole, failures_said, run_fleet
from benchmarks.chaos.stream_figures import CompletedFault, summary
from benchmarks.chaos.traffic import RepeatedStreams, decode_all_golden, scripts
from benchmarks.shared.envelope import command_line, print_result, settings_of
from benchmarks.shared.heldout import load_prompts
from benchmarks.upgrade.checkout import code_of, revision_of
from benchmarks.upgrade.rolling_plan import ORDERS, Release, Roll, pairs_beside, plan_rolls
from outrider.runtime.children import ROOT


async def carry_out(
    fleet: ChaosFleet, rolls: list[Roll], code: dict[Release, Path], streams: RepeatedStreams, beside_s: float
) -> list[CompletedFault]:
    """Carries the rolls out one by one, `beside_s` seconds apart, and returns them as restarts."""
    done = []
    for roll in rolls:
        await asyncio.sleep(beside_s)
        began_s = streams.now()
        print(f"{began_s:7.1f} s: {roll}", file=sys.stderr)
        await fleet.roll(roll.process, code[roll.to])
        restart = ProcessFault(began_s, roll.process, Harm.RESTART, 0.0)
        done.append(CompletedFault(restart, began_s, streams.now()))
    await asyncio.sleep(beside_s)
    return done


async def measure(
    fleet: ChaosFleet, previous: Path, rolls: list[Roll], settings: argparse.Namespace
) -> dict[str, Any]:
    """Starts the previous release, decodes the golden output, rolls every process, and compares."""
    await fleet.start()
    prompts = [ids[: settings.prompt] for ids in load_prompts(settings.target, settings.streams)]
    requested = scripts(prompts, settings.streams, settings.tokens, devices=False)
    conversations = await decode_all_golden(fleet.addresses("orchestrator"), requested, repeats=1)
    print(
        f"golden output of {len(conversations)} streams is known; {len(rolls)} rolls begin", file=sys.stderr
    )
    streams = RepeatedStreams(fleet.addresses("orchestrator"), conversations)
    try:
        streams.start()
        code = {Release.PREVIOUS: previous, Release.PRESENT: ROOT}
        done = await carry_out(fleet, rolls, code, streams, settings.beside)
        await streams.finish()
        fields = summary(streams.records, streams.golden(), done)
        return {"rolls": fields.pop("faults"), "by_roll": _by_role(fields.pop("by_fault"))} | fields
    finally:
        await streams.close()


def fleet_of(previous: Path, settings: argparse.Namespace) -> ChaosFleet:
    """The fleet on the previous release."""
    return ChaosFleet(
        settings.target,
        settings.drafter,
        log_level=settings.log_level,
        deterministic=True,
        code=previous,
        devices=False,
    )


def parse() -> argparse.Namespace:
    """Parses the flags; the figures in the docs have the default flags."""
    parser = command_line("upgrade", __doc__)
    parser.add_argument("--previous", required=True, help="the previous release: folder or git revision")
    parser.add_argument(
        "--orders",
        nargs="+",
        choices=sorted(ORDERS),
        default=list(ORDERS),
        help="orders of the roles on the way to this checkout; the way back is the reverse",
    )
    parser.add_argument(
        "--beside", type=float, default=3.0, help="seconds for which every mix of releases serves"
    )
    add_stream_flags(parser)
    return parser.parse_args()


def main() -> None:
    """Runs the benchmark and prints the result."""
    settings = parse()
    started = time.perf_counter()
    rolls = plan_rolls(settings.orders, ROLES)
    with failures_said("upgrade"), code_of(settings.previous) as previous:
        revision = revision_of(previous)
        fields = run_fleet(
            lambda: fleet_of(previous, settings), lambda fleet: measure(fleet, previous, rolls, settings)
        )
    more = {"previous": revision, "pairs_beside": len(pairs_beside(rolls)), "processes": ROLES}
    print_result("upgrade", settings_of(settings, "check"), started, more | fields)
    has_rolled = fields["rolls"] == len(rolls)
    if settings.check and not (has_rolled and all_streams_whole(fields, settings.streams)):
        raise SystemExit("upgrade: not every stream gave its golden output once; see differences and errors")


def _by_role(by_fault: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Pauses by role; every roll is a restart."""
    return {role: of_role[Harm.RESTART.value] for role, of_role in by_fault.items()}


if __name__ == "__main__":
    main()
