"""Compares OpenAI's API over HTTP with gRPC: added latency, cost of idle streams, tokens relayed per core.

Run as `outrider bench http --json`. docs/figures/http.md says what each field means. The verifier behind the
orchestrator has no model, so that no model is measured; only the openai client's scenarios run with a real
one.
"""

import argparse
import asyncio
import importlib.util
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.http.front_clients import MeasuredOrchestrator, TimedStream, front_clients
from benchmarks.shared.envelope import MODELS, command_line, module_command, print_result, settings_of
from benchmarks.shared.figures import median_of_pairs
from benchmarks.shared.services import HelperProcess, UpServices

FRONTS = ("http", "grpc")
STEP_S = 0.005
"""Seconds between two rounds of the fake verifier where added latency is measured."""
ROUND_TOKENS = 2
"""Tokens of a round where added latency is measured."""
FAST_ROUND_TOKENS = 4
"""Tokens of a round where the orchestrator relays as fast as it can: about the README's acceptance length."""


@contextmanager
def fake_services(target: str, every_s: float, tokens: int, streams: int) -> Iterator[MeasuredOrchestrator]:
    """An orchestrator in front of a fake verifier that gives each session `tokens` tokens each `every_s`."""
    tokenizer = str(Path(target).resolve() / "tokenizer.json")
    command = module_command("http.fake_verifier", tokenizer, str(every_s), str(tokens))
    with HelperProcess(command) as verifier, MeasuredOrchestrator(verifier.address, streams) as orchestrator:
        yield orchestrator


async def added_latency(orchestrator: MeasuredOrchestrator, pairs: int, tokens: int) -> dict[str, Any]:
    """Milliseconds to the first token and between events of both fronts, and what HTTP adds to gRPC.

    The fronts take turns, one request at a time.
    """
    timed: dict[str, list[TimedStream]] = {name: [] for name in FRONTS}
    async with front_clients(orchestrator) as fronts:
        for name in FRONTS * 3:
            await fronts[name].stream(tokens)
        for number in range(pairs):
            for name in FRONTS if number % 2 else reversed(FRONTS):
                timed[name].append(await fronts[name].stream(tokens))
    http, grpc = timed["http"], timed["grpc"]
    return {
        "first_token_ms": {name: round(median(t.first_ms for t in timed[name]), 3) for name in FRONTS},
        "event_ms": {name: round(median(t.gap_ms for t in timed[name]), 3) for name in FRONTS},
        "added_first_token_ms": median_of_pairs(
            h.first_ms - g.first_ms for h, g in zip(http, grpc, strict=True)
        ),
        "added_event_ms": median_of_pairs(h.gap_ms - g.gap_ms for h, g in zip(http, grpc, strict=True)),
    }


async def idle_cost(
    orchestrator: MeasuredOrchestrator, name: str, streams: int, seconds: float
) -> dict[str, float]:
    """Memory and processor time of `streams` streams on one front that get a token now and then."""
    async with front_clients(orchestrator) as fronts:
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


async def relay_rates(
    orchestrator: MeasuredOrchestrator, streams: int, tokens: int, repeats: int
) -> dict[str, dict[str, float]]:
    """Tokens that the orchestrator relays per second and per core-second; the fronts take turns."""
    per_core: dict[str, list[float]] = {name: [] for name in FRONTS}
    per_second: dict[str, list[float]] = {name: [] for name in FRONTS}
    async with front_clients(orchestrator) as fronts:
        for repeat in range(repeats):
            for name in FRONTS if repeat % 2 else reversed(FRONTS):
                cpu, began = orchestrator.cpu_s, time.perf_counter()
                timed = await asyncio.gather(*(fronts[name].stream(tokens) for _ in range(streams)))
                tokens_relayed = sum(stream.tokens for stream in timed)
                per_second[name].append(tokens_relayed / (time.perf_counter() - began))
                per_core[name].append(tokens_relayed / (orchestrator.cpu_s - cpu))
    return {
        name: {
            "tokens_per_core_second": round(median(per_core[name])),
            "tokens_per_second": round(median(per_second[name])),
        }
        for name in FRONTS
    }


def count_scenarios(target: str, drafter: str) -> dict[str, Any]:
    """How many scenarios of each client pass with real services; None for a client that is missing."""
    with UpServices(target, drafter) as services:
        return {
            "openai_scenarios": _openai_passed(services.http),
            "anthropic_scenarios": _anthropic_passed(services.http),
        }


