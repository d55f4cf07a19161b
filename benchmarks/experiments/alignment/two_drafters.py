"""X22: do two small drafters, the second taught what the first missed, beat one of twice the layers?"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LlamaForCausalLM

from benchmarks.experiments.alignment.pupils import OWN, TARGET, School, school_of
from benchmarks.experiments.experiment import Experiment, Judged, Rows, line, only, where
from benchmarks.experiments.pair import ModelPair, Scale, logits_along
from benchmarks.plots.curves import Panel
from benchmarks.shared.resumable import Key
from training.target import logits_of

NODES = (1, 2, 4, 8)
STEPS = {False: 60, True: 600}
ELSEWHERE = 0.1
"""Weight of the places that the first drafter had right, where the second one learns."""
ONE, LARGE, TWICE, BOOSTED = "one small", "one of twice the layers", "two alike", "two, boosted"
Ranked = NDArray[np.int64]
"""Token ids by falling likelihood at each place, int64 [places, NODES[-1]]."""


def keys(scale: Scale) -> list[Key]:
    """One small drafter, one of twice the layers, two small ones on other texts, and a boosted second one."""
    return [(arm,) for arm in (ONE, LARGE, TWICE, BOOSTED)]


def missed(school: School, pupil: LlamaForCausalLM, steps: int) -> torch.Tensor:
    """Weights of the places of the target's lesson: 1 where the pupil's likeliest token is wrong."""
    lesson = school.lesson(TARGET, steps)
    with torch.inference_mode():
        chosen = torch.cat(
            [
                logits_of(pupil, torch.from_numpy(lesson.ids[row : row + 8].astype(np.int64))).argmax(-1)
                for row in range(0, len(lesson.ids), 8)
            ]
        )
    return torch.where(chosen == lesson.logprobs.argmax(-1), ELSEWHERE, 1.0)


def taught(school: School, layers: int, kind: str, steps: int) -> LlamaForCausalLM:
    """A pupil after a lesson on texts of a kind."""
    pupil = school.pupil(layers)
    school.teach(pupil, kind, steps)
    return pupil


def second_of(school: School, arm: str, first: LlamaForCausalLM, steps: int) -> LlamaForCausalLM:
    """The second drafter of an arm that has two."""
    if arm == TWICE:
        return taught(school, 1, OWN, steps)
    pupil = school.pupil(1)
    school.teach(pupil, TARGET, steps, weights=missed(school, first, steps))
    return pupil


def together(first: Sequence[int], second: Sequence[int], nodes: int) -> set[int]:
    """Both drafters' likeliest tokens in turn, until the list has enough different tokens."""
    found: dict[int, None] = {}
    for pair in zip(first, second, strict=True):
        found.update(dict.fromkeys(pair))
    return set(list(found)[:nodes])


def measure(pair: ModelPair, key: Key) -> dict[str, Any]:
    """How often the target's greedy token is among the nodes, for each number of nodes below one place."""
    arm, steps = str(key[0]), STEPS[pair.scale.is_full]
    school = school_of(pair.target_path)
    pupils = [taught(school, 2 if arm == LARGE else 1, TARGET, steps)]
    if arm in (TWICE, BOOSTED):
        pupils.append(second_of(school, arm, pupils[0], steps))
    drafters = [school.as_drafter(pupil) for pupil in pupils]
    wanted: list[int] = []
    ranked: list[list[list[int]]] = [[] for _ in drafters]
    for text in pair.texts(0.0):
        wanted += text.ids[text.prompt_length :]
        for drafter, places in zip(drafters, ranked, strict=True):
            rows = logits_along(drafter, text.ids, text.prompt_length)
            places += np.argsort(-rows, axis=1, kind="stable")[:, : NODES[-1]].tolist()
    covered = {
        nodes: [token in together(ranked[0][at], ranked[-1][at], nodes) for at, token in enumerate(wanted)]
        for nodes in NODES
    }
    return {
        "arm": arm,
        "places": len(wanted),
        "covered": [round(sum(covered[nodes]) / len(wanted), 4) for nodes in NODES],
    }


def judge(rows: Rows) -> Sequence[Judged]:
    """Holds the predictions against the rows."""

    def at(arm: str) -> Mapping[int, float]:
        return dict(zip(NODES, only(rows, arm=arm)["covered"], strict=True))

    gain = 100 * (at(BOOSTED)[4] - at(ONE)[4])
    behind = 100 * (at(LARGE)[4] - at(BOOSTED)[4])
    return (
        Judged(f"{gain:+.1f} points at 4 nodes", 0.5 <= gain <= 2.5),
        Judged(f"{behind:+.1f} points behind one of twice the layers at 4 nodes", behind > 0),
        Judged(
            f"{100 * (at(BOOSTED)[4] - at(TWICE)[4]):+.1f} points over two alike at 4 nodes",
            at(BOOSTED)[4] > at(TWICE)[4],
        ),
    )


def panels(rows: Rows) -> Sequence[Panel]:
    """Coverage over nodes, a line for each arm."""
    points = [
        {"arm": row["arm"], "nodes": nodes, "covered": share}
        for row in rows
        for nodes, share in zip(NODES, row["covered"], strict=True)
    ]
    return (
        Panel(
            "The target's token is among the drafts",
            "nodes below one place",
            "share of places",
            tuple(
                line(arm, where(points, arm=arm), "nodes", "covered") for arm in (ONE, LARGE, TWICE, BOOSTED)
            ),
            is_log_x=True,
        ),
    )


X22 = Experiment(
    name="X22",
    question="Are two small drafters, the second taught what the first missed, better than a larger one?",
    predictions=(
        "a boosted second drafter adds 1 to 2 points (.5 to 2.5) at 4 nodes",
        "one drafter of twice the layers covers more than both",
        "boosting covers more than a second drafter that was taught without regard to the first",
    ),
    refuted_by="two boosted drafters that cover more than one of twice the layers: a second process would "
    "then pay",
    keys=keys,
    measure=measure,
    judge=judge,
    panels=panels,
)
