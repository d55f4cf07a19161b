"""X2: how large should a drafter be? Pupils of 1 to 8 of the target's layers, with the same lesson."""

import math
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from safetensors import safe_open

from benchmarks.experiments.alignment.pupils import TARGET, school_of
from benchmarks.experiments.chains import acceptance_length, all_rounds, speed
from benchmarks.experiments.experiment import Experiment, Judged, Rows, line, only
from benchmarks.experiments.pair import ModelPair, Scale, rights
from benchmarks.plots.curves import Panel
from benchmarks.shared.resumable import Key
from outrider.lm.plan import SequenceRows
from outrider.lm.runner import PackedLM

LAYERS = {False: (1, 2, 3, 4, 6), True: (1, 2, 3, 4, 6, 8)}
STEPS = {False: 60, True: 600}
LENGTHS = range(1, 13)
PASSES = 60


def keys(scale: Scale) -> list[Key]:
    """An arm for each number of layers; 0 stands for the embedded drafter, which learned for an hour."""
    return [(layers,) for layers in (*LAYERS[scale.is_full], 0)]


def measure(pair: ModelPair, key: Key) -> dict[str, Any]:
    """Acceptance and cost of one drafter, and the speed that follows at its best length."""
    layers = int(key[0])
    drafter, parameters = pair.drafter, parameters_in(pair.drafter_path)
    if layers:
        school = school_of(pair.target_path)
        pupil = school.pupil(layers)
        parameters = pupil.num_parameters()
        school.teach(pupil, TARGET, STEPS[pair.scale.is_full])
        drafter = school.as_drafter(pupil)
    texts = rights(drafter, pair.texts(0.0))
    cost = relative_cost(drafter, pair.target)
    speeds = {length: speed(all_rounds(texts, length), cost) for length in LENGTHS}
    best = max(speeds, key=lambda length: speeds[length])
    return {
        "layers": layers,
        "parameters": parameters,
        "alpha": round(sum(map(sum, texts)) / sum(map(len, texts)), 4),
        "length_8": round(acceptance_length(all_rounds(texts, 8)), 3),
        "cost": round(cost, 4),
        "best_length": best,
        "speed": round(speeds[best], 3),
    }


def parameters_in(folder: Path) -> int:
    """Number of weights in a model's folder."""
    sizes: list[int] = [
        math.prod(weights.get_slice(name).get_shape())
        for path in folder.glob("*.safetensors")
        for weights in [safe_open(path, "pt")]
        for name in weights.keys()  # noqa: SIM118  (no mapping: it has no __iter__)
    ]
    return sum(sizes)


def relative_cost(drafter: PackedLM, target: PackedLM) -> float:
    """Processor time of a drafter's pass of one row over that of a target's; passes alternate."""
    spent: tuple[list[float], list[float]] = ([], [])
    tables = [lm.table(PASSES + 1) for lm in (drafter, target)]
    for _ in range(PASSES):
        for lm, table, times in zip((drafter, target), tables, spent, strict=True):
            began = time.thread_time()
            lm.forward([SequenceRows(table, [1], [-1], [0])])
            times.append(time.thread_time() - began)
            table.commit((0,))
    for lm, table in zip((drafter, target), tables, strict=True):
        lm.release(table)
    return median(spent[0]) / median(spent[1])


def judge(rows: Rows) -> Sequence[Judged]:
    """Holds the predictions against the rows."""
    pupils = sorted((row for row in rows if row["layers"]), key=lambda row: row["layers"])
    alphas = [row["alpha"] for row in pupils]
    best = max(pupils, key=lambda row: row["speed"])
    near = [row["parameters"] for row in pupils if row["speed"] >= 0.95 * best["speed"]]
    return (
        Judged(", ".join(f"{alpha:.3f}" for alpha in alphas), alphas == sorted(alphas)),
        Judged(
            f"{best['layers']} layers, {best['parameters'] / 1e6:.1f} M parameters",
            best["parameters"] <= 2.1e6,
        ),
        Judged(f"{min(near) / 1e6:.1f} to {max(near) / 1e6:.1f} M", max(near) >= 4 * min(near)),
        Judged(
            f"{only(rows, layers=0)['alpha']:.3f} with {only(rows, layers=0)['parameters'] / 1e6:.1f} M",
            only(rows, layers=0)["alpha"] > max(alphas),
        ),
    )


def panels(rows: Rows) -> Sequence[Panel]:
    """Acceptance, cost and speed over the parameters."""
    pupils = sorted(({**row, "m": row["parameters"] / 1e6} for row in rows if row["layers"]), key=_size)
    own = [{**row, "m": row["parameters"] / 1e6} for row in rows if not row["layers"]]
    return (
        Panel(
            "Drafters cut out of the target",
            "million parameters",
            "share",
            (line("acceptance", pupils, "m", "alpha"), line("pass over target's", pupils, "m", "cost")),
        ),
        Panel(
            "At the best length",
            "million parameters",
            "speed over plain",
            (
                line("cut out of the target", pupils, "m", "speed"),
                line("embedded drafter", own, "m", "speed"),
            ),
        ),
    )


def _size(row: dict[str, Any]) -> float:
    return float(row["m"])


X2 = Experiment(
    name="X2",
    question="How large should a drafter be?",
    predictions=(
        "acceptance rises with size",
        "the fastest has 1 or 2 layers (2.1 M parameters at most): larger ones are more right and too slow",
        "speeds stay within 5 % of the best over a factor 4 in size",
        "the embedded drafter, 1.6 M and an hour of lessons, accepts more than all of them: lessons count "
        "for more than size",
    ),
    refuted_by="the largest drafter as the fastest: acceptance would then be worth any cost",
    keys=keys,
    measure=measure,
    judge=judge,
    panels=panels,
)
