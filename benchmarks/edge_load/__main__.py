"""Measures what clients' devices save the verifier, and what their idle streams cost the orchestrator.

Run as `outrider bench edge-load --json`. docs/figures/edge_load.md says what each field means.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.edge_load.idle_streams import ARMS, WARM, idle_cost
from benchmarks.edge_load.verifier_work import LoadRun, Request, run_load
from benchmarks.http.front_clients import MeasuredOrchestrator
from benchmarks.shared.envelope import add_pair, command_line, module_command, print_result, settings_of
from benchmarks.shared.heldout import load_prompts
from benchmarks.shared.services import HelperProcess, UpServices

COLD: dict[str, Any] = {"OUTRIDER_VERIFIER__PREFIX_CACHE": "false"}
NEVER_S = 3600.0
"""Seconds until the fake verifier gives an idle stream a token."""


def sessions(text: str) -> list[int]:
    """Numbers of sessions from text such as 1,8,32."""
    return [int(part) for part in text.split(",")]


def work_by_sessions(flags: argparse.Namespace) -> dict[str, Any]:
    """The verifier's work with and without devices; lists have an entry for each number of sessions."""
    prompts = load_prompts(flags.target, 8)
    found: dict[str, Any] = {"without_devices": [], "with_devices": [], "identical": True}
    with UpServices(flags.target, "none", **COLD) as services:
        for count in flags.sessions:
            requests = [
                Request(prompts[seed % len(prompts)], flags.tokens, seed, flags.temperature)
                for seed in range(count)
            ]
            plain, drafted = asyncio.run(_both(services, requests, flags.repeats))
            found["identical"] &= len({run.ids for run in (*plain, *drafted)}) == 1
            found["without_devices"].append(_medians(plain))
            found["with_devices"].append(_medians(drafted))
            print(f"{count} sessions: done", file=sys.stderr)
    return found


async def _both(
    services: UpServices, requests: Sequence[Request], repeats: int
) -> tuple[list[LoadRun], list[LoadRun]]:
    """Runs without and with devices in turn; the first run gives the devices their ids."""
    first = await run_load(services, requests, None)
    golden = [(*request.prompt, *ids) for request, ids in zip(requests, first.ids, strict=True)]
    plain: list[LoadRun] = []
    drafted: list[LoadRun] = []
    for repeat in range(repeats):
        for with_devices in (False, True) if repeat % 2 else (True, False):
            run = await run_load(services, requests, golden if with_devices else None)
            (drafted if with_devices else plain).append(run)
    return plain, drafted


def _medians(runs: Sequence[LoadRun]) -> dict[str, float]:
    return {name: round(median(run.work[name] for run in runs), 3) for name in runs[0].work}


@contextmanager
def fake_services(target: str, streams: int) -> Iterator[MeasuredOrchestrator]:
    """An orchestrator that takes devices, in front of a verifier that lets every session wait."""
    tokenizer = str(Path(target).resolve() / "tokenizer.json")
    command = module_command("http.fake_verifier", tokenizer, str(NEVER_S), "1")
    more = ("--edge-bind", "127.0.0.1:0", "--edge-devices-per-tenant", str(streams + WARM))
    with (
        HelperProcess(command) as verifier,
        MeasuredOrchestrator(verifier.address, streams + WARM, *more) as orchestrator,
    ):
        yield orchestrator


def main() -> None:
    """Runs the benchmark and prints its result."""
    parser = command_line("edge-load", __doc__)
    add_pair(parser)
    parser.add_argument(
        "--sessions", type=sessions, default=sessions("1,8,32"), metavar="N,…", help="default 1,8,32"
    )
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each answer; default 64")
    parser.add_argument("--temperature", type=float, default=0.8, help="default 0.8")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each arm; default 3")
    parser.add_argument("--streams", type=int, default=1000, help="idle streams; default 1000")
    parser.add_argument("--idle-s", type=float, default=15.0, help="seconds of idleness; default 15")
    flags = parser.parse_args()
    started = time.perf_counter()
    fields = {"sessions": flags.sessions, **work_by_sessions(flags), "idle": {"streams": flags.streams}}
    for arm in ARMS:  # a process for each: it does not give memory back
        with fake_services(flags.target, flags.streams) as orchestrator:
            fields["idle"][arm] = asyncio.run(idle_cost(orchestrator, arm, flags.streams, flags.idle_s))
    print_result("edge-load", settings_of(flags, "sessions"), started, fields)


if __name__ == "__main__":
    main()
