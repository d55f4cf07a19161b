"""X18: what does a less strict criterion buy, and what does it cost? Speed against quality."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.criteria import Arm, Counts, Decoder
from benchmarks.experiments.experiment import Experiment, Judged, Rows, where
from benchmarks.experiments.pair import ModelPair, Scale
from benchmarks.plots.curves import Curve, Panel
from benchmarks.shared.resumable import Key
from speculative.params import SamplingParams

EXACT = Arm("path_match")
FIRST_SEED = 1000
SAMPLED_ONLY = (
    Arm("ratio"),
    *(Arm("typical", parameters={"epsilon": epsilon}) for epsilon in (0.3, 0.09, 0.03)),
    *(Arm("lenience", parameters={"factor": factor}) for factor in (0.9, 0.7, 0.5, 0.3, 0.1)),
)
RELAXED = (
    *(Arm("specdec", parameters={"beta": beta, "gap": gap}) for beta, gap in ((2, 0.5), (3, 1.0), (5, 2.0))),
    *(Arm("bild", parameters={"rollback": most}) for most in (1.0, 2.0, 3.0, 5.0)),
    Arm("bild", parameters={"rollback": 3.0, "fallback": 0.6, "dissent": 1}),
    Arm("blockwise", parameters={"top_k": 2}),
    Arm("blockwise", parameters={"top_k": 3}),
    Arm("blockwise", parameters={"least_block": 3}),
)
ARMS: Mapping[str, Sequence[Arm]] = {
    "sampled": (EXACT, *SAMPLED_ONLY, *RELAXED),
    "greedy": (EXACT, *RELAXED),
}


def keys(scale: Scale) -> list[Key]:
    """An arm for each mode and criterion with its parameters, named by its number."""
    return [(mode, number) for mode, arms in ARMS.items() for number in range(len(arms))]


def measure(pair: ModelPair, key: Key) -> dict[str, Any]:
    """Acceptance length and quality of one arm, at temperature 1 or greedy."""
    mode, arm = str(key[0]), ARMS[str(key[0])][int(key[1])]
    params = SamplingParams(temperature=0.0 if mode == "greedy" else 1.0)
    counts = Counts()
    for place, prompt in enumerate(pair.prompts):
        decoder = Decoder(pair.target, pair.drafter, arm, params)
        decoder.decode(prompt, pair.scale.tokens, FIRST_SEED + place, counts)
    return {"mode": mode, "arm": label_of(arm)} | counts.figures(arm)


def label_of(arm: Arm) -> str:
    """The criterion with its parameters, as plots name it."""
    return " ".join((arm.name, *(f"{name} {value:g}" for name, value in arm.parameters.items())))


def judge(rows: Rows) -> Sequence[Judged]:
    """Holds the predictions against the rows."""
    exact = {row["mode"]: row for row in rows if row["criterion"] == EXACT.name}
    typical = where(rows, mode="sampled", criterion="typical")
    gains = [row["acceptance_length"] / exact["sampled"]["acceptance_length"] - 1 for row in typical]
    distances = [row["total_variation"] for row in typical]
    greedy = [
        row["acceptance_length"] / exact["greedy"]["acceptance_length"] - 1
        for row in where(rows, mode="greedy", criterion="specdec")
    ]
    mild = next(row for row in rows if row["arm"] == "lenience factor 0.7")
    ratio = next(row for row in rows if row["criterion"] == "ratio")
    lenient = mild["acceptance_length"] / ratio["acceptance_length"] - 1
    return (
        Judged(f"{_range(gains)} at {_range(distances)}", _within(gains, 0.15, 0.4, distances, 0.15)),
        Judged(f"{_range(greedy)} by SpecDec's rule", min(greedy) >= 0.05 and max(greedy) <= 0.1),
        Judged(f"{lenient:+.2f} at total variation {mild['total_variation']:.3f}", lenient >= 0.05),
    )


def _within(gains: Sequence[float], low: float, high: float, distances: Sequence[float], far: float) -> bool:
    return low <= min(gains) and max(gains) <= high and max(distances) <= far


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def panels(rows: Rows) -> Sequence[Panel]:
    """Tokens a round over the distance to the exact law, and over the likelihood of the text."""
    found = []
    for mode in ARMS:
        points = tuple(
            Curve(row["arm"], (row["total_variation"],), (row["acceptance_length"],))
            for row in where(rows, mode=mode)
        )
        title = "temperature 1" if mode == "sampled" else mode
        found.append(
            Panel(title, "total variation a token (at most)", "tokens per round", points, is_scatter=True)
        )
    return found


X18 = Experiment(
    name="X18",
    question="What does a less strict criterion buy, and what does it cost?",
    predictions=(
        "typical acceptance at temperature 1 has 15 to 40 % more tokens a round, at a total variation of .15 "
        "a token at most",
        "SpecDec's tolerance has 5 to 10 % more greedy tokens a round",
        "lenience .7 has 5 % more tokens a round than the ratio rule, or better",
    ),
    refuted_by="a relaxed criterion that has no more tokens a round than the path match",
    keys=keys,
    measure=measure,
    judge=judge,
    panels=panels,
)
