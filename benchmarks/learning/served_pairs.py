"""What a drafter that learns costs the requests that it drafts for: pairs of requests through real services.

Two stacks of services answer the same requests in turns, one with a drafter that learns. While the other
answers, the learning drafter and the process of its lesson stand still, so that a lesson costs its own stack
alone.
"""

import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks.shared.figures import TimedRun, alternating_orders, paired_ratio, same_ids
from benchmarks.shared.services import UpServices, paused
from outrider.client import Client

FROZEN, LEARNING = "frozen", "learning"
COLD: dict[str, Any] = {"OUTRIDER_VERIFIER__PREFIX_CACHE": "false"}  # both arms ask the same requests
_LESSONS = "outrider_drafter_lessons_total"
_PAUSED_S = "outrider_drafter_lessons_paused_seconds_total"


def learning_settings(folder: Path, every: int) -> dict[str, Any]:
    """Variables with which `outrider up` starts a drafter that learns from every tenant.

    Args:
        folder: an empty folder for weights.
        every: wrong places until a lesson.
    """
    given = {"LEARN": "public", "LEARN_FROM": "*", "LEARN_DIR": str(folder), "LEARN_EVERY": str(every)}
    return {f"OUTRIDER_DRAFTER__{name}": value for name, value in given.items()}


def served_pairs(
    models: tuple[str, str],
    prompts: Sequence[Sequence[int]],
    folder: Path,
    *,
    every: int,
    tokens: int,
    temperature: float = 0.0,
) -> dict[str, Any]:
    """The rate of requests with a drafter that learns over the rate without, pair by pair.

    Args:
        models: folders of target and drafter.
        prompts: token ids of each request; each is one pair.
        folder: an empty folder for weights.
        every: wrong places until a lesson.
        tokens: tokens of each answer.
    """
    runs: list[TimedRun] = []
    with (
        UpServices(*models, **(COLD | learning_settings(folder, every))) as learning,
        UpServices(*models, **COLD) as frozen,
        Client(learning.address) as learning_client,
        Client(frozen.address) as frozen_client,
    ):
        clients = {FROZEN: frozen_client, LEARNING: learning_client}
        orders = alternating_orders(clients)
        for number, prompt in enumerate([prompts[0], *prompts]):
            for arm in next(orders):
                still = paused(_with_children(learning.pids("drafter"))) if arm == FROZEN else nullcontext()
                with still:
                    run = _timed(arm, clients[arm], prompt, number, tokens, temperature)
                if number:  # the first request of each arm warms up
                    runs.append(run)
            print(f"pair {number} of {len(prompts)}", file=sys.stderr)
        return {
            "identical": same_ids(runs, [FROZEN, LEARNING]),
            "learning_over_frozen": paired_ratio(runs, LEARNING, FROZEN),
            "lessons": int(learning.metric_sum("drafter", _LESSONS)),
            "lessons_paused_s": round(learning.metric_sum("drafter", _PAUSED_S), 1),
        }


def _timed(
    arm: str, client: Client, prompt: Sequence[int], number: int, tokens: int, temperature: float
) -> TimedRun:
    began = time.perf_counter()
    done = client.generate(
        ids=list(prompt), max_tokens=tokens, temperature=temperature, seed=number, ignore_eos=True
    )
    return TimedRun(arm, number, 0, tuple(done.ids), time.perf_counter() - began, done.usage.rounds)


def _with_children(pids: Sequence[int]) -> list[int]:
    """These processes and the children that they have now."""
    found = list(pids)
    for pid in pids:
        for listed in Path(f"/proc/{pid}/task").glob("*/children"):
            found += [int(child) for child in listed.read_text().split()]
    return found
