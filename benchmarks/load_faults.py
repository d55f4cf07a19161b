"""What a faulty drafter costs: speculation from it alone beside plain decoding of the same verifier."""

import time
from contextlib import ExitStack
from statistics import median
from typing import Any

from figures import paired_ratio, same_ids
from stack import FaultyDrafter, Orchestrator, Stack, stopped
from streams import Arm, Load, flat

from outrider.client import Client

SESSIONS = (1, 8)
KINDS = ("delayed", "garbage", "stopped")


def faulty_figures(load: Load, stack: Stack, repeats: int, untimed: int) -> dict[str, Any]:
    """For each kind of fault the worse of both numbers of sessions; before and after it is found out.

    It is found out in so many untimed batches of eight streams.
    """
    figures: dict[str, dict[str, float]] = {
        "faulty_drafter": {},
        "faulty_at_first": {},
        "faulty_forward": {},
    }
    for kind in KINDS:
        with ExitStack() as held:
            front = _front(held, stack, kind)
            held.enter_context(stopped(stack.pids("drafter") if kind == "stopped" else []))
            arms = {"plain": Arm(front, speculation=False), kind: Arm(front, sources=("drafter",))}
            figures["faulty_at_first"][kind] = _at_first(load, arms, kind, untimed)
            ratio, forward = _ratios(load, stack, arms, kind, repeats)
        figures["faulty_drafter"][kind], figures["faulty_forward"][kind] = ratio, forward
    return figures


def _front(held: ExitStack, stack: Stack, kind: str) -> str:
    """The address of an orchestrator whose drafter is faulty."""
    verifier, drafter = stack.address_of("verifier"), stack.address_of("drafter")
    source = drafter if kind == "stopped" else held.enter_context(FaultyDrafter(drafter, kind)).address
    front: str = held.enter_context(Orchestrator(verifier, source)).address
    _until_drafting(front)
    return front


def _at_first(load: Load, arms: dict[str, Arm], kind: str, untimed: int) -> float:
    """Faulty over plain with a verifier that thinks well of the drafter; then it learns."""
    plain = load.together(arms["plain"], SESSIONS[-1])
    first = load.together(arms[kind], SESSIONS[-1])
    for _ in range(untimed):
        load.together(arms[kind], SESSIONS[-1])
    return round(plain.seconds / first.seconds, 3)


def _ratios(load: Load, stack: Stack, arms: dict[str, Arm], kind: str, repeats: int) -> tuple[float, float]:
    """Tokens/s over plain's, and how much longer a forward took."""
    worst = (float("inf"), 1.0)
    for count in SESSIONS:
        runs, forwards = [], {name: [] for name in arms}
        for repeat in range(repeats):
            for name in sorted(arms, reverse=bool(repeat % 2)):
                before = _forwards(stack)
                runs.append(flat(name, count, repeat, load.together(arms[name], count)))
                after = _forwards(stack)
                forwards[name].append((after[1] - before[1]) / (after[0] - before[0]))
        assert same_ids(runs, list(arms)), f"ids differ beside a {kind} drafter"
        slower = [own / plain for own, plain in zip(forwards[kind], forwards["plain"], strict=True)]
        ratio = float(paired_ratio(runs, kind, "plain")["median"])
        worst = min(worst, (ratio, round(median(slower), 3)))
    return worst


def _forwards(stack: Stack) -> tuple[float, float]:
    """Target passes so far, and their seconds."""
    name = "outrider_verifier_step_seconds"
    return (
        stack.metric("verifier", f"{name}_count", phase="forward"),
        stack.metric("verifier", f"{name}_sum", phase="forward"),
    )


def _until_drafting(address: str) -> None:
    """Until an orchestrator that has just started knows its verifier and its drafter."""
    with Client(address) as client:
        while not any("drafter" in model.sources for model in client.models()):
            time.sleep(0.05)
