"""What a faulty drafter costs: speculation from it alone beside plain decoding on the same verifier."""

import time
from contextlib import ExitStack
from statistics import median
from typing import Any

from benchmarks.load.stream_batches import Arm, StreamBatches, as_timed_run
from benchmarks.shared.figures import TimedRun, paired_ratio, same_ids
from benchmarks.shared.services import UpServices, faulty_drafter, orchestrator, paused
from outrider.client import Client

SESSIONS = (1, 8)
KINDS = ("delayed", "garbage", "stopped")


def faulty_figures(
    batches: StreamBatches, services: UpServices, repeats: int, untimed: int
) -> dict[str, Any]:
    """Throughput with each kind of fault over plain decoding, before and after the verifier notices it.

    After it, the worse of both numbers of sessions counts. The verifier gets `untimed` batches of eight
    streams in which to notice.
    """
    figures: dict[str, dict[str, float]] = {
        "faulty_drafter": {},
        "faulty_at_first": {},
        "faulty_forward": {},
    }
    for kind in KINDS:
        with ExitStack() as held:
            front = _faulty_front(held, services, kind)
            held.enter_context(paused(services.pids("drafter") if kind == "stopped" else []))
            arms = {"plain": Arm(front, speculation=False), kind: Arm(front, sources=("drafter",))}
            figures["faulty_at_first"][kind] = _at_first(batches, arms, kind, untimed)
            ratio, forward = _ratios(batches, services, arms, kind, repeats)
        figures["faulty_drafter"][kind], figures["faulty_forward"][kind] = ratio, forward
    return figures


def _faulty_front(held: ExitStack, services: UpServices, kind: str) -> str:
    """The address of an orchestrator whose drafter has this kind of fault."""
    verifier, drafter = services.address_of("verifier"), services.address_of("drafter")
    source = drafter if kind == "stopped" else held.enter_context(faulty_drafter(drafter, kind)).address
    front: str = held.enter_context(orchestrator(verifier, "--drafter", source)).address
    _until_drafting(front)
    return front


def _at_first(batches: StreamBatches, arms: dict[str, Arm], kind: str, untimed: int) -> float:
    """Throughput with the fault over plain while the verifier still trusts the drafter; then it may learn."""
    plain = batches.run(arms["plain"], SESSIONS[-1])
    first = batches.run(arms[kind], SESSIONS[-1])
    for _ in range(untimed):
        batches.run(arms[kind], SESSIONS[-1])
    return round(plain.seconds / first.seconds, 3)


def _ratios(
    batches: StreamBatches, services: UpServices, arms: dict[str, Arm], kind: str, repeats: int
) -> tuple[float, float]:
    """Tokens/s over those of plain decoding, and how many times longer a forward took."""
    worst = (float("inf"), 1.0)
    for count in SESSIONS:
        runs: list[TimedRun] = []
        forwards: dict[str, list[float]] = {name: [] for name in arms}
        for repeat in range(repeats):
            for name in sorted(arms, reverse=bool(repeat % 2)):
                before = _forwards(services)
                runs.append(as_timed_run(name, count, repeat, batches.run(arms[name], count)))
                after = _forwards(services)
                forwards[name].append((after[1] - before[1]) / (after[0] - before[0]))
        assert same_ids(runs, list(arms)), f"ids differ beside a {kind} drafter"
        slower = [own / plain for own, plain in zip(forwards[kind], forwards["plain"], strict=True)]
        ratio = float(paired_ratio(runs, kind, "plain")["median"])
        worst = min(worst, (ratio, round(median(slower), 3)))
    return worst


def _forwards(services: UpServices) -> tuple[float, float]:
    """Number of target passes so far, and their seconds."""
    name = "outrider_verifier_step_seconds"
    return (
        services.metric("verifier", f"{name}_count", phase="forward"),
        services.metric("verifier", f"{name}_sum", phase="forward"),
    )


def _until_drafting(address: str) -> None:
    """Waits until a newly started orchestrator knows its verifier and its drafter."""
    with Client(address) as client:
        while not any("drafter" in model.sources for model in client.models()):
            time.sleep(0.05)
