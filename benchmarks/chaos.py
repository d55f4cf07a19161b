"""Everything is killed, frozen, slowed and restarted by a seeded plan, while streams with known output run.

Run as `outrider bench chaos --seconds N --seed S --json`. docs/figures.md says what each field means.
"""

import argparse
import asyncio
import contextlib
import signal
import sys
import time
from typing import Any

from chaos_figures import Done, summary
from chaos_fleet import ROLES, Fleet
from chaos_plan import Fault, Schedule, draw_faults
from chaos_streams import Riders, Talk, golden_talk, scripts
from envelope import REPOSITORY, print_result
from offline import load_prompts

from outrider.client import AsyncClient
from outrider.runtime.children import ServiceFailed

LOOK_EVERY_S = 0.3
INTERRUPTED = 130


async def carry_out(fleet: Fleet, faults: list[Fault], riders: Riders, seconds: float) -> list[Done]:
    """The faults that could be carried out in this time, each to its end."""
    schedule, done = Schedule(faults), list[Done]()
    async with asyncio.TaskGroup() as harming:
        while riders.now() < seconds:
            while fault := schedule.due(riders.now(), await fleet.ready()):
                print(f"{riders.now():7.1f} s: {fault.harm} {fault.process}", file=sys.stderr)
                harming.create_task(_harm(fleet, fault, riders, done))
                await asyncio.sleep(0)  # it is harmed before the next is looked for
            await asyncio.sleep(LOOK_EVERY_S)
    return sorted(done, key=lambda one: one.began_s)


async def _harm(fleet: Fleet, fault: Fault, riders: Riders, done: list[Done]) -> None:
    began_s = riders.now()
    await fleet.harm(fault)
    done.append(Done(fault, began_s, riders.now()))


async def golden(fleet: Fleet, settings: argparse.Namespace) -> list[Talk]:
    """What each stream has to give, all at once while nobody is harmed."""
    prompts = load_prompts(settings.target, settings.streams)
    asked = scripts([ids[: settings.prompt] for ids in prompts], settings.streams, settings.tokens)
    async with AsyncClient(fleet.addresses("orchestrator")) as client:
        return await asyncio.gather(*(golden_talk(client, script, settings.repeats) for script in asked))


async def measure(fleet: Fleet, settings: argparse.Namespace) -> dict[str, Any]:
    """Start, ask for the golden output, harm, and compare."""
    await fleet.start()
    talks = await golden(fleet, settings)
    print(f"golden output of {len(talks)} streams is known; {settings.seconds:g} s begin", file=sys.stderr)
    riders = Riders(fleet.addresses("orchestrator"), talks)
    faults = draw_faults(settings.seed, settings.seconds, settings.every, ROLES)
    try:
        riders.start()
        done = await carry_out(fleet, faults, riders, settings.seconds)
        await riders.finish()
        return summary(riders.tracks, riders.golden(), done) | {"harmed_s": round(riders.now(), 1)}
    finally:
        await riders.close()


async def run(settings: argparse.Namespace) -> dict[str, Any] | None:
    """The fields, or None where a signal came first. Nothing that was started is left in either case."""
    fleet = Fleet(
        settings.target,
        settings.drafter,
        log_level=settings.log_level,
        deterministic=settings.deterministic == "on",
    )
    work = asyncio.create_task(measure(fleet, settings))
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, work.cancel)
    try:
        with contextlib.suppress(asyncio.CancelledError):
            return await work
        return None
    finally:
        fleet.close()


def is_well(fields: dict[str, Any], streams: int) -> bool:
    """Whether every stream gave its golden output, once, under fire."""
    whole = fields["identical"] == fields["streams"] >= streams
    return whole and fields["faults"] > 0 and not fields["duplicates"] and not fields["gaps"]


def parse() -> argparse.Namespace:
    """Flags; the defaults are the figures of the docs."""
    parser = argparse.ArgumentParser(prog="outrider bench chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="of faults; start and end come on top")
    parser.add_argument("--seed", type=int, default=1, help="of the plan")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two faults, on average")
    parser.add_argument("--streams", type=int, default=16, help="at a time")
    parser.add_argument("--tokens", type=int, default=160, help="of each choice of each stream")
    parser.add_argument("--prompt", type=int, default=200, help="the most ids of a first prompt")
    parser.add_argument("--repeats", type=int, default=1, help="of the golden output, which must not differ")
    parser.add_argument("--target", default=str(REPOSITORY / "models" / "target"))
    parser.add_argument("--drafter", default=str(REPOSITORY / "models" / "drafter"))
    parser.add_argument("--deterministic", choices=("on", "off"), default="on", help="profile of verifiers")
    parser.add_argument("--log-level", default="error", help="of the services")
    parser.add_argument("--check", action="store_true", help="exit with 1 unless all streams are identical")
    parser.add_argument("--json", action="store_true", help="accepted for symmetry")
    return parser.parse_args()


def main() -> None:
    """Start everything, harm it, print."""
    settings = parse()
    started = time.perf_counter()
    try:
        fields = asyncio.run(run(settings))
    except* (ServiceFailed, RuntimeError, TimeoutError) as failed:
        raise SystemExit(f"chaos: {'; '.join(map(repr, failed.exceptions))}") from failed
    if fields is None:
        raise SystemExit(INTERRUPTED)
    shown = {key: value for key, value in vars(settings).items() if key not in ("json", "check")}
    print_result("chaos", shown, started, fields | {"processes": ROLES})
    if settings.check and not is_well(fields, settings.streams):
        raise SystemExit("chaos: not every stream gave its golden output once; see differences and errors")


if __name__ == "__main__":
    main()
