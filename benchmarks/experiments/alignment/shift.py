"""X11: does a drafter that learns from traffic catch up after a shift of domain?

Requests for code, then for prose that the pair never trained on. Lessons come between requests, so the
answers' ids never depend on them. The drafter service adds what is left out here: exams, a judge and rest.
"""

import dataclasses
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.experiments.experiment import Experiment, Judged, Rows, only
from benchmarks.experiments.pair import ModelPair, Scale
from benchmarks.learning.traffic import code_prompts, prose_prompts, told
from benchmarks.plots.curves import Curve, Panel
from benchmarks.shared.resumable import Key
from outrider.learning.passages import Passage
from outrider.lm.load.model import load_model
from training.online import OnlineStudent, agreed_places

REQUESTS = {False: (16, 48), True: (40, 112)}
"""Requests for code, then for prose, by whether the experiment is run in full."""
EVERY, STEPS, RATE = 12, 10, 3e-4
"""Requests between two lessons, steps of a lesson, and its highest learning rate."""
KEPT = 24
"""The latest requests, which a lesson is made of."""
FROZEN, WRONG, EVERYWHERE = "frozen", "learns where it was wrong", "learns everywhere"


def keys(scale: Scale) -> list[Key]:
    """A drafter that never learns, and two that learn from the places named."""
    return [(arm,) for arm in (FROZEN, WRONG, EVERYWHERE)]


@cache
def traffic(target: Path, code: int, prose: int) -> list[Passage]:
    """Requests with the target's greedy answers: code first, then prose."""
    prompts = np.concatenate([code_prompts(str(target), code), prose_prompts(str(target), prose)])
    model = load_model(str(target), device="cpu", dtype="float32")
    model.set_attn_implementation("sdpa")
    return list(told(model, prompts, 1))


def measure(pair: ModelPair, key: Key) -> dict[str, Any]:
    """Acceptance of every request in their order."""
    arm, (code, prose) = str(key[0]), REQUESTS[pair.scale.is_full]
    student = OnlineStudent(str(pair.drafter_path))
    seen: list[Passage] = []
    shares = []
    for number, passage in enumerate(traffic(pair.target_path, code, prose)):
        (agreed,) = agreed_places(student.model, [passage])
        shares.append(round(float(agreed.mean()), 4))
        places = ~agreed if arm == WRONG else np.ones_like(agreed)
        seen.append(dataclasses.replace(passage, wrong=places))
        if arm != FROZEN and (number + 1) % EVERY == 0:
            student.learn(seen[-KEPT:], STEPS, RATE, number)
    return {"arm": arm, "code": code, "acceptance": shares}


def judge(rows: Rows) -> Sequence[Judged]:
    """Holds the predictions against the rows."""
    of = {row["arm"]: row["acceptance"] for row in rows}
    code = only(rows, arm=FROZEN)["code"]
    last = (len(of[FROZEN]) - code) // 2
    before, after = mean(of[FROZEN][:code]), mean(of[FROZEN][-last:])
    back = {arm: mean(of[arm][-last:]) for arm in (WRONG, EVERYWHERE)}
    lost = before - after
    return (
        Judged(f"{before:.3f} for code, {after:.3f} for prose", 0.10 <= lost <= 0.20),
        Judged(
            f"{back[WRONG] - after:+.3f} of {lost:.3f} lost, in the last {last} requests",
            back[WRONG] - after >= lost / 2,
        ),
        Judged(
            f"{back[WRONG]:.3f} from wrong places, {back[EVERYWHERE]:.3f} from all",
            back[WRONG] >= back[EVERYWHERE],
        ),
    )


def mean(shares: Sequence[float]) -> float:
    """Mean of the requests' acceptance."""
    return sum(shares) / len(shares)


def panels(rows: Rows) -> Sequence[Panel]:
    """Acceptance over requests, as means of EVERY of them."""
    curves = []
    for row in rows:
        starts = range(0, len(row["acceptance"]) - EVERY // 2, EVERY // 2)
        shares = tuple(round(mean(row["acceptance"][at : at + EVERY // 2]), 4) for at in starts)
        curves.append(Curve(row["arm"], tuple(at + EVERY // 2 for at in starts), shares))
    code = only(rows, arm=FROZEN)["code"]
    curves.append(Curve("from code to prose", (code, code), (0.0, 1.0), True))
    return (Panel("Greedy acceptance", "requests", f"mean of {EVERY // 2} requests", tuple(curves)),)


X11 = Experiment(
    name="X11",
    question="Does a drafter that learns from traffic catch up after a shift of domain?",
    predictions=(
        "a frozen drafter loses 10 to 20 points of acceptance from code to prose",
        "one that learns where it was wrong regains half of that in the second half of the prose",
        "learning where the drafter was wrong is as good as learning everywhere, or better",
    ),
    refuted_by="a drafter that learns and ends below the frozen one",
    keys=keys,
    measure=measure,
    judge=judge,
    panels=panels,
)
