"""X4: why speculation is slower at higher temperatures, and for which drafts it is."""

from collections.abc import Sequence
from typing import Any

from benchmarks.experiments.chains import acceptance_length, all_rounds
from benchmarks.experiments.experiment import Experiment, Judged, Rows, line, only, where
from benchmarks.experiments.pair import ModelPair, Scale, lookup_accepts, rights
from benchmarks.plots.curves import Panel
from benchmarks.shared.resumable import Key

TEMPERATURES = (0.0, 0.3, 0.5, 0.7, 1.0, 1.3)
LENGTH = 8
NOISE, GREEDY_DRAFTS, LOOKUP = "session noise", "likeliest token", "lookup"


def keys(scale: Scale) -> list[Key]:
    """An arm for each temperature; each measures all three ways to draft on the same texts."""
    return [(temperature,) for temperature in TEMPERATURES]


def measure(pair: ModelPair, key: Key) -> dict[str, Any]:
    """Tokens per round of chains of LENGTH tokens, by how they are drafted."""
    temperature = float(key[0])
    texts = pair.texts(temperature)
    coupled = rights(pair.drafter, texts)
    likeliest = rights(pair.drafter, texts, with_noise=False)
    copied = [each for text in texts for each in lookup_accepts(text, LENGTH)]
    rounds = {
        NOISE: all_rounds(coupled, LENGTH),
        GREEDY_DRAFTS: all_rounds(likeliest, LENGTH),
        LOOKUP: copied,
    }
    return {
        "temperature": temperature,
        **{how: round(acceptance_length(each), 3) for how, each in rounds.items()},
        "alpha": round(sum(map(sum, coupled)) / sum(map(len, coupled)), 4),
        "alpha_likeliest": round(sum(map(sum, likeliest)) / sum(map(len, likeliest)), 4),
    }


def judge(rows: Rows) -> Sequence[Judged]:
    """Holds the predictions against the rows."""
    cold, warm = only(rows, temperature=0.0), only(rows, temperature=1.0)
    kept = {how: (warm[how] - 1) / (cold[how] - 1) for how in (NOISE, GREEDY_DRAFTS, LOOKUP)}
    length = warm[NOISE] / cold[NOISE]
    return (
        Judged(
            f"{cold[NOISE]:.2f} tokens a round greedy, {warm[NOISE]:.2f} at 1: {length:.2f}", length >= 0.8
        ),
        Judged(f"{kept[GREEDY_DRAFTS]:.2f} of the accepted drafts are left at 1", kept[GREEDY_DRAFTS] < 0.5),
        Judged(f"{cold[LOOKUP]:.2f} greedy, {warm[LOOKUP]:.2f} at 1", warm[LOOKUP] <= 1.3),
    )


def panels(rows: Rows) -> Sequence[Panel]:
    """A line for each way to draft."""
    ordered = [row for temperature in TEMPERATURES for row in where(rows, temperature=temperature)]
    curves = tuple(line(how, ordered, "temperature", how) for how in (NOISE, GREEDY_DRAFTS, LOOKUP))
    return (Panel(f"Chains of {LENGTH} tokens", "temperature", "tokens per round", curves),)


X4 = Experiment(
    name="X4",
    question="Why does speculation slow down at higher temperatures?",
    predictions=(
        "a drafter that adds the session's noise keeps .8 of its greedy tokens a round at temperature 1",
        "a drafter that sends its likeliest tokens loses more than half of its accepted drafts by then",
        "lookup falls to 1.3 tokens a round or fewer",
    ),
    refuted_by="drafts with the session's noise that lose as much as deterministic ones: the loss would then "
    "be a property of sampling, and not of drafts that ignore the noise",
    keys=keys,
    measure=measure,
    judge=judge,
    panels=panels,
)
