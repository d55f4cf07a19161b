"""What the event loop costs the engine through the interpreter lock: the same load with and without the loop.

`bare` is the engine's thread alone in its process, whose reports nobody reads. `service` is the whole
verifier behind an orchestrator, with a client that reads every token. Both decode plainly.
"""

import asyncio
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.shared.services import UpServices
from benchmarks.step.drafted_sessions import session_of
from benchmarks.vocabulary.arms import prompt
from outrider.client import AsyncClient
from outrider.lm.runner import PackedLM
from speculative.params import SamplingParams
from verifier_service.engine.messages import Open, StepReport
from verifier_service.engine.stats import Samples
from verifier_service.engine.step import EngineLimits
from verifier_service.engine.thread import EngineThread

SERVICE_SETTINGS: dict[str, Any] = {
    "OUTRIDER_VERIFIER__PREFIX_CACHE": "false",
    "OUTRIDER_VERIFIER__KV_MB": "256",
}
STEP = "outrider_verifier_step_seconds"
SPLIT = "outrider_verifier_step_split_seconds"
LIMITS = EngineLimits(reuse_prefixes=False)
STOP_S = 5.0
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
Times = dict[str, float]
"""Mean milliseconds of a step's forward, of the time between two forwards, and tokens per second."""


def loop_cost(
    target: PackedLM, folder: Path, counts: Sequence[int], tokens: int, repeats: int, passes: str
) -> dict[str, Any]:
    """Both arms in turn by number of sessions: the fastest run of each, and what the service adds."""
    found: dict[str, dict[str, list[Times]]] = {str(count): {"bare": [], "service": []} for count in counts}
    with UpServices(str(folder), "none", passes=passes, **SERVICE_SETTINGS) as services:
        asyncio.run(_serve(services, 2, 4))  # untimed
        for _ in range(repeats):
            for count in counts:
                found[str(count)]["bare"].append(bare(target, count, tokens))
                found[str(count)]["service"].append(service(services, count, tokens))
    return {count: _summary(arms) for count, arms in found.items()}


def bare(target: PackedLM, sessions: int, tokens: int) -> Times:
    """The engine's thread alone."""
    ended = threading.Semaphore(0)

    def publish(report: StepReport) -> None:
        for update in report.updates:
            if update.finish is not None:
                ended.release()

    def fail(error: BaseException) -> None:
        raise SystemExit(f"the engine failed: {error}")

    engine = EngineThread(target, LIMITS, publish, fail)
    engine.start()
    began = time.perf_counter()
    for at in range(sessions):
        ids = tuple(prompt(at, target.vocabulary_size))
        engine.put(Open(session_of(at + 1, GREEDY, target.vocabulary_size, tokens, ids)))
    for _ in range(sessions):
        ended.acquire()
    seconds = time.perf_counter() - began
    engine.stop(STOP_S)
    timings = engine.timings
    return {
        "forward_ms": _mean(timings.forward),
        "between_ms": _mean(timings.split[sessions]),
        "tokens_per_second": sessions * tokens / seconds,
    }


def service(services: UpServices, sessions: int, tokens: int) -> Times:
    """The same through all services."""
    before = _read(services, sessions)
    seconds = asyncio.run(_serve(services, sessions, tokens))
    forward, forwards, split, splits = (
        after - b for after, b in zip(_read(services, sessions), before, strict=True)
    )
    return {
        "forward_ms": 1e3 * forward / forwards,
        "between_ms": 1e3 * split / splits,
        "tokens_per_second": sessions * tokens / seconds,
    }


def _read(services: UpServices, sessions: int) -> tuple[float, float, float, float]:
    """Seconds and number of all forwards, and of the splits of steps with so many sessions."""

    def read(name: str, **labels: str) -> float:
        try:
            return services.metric("verifier", name, **labels)
        except KeyError:
            return 0.0  # there was no such step yet

    label = str(sessions)
    return (
        read(f"{STEP}_sum", phase="forward"),
        read(f"{STEP}_count", phase="forward"),
        read(f"{SPLIT}_sum", sessions=label),
        read(f"{SPLIT}_count", sessions=label),
    )


async def _serve(services: UpServices, sessions: int, tokens: int) -> float:
    """Seconds that so many streams take."""
    async with AsyncClient(services.address) as client:
        vocabulary = (await client.models())[0].vocabulary_size
        began = time.perf_counter()
        await asyncio.gather(
            *[
                client.generate(
                    ids=prompt(at, vocabulary),
                    max_tokens=tokens,
                    temperature=0.0,
                    ignore_eos=True,
                    speculation=False,
                )
                for at in range(sessions)
            ]
        )
        return time.perf_counter() - began


def _mean(samples: Samples) -> float:
    return samples.total_ms / sum(samples.buckets)


def _summary(arms: dict[str, list[Times]]) -> dict[str, Any]:
    best = {name: max(runs, key=lambda run: run["tokens_per_second"]) for name, runs in arms.items()}
    step_ms = {name: run["forward_ms"] + run["between_ms"] for name, run in best.items()}
    rounded = {name: {field: round(value, 3) for field, value in run.items()} for name, run in best.items()}
    return rounded | {"added_ms": round(step_ms["service"] - step_ms["bare"], 3)}
