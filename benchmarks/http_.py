"""OpenAI's API over HTTP beside gRPC: what it adds, what idle streams cost, how much a core relays.

Run as `outrider bench http --json`. docs/figures.md says what each field means. A verifier without a model
stands behind the orchestrator, so that no model is measured; the openai client's scenarios have a real one.
"""

import argparse
import asyncio
import importlib.util
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from envelope import REPOSITORY, print_result
from figures import median_interval
from fronts import Orchestrator, Timed, both
from stack import Helper, Stack

FRONTS = ("http", "grpc")
STEP_S = 0.005
"""Of the fake verifier where the added time is measured."""
ROUND_IDS = 2
FAST_IDS = 4
"""Ids of a round where as many are relayed as there can be: about the README's acceptance length."""


@contextmanager
def services(target: str, every_s: float, ids: int, streams: int) -> Iterator[Orchestrator]:
    """An orchestrator in front of a verifier that gives each session so many ids each so often."""
    script = Path(__file__).parent / "fake_verifier.py"
    command = [sys.executable, str(script), str(Path(target) / "tokenizer.json"), str(every_s), str(ids)]
    with Helper(command) as verifier, Orchestrator(verifier.address, streams) as orchestrator:
        yield orchestrator


def difference(pairs: Sequence[tuple[float, float]]) -> dict[str, float | int]:
    """Median of first less second, with its 95 % interval."""
    found = sorted(first - second for first, second in pairs)
    low, high = median_interval(len(found))
    return {
        "median": round(median(found), 3),
        "low": round(found[low], 3),
        "high": round(found[high], 3),
        "pairs": len(found),
    }


async def added(orchestrator: Orchestrator, pairs: int, tokens: int) -> dict[str, Any]:
    """Both doors by turns, one request at a time."""
    timed: dict[str, list[Timed]] = {name: [] for name in FRONTS}
    async with both(orchestrator) as fronts:
        for name in FRONTS * 3:
            await fronts[name].stream(tokens)
        for number in range(pairs):
            for name in FRONTS if number % 2 else reversed(FRONTS):
                timed[name].append(await fronts[name].stream(tokens))
    http, grpc = timed["http"], timed["grpc"]
    return {
        "first_token_ms": {name: round(median(t.first_ms for t in timed[name]), 3) for name in FRONTS},
        "event_ms": {name: round(median(t.gap_ms for t in timed[name]), 3) for name in FRONTS},
        "added_first_token_ms": difference(
            [(h.first_ms, g.first_ms) for h, g in zip(http, grpc, strict=True)]
        ),
        "added_event_ms": difference([(h.gap_ms, g.gap_ms) for h, g in zip(http, grpc, strict=True)]),
    }


async def idle(orchestrator: Orchestrator, name: str, streams: int, seconds: float) -> dict[str, float]:
    """So many streams that wait, each of which is given an id now and then."""
    async with both(orchestrator) as fronts:
        await fronts[name].stream(1)
        before, began = orchestrator.resident_mb, time.perf_counter()
        opened = asyncio.Semaphore(0)
        held = [asyncio.create_task(fronts[name].held(1 << 16, opened)) for _ in range(streams)]
        for _ in held:
            await opened.acquire()
        opening = time.perf_counter() - began
        cpu, began = orchestrator.cpu_s, time.perf_counter()
        await asyncio.sleep(seconds)
        used = (orchestrator.cpu_s - cpu) / (time.perf_counter() - began)
        grown = orchestrator.resident_mb - before
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)
    return {
        "resident_mb_before": round(before, 1),
        "grown_mb": round(grown, 1),
        "kb_per_stream": round(grown * 1024 / streams, 1),
        "core_share": round(used, 4),
        "opening_s": round(opening, 2),
    }


async def relayed(
    orchestrator: Orchestrator, streams: int, tokens: int, repeats: int
) -> dict[str, dict[str, float]]:
    """As many ids as the orchestrator passes on, by turns over each door."""
    per_core: dict[str, list[float]] = {name: [] for name in FRONTS}
    per_second: dict[str, list[float]] = {name: [] for name in FRONTS}
    async with both(orchestrator) as fronts:
        for repeat in range(repeats):
            for name in FRONTS if repeat % 2 else reversed(FRONTS):
                cpu, began = orchestrator.cpu_s, time.perf_counter()
                timed = await asyncio.gather(*(fronts[name].stream(tokens) for _ in range(streams)))
                ids = sum(one.ids for one in timed)
                per_second[name].append(ids / (time.perf_counter() - began))
                per_core[name].append(ids / (orchestrator.cpu_s - cpu))
    return {
        name: {
            "tokens_per_core_second": round(median(per_core[name])),
            "tokens_per_second": round(median(per_second[name])),
        }
        for name in FRONTS
    }


