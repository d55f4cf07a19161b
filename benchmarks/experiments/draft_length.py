"""X3: the best length of a draft, and whether a drafter's errors cascade along it."""

from collections.abc import Sequence
from typing import Any

from benchmarks.experiments.chains import (
    acceptance_by_depth,
    acceptance_length,
    all_rounds,
    independent_length,
    speed,
)
from benchmarks.experiments.experiment import Experiment, Judged, Rows, line, only
from benchmarks.experiments.pair import ModelPair, Scale, rights
from benchmarks.plots.curves import Curve, Panel
from benchmarks.shared.resumable import Key

LENGTHS = tuple(range(1, 17))
LEAST_TRIALS = 30
"""Drafts that must have reached a depth for its acceptance to count alone."""
DEEP = 6


def keys(scale: Scale) -> list[Key]:
    """An arm for each temperature."""
    return [(0.0,), (0.8,)]


def measure(pair: ModelPair, key: Key) -> dict[str, Any]:
    """Tokens per round and speed by length, and acceptance by depth, at one temperature."""
    temperature = float(key[0])
    texts = rights(pair.drafter, pair.texts(temperature))
    places = [right for text in texts for right in text]
    alpha = sum(places) / len(places)
    by_length = {length: all_rounds(texts, length) for length in LENGTHS}
    return {
        "temperature": temperature,
        "alpha": round(alpha, 4),
        "places": len(places),
        "acceptance_length": [round(acceptance_length(by_length[length]), 3) for length in LENGTHS],
        "independent_length": [round(independent_length(alpha, length), 3) for length in LENGTHS],
        "speed": [round(speed(by_length[length]), 3) for length in LENGTHS],
        "speed_free_rows": [round(speed(by_length[length], is_free=True), 3) for length in LENGTHS],
        "by_depth": [
            {"depth": depth, "alpha": round(held / tried, 4), "trials": tried}
            for depth, (held, tried) in enumerate(acceptance_by_depth(texts, LENGTHS[-1]), start=1)
            if tried
        ],
    }


def judge(rows: Rows) -> Sequence[Judged]:
    """Holds the predictions against the rows."""
    greedy = only(rows, temperature=0.0)
    depths = greedy["by_depth"]
    first, deep = depths[0]["alpha"], pooled([each for each in depths if each["depth"] >= DEEP])
    sure = [each["alpha"] for each in depths if each["trials"] >= LEAST_TRIALS]
    long, formula = greedy["acceptance_length"][-1], greedy["independent_length"][-1]
    speeds = greedy["speed"]
    best = LENGTHS[speeds.index(max(speeds))]
    at_eight = speeds[7] / max(speeds)
    return (
        Judged(f"{first:.2f} at depth 1, {deep:.2f} from depth {DEEP} on", deep > max(0.9, first)),
        Judged(f"{long:.2f} tokens a round at length 16, the formula says {formula:.2f}", long > formula),
        Judged(f"best at {best}; {at_eight:.2f} of the best at 8", 4 <= best <= 6 and at_eight >= 0.97),
        Judged(f"{min(sure):.2f} at the worst depth, {first:.2f} at depth 1", min(sure) >= first - 0.02),
    )


def pooled(depths: Rows) -> float:
    """Acceptance of several depths together; 0 where no draft reached them."""
    trials = sum(each["trials"] for each in depths)
    return float(sum(each["alpha"] * each["trials"] for each in depths) / trials) if trials else 0.0


def panels(rows: Rows) -> Sequence[Panel]:
    """Tokens a round with the formula, acceptance by depth, speed."""
    lengths: list[Curve] = []
    for row in rows:
        at = f"T = {row['temperature']:g}"
        lengths.append(Curve(at, LENGTHS, tuple(row["acceptance_length"])))
        lengths.append(Curve(f"{at}, independent", LENGTHS, tuple(row["independent_length"]), True, at))
    depths = [line(f"T = {row['temperature']:g}", row["by_depth"], "depth", "alpha") for row in rows]
    speeds = [Curve(f"T = {row['temperature']:g}", LENGTHS, tuple(row["speed"])) for row in rows]
    return (
        Panel("Chains of a fixed length", "drafted tokens", "tokens per round", tuple(lengths)),
        Panel("Given that all before were right", "depth", "acceptance", tuple(depths)),
        Panel("Speed at the pair's costs", "drafted tokens", "over plain", tuple(speeds)),
    )


X3 = Experiment(
    name="X3",
    question="Which draft length is best, and do a drafter's errors cascade?",
    predictions=(
        "greedy acceptance rises with depth, from .78 to above .9, as surviving drafts are in easy text",
        "so the formula with independent tokens underrates chains of 16",
        "the best greedy length at the pair's costs is 4 to 6, and length 8 reaches .97 of it",
        "acceptance falls at no depth below that of the first token",
    ),
    refuted_by="acceptance that falls with depth: errors would then cascade",
    keys=keys,
    measure=measure,
    judge=judge,
    panels=panels,
)