def _openai_passed(url: str) -> dict[str, Any] | None:
    if importlib.util.find_spec("openai") is None:
        return None
    import openai

    import benchmarks.http.program_scenarios  # adds its scenarios
    import benchmarks.http.response_scenarios  # noqa: F401  # adds its scenarios, and those with tools
    from benchmarks.http.openai_scenarios import SCENARIOS

    options: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "any", "max_retries": 0}
    return _passed(partial(openai.OpenAI, **options), partial(openai.AsyncOpenAI, **options), SCENARIOS)


def _anthropic_passed(url: str) -> dict[str, Any] | None:
    if None in (importlib.util.find_spec("openai"), importlib.util.find_spec("anthropic")):
        return None
    import anthropic

    from benchmarks.http.message_scenarios import MESSAGE_SCENARIOS

    options: dict[str, Any] = {"base_url": url, "api_key": "any", "max_retries": 0}
    return _passed(
        partial(anthropic.Anthropic, **options),
        partial(anthropic.AsyncAnthropic, **options),
        MESSAGE_SCENARIOS,
    )


def _passed(
    blocking: Callable[[], Any], asynchronous: Callable[[], Any], scenarios: Mapping[str, Any]
) -> dict[str, Any]:
    """How many scenarios pass with the two clients that are made so."""
    from benchmarks.http.openai_scenarios import play, play_async

    async def play_once_async(model: str, name: str) -> None:
        async with asynchronous() as client:
            await play_async(client, model, name, scenarios)

    failed = []
    with blocking() as client:
        model = client.models.list().data[0].id
        for name in scenarios:
            for kind in ("blocking", "asyncio"):
                try:
                    if kind == "blocking":
                        play(client, model, name, scenarios)
                    else:
                        asyncio.run(play_once_async(model, name))
                except Exception as error:
                    failed.append(f"{name}, {kind}: {error!r}"[:300])
    total = 2 * len(scenarios)
    return {"passed": total - len(failed), "of": total, "failed": failed}


def measure(settings: argparse.Namespace) -> dict[str, Any]:
    """All fields of the result except the envelope's."""
    fields: dict[str, Any] = {}
    with fake_services(settings.target, STEP_S, ROUND_TOKENS, 16) as orchestrator:
        fields |= asyncio.run(added_latency(orchestrator, settings.pairs, settings.tokens))
    print("added: done", file=sys.stderr)
    fields["idle"] = {"streams": settings.streams, "an_id_every_s": settings.every_s}
    for name in FRONTS:  # a process for each: it does not give memory back
        with fake_services(settings.target, settings.every_s, 1, settings.streams + 16) as orchestrator:
            fields["idle"][name] = asyncio.run(
                idle_cost(orchestrator, name, settings.streams, settings.idle_s)
            )
    print("idle: done", file=sys.stderr)
    with fake_services(settings.target, 0.0, FAST_ROUND_TOKENS, 64) as orchestrator:
        fields["relayed"] = {
            "ids_of_a_round": FAST_ROUND_TOKENS,
            "streams": settings.relayed_streams,
        } | asyncio.run(
            relay_rates(orchestrator, settings.relayed_streams, settings.relayed_tokens, settings.repeats)
        )
    print("relayed: done", file=sys.stderr)
    asked = settings.drafter != ""
    scenarios = count_scenarios(settings.target, settings.drafter) if asked else {"openai_scenarios": None}
    return fields | scenarios


def parse() -> argparse.Namespace:
    """Parses the flags; the figures in docs/http.md have the default flags."""
    parser = command_line("http", __doc__)
    parser.add_argument("--target", default=str(MODELS / "target"), help="folder of the target model")
    parser.add_argument(
        "--drafter",
        default=str(MODELS / "drafter"),
        help="folder of the drafter for the openai scenarios; empty: skip the scenarios",
    )
    parser.add_argument("--pairs", type=int, default=100, help="timed requests over each front")
    parser.add_argument("--tokens", type=int, default=60, help="tokens of each timed request")
    parser.add_argument("--streams", type=int, default=1000, help="streams that wait at once")
    parser.add_argument(
        "--every-s", type=float, default=5.0, help="seconds between two tokens of a waiting stream"
    )
    parser.add_argument(
        "--idle-s", type=float, default=20.0, help="seconds during which the waiting streams are measured"
    )
    parser.add_argument(
        "--relayed-streams",
        type=int,
        default=32,
        help="streams that are relayed at once, as fast as possible",
    )
    parser.add_argument("--relayed-tokens", type=int, default=2000, help="tokens of each relayed stream")
    parser.add_argument("--repeats", type=int, default=4, help="batches of relayed streams over each front")
    return parser.parse_args()


def main() -> None:
    """Starts the services, measures and prints the result."""
    settings = parse()
    started = time.perf_counter()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    fields = measure(settings)
    print_result("http", settings_of(settings), started, fields)


if __name__ == "__main__":
    main()