def openai_scenarios(target: str, drafter: str) -> dict[str, Any] | None:
    """How many of the tests' scenarios pass in front of real services; None without the client."""
    if importlib.util.find_spec("openai") is None:
        return None
    import openai
    from openai_scenarios import SCENARIOS, play, play_async

    async def awaited(url: str, model: str, name: str) -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:
            await play_async(client, model, name)

    failed = []
    with Stack(target, drafter) as stack:
        url = f"{stack.http}/v1"
        with openai.OpenAI(base_url=url, api_key="any", max_retries=0) as client:
            model = client.models.list().data[0].id
            for name in SCENARIOS:
                for kind in ("blocking", "asyncio"):
                    try:
                        if kind == "blocking":
                            play(client, model, name)
                        else:
                            asyncio.run(awaited(url, model, name))
                    except Exception as error:
                        failed.append(f"{name}, {kind}: {error!r}"[:300])
    of = 2 * len(SCENARIOS)
    return {"passed": of - len(failed), "of": of, "failed": failed}


def measure(settings: argparse.Namespace) -> dict[str, Any]:
    """All fields of the result but the envelope."""
    fields: dict[str, Any] = {}
    with services(settings.target, STEP_S, ROUND_IDS, 16) as orchestrator:
        fields |= asyncio.run(added(orchestrator, settings.pairs, settings.tokens))
    print("added: done", file=sys.stderr)
    fields["idle"] = {"streams": settings.streams, "an_id_every_s": settings.every_s}
    for name in FRONTS:  # a process each: memory that was taken is not given back
        with services(settings.target, settings.every_s, 1, settings.streams + 16) as orchestrator:
            fields["idle"][name] = asyncio.run(idle(orchestrator, name, settings.streams, settings.idle_s))
    print("idle: done", file=sys.stderr)
    with services(settings.target, 0.0, FAST_IDS, 64) as orchestrator:
        fields["relayed"] = {"ids_of_a_round": FAST_IDS, "streams": settings.relayed_streams} | asyncio.run(
            relayed(orchestrator, settings.relayed_streams, settings.relayed_tokens, settings.repeats)
        )
    print("relayed: done", file=sys.stderr)
    fields["openai_scenarios"] = (
        None if settings.drafter == "" else openai_scenarios(settings.target, settings.drafter)
    )
    return fields


def parse() -> argparse.Namespace:
    """Flags; the defaults are the figures of docs/http.md."""
    parser = argparse.ArgumentParser(prog="outrider bench http", description=__doc__)
    parser.add_argument("--target", default=str(REPOSITORY / "models" / "target"))
    parser.add_argument(
        "--drafter", default=str(REPOSITORY / "models" / "drafter"), help="empty: no openai scenarios"
    )
    parser.add_argument("--pairs", type=int, default=100, help="requests over each front, by turns")
    parser.add_argument("--tokens", type=int, default=60, help="of each of them")
    parser.add_argument("--streams", type=int, default=1000, help="that wait")
    parser.add_argument("--every-s", type=float, default=5.0, help="how often one of them is given an id")
    parser.add_argument("--idle-s", type=float, default=20.0, help="how long they are watched")
    parser.add_argument("--relayed-streams", type=int, default=32, help="at once, as fast as it goes")
    parser.add_argument("--relayed-tokens", type=int, default=2000, help="of each of them")
    parser.add_argument("--repeats", type=int, default=4, help="of those, over each front")
    parser.add_argument("--json", action="store_true", help="accepted for symmetry")
    return parser.parse_args()


def main() -> None:
    """Start everything, measure, print."""
    settings = parse()
    started = time.perf_counter()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    fields = measure(settings)
    shown = {key: value for key, value in vars(settings).items() if key != "json"}
    print_result("http", shown, started, fields)


if __name__ == "__main__":
    main()
