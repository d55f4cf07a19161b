"""X10: which loss and which text align a drafter best? The same pupil, the same steps."""

from collections.abc import Sequence
from typing import Any

from benchmarks.experiments.alignment.pupils import LOSSES, OWN, SOURCE, TARGET, school_of
from benchmarks.experiments.chains import acceptance_length, all_rounds
from benchmarks.experiments.experiment import Experiment, Judged, Rows, only, where
from benchmarks.experiments.pair import ModelPair, Scale, rights
from benchmarks.plots.curves import Curve, Panel
from benchmarks.shared.resumable import Key

LAYERS, LENGTH = 2, 8
STEPS = {False: 60, True: 600}
"""Steps of an arm, by whether the experiment is run in full."""
UNTAUGHT = "untaught"
KINDS = (SOURCE, TARGET, OWN)
FIRST = "forward KL"
TEMPERATURES = (0.0, 1.0)


def keys(scale: Scale) -> list[Key]:
    """The pupil before any lesson; then every loss on the target's text, and one loss on the other texts."""
    rest = [(loss, kind) for kind in (SOURCE, OWN) for loss in LOSSES if scale.is_full or loss == FIRST]
    return [(UNTAUGHT, SOURCE), *((loss, TARGET) for loss in LOSSES), *rest]


def measure(pair: ModelPair, key: Key) -> dict[str, Any]:
    """Acceptance of a pupil on the target's texts, after its lesson."""
    loss, kind = str(key[0]), str(key[1])
    school = school_of(pair.target_path)
    pupil = school.pupil(LAYERS)
    if loss != UNTAUGHT:
        school.teach(pupil, kind, STEPS[pair.scale.is_full], LOSSES[loss])
    drafter = school.as_drafter(pupil)
    row: dict[str, Any] = {"loss": loss, "text": kind}
    for name, temperature in zip(("greedy", "sampled"), TEMPERATURES, strict=True):
        texts = rights(drafter, pair.texts(temperature))
        row[f"alpha_{name}"] = round(sum(map(sum, texts)) / sum(map(len, texts)), 4)
        row[f"length_{name}"] = round(acceptance_length(all_rounds(texts, LENGTH)), 3)
    return row


def judge(rows: Rows) -> Sequence[Judged]:
    """Holds the predictions against the rows."""
    losses = {loss: only(rows, loss=loss, text=TARGET) for loss in LOSSES}
    spread = {
        mode: max(row[f"length_{mode}"] for row in losses.values())
        / min(row[f"length_{mode}"] for row in losses.values())
        - 1
        for mode in ("greedy", "sampled")
    }
    warm = max(losses, key=lambda loss: losses[loss]["alpha_sampled"])
    texts = {kind: only(rows, loss=FIRST, text=kind)["alpha_greedy"] for kind in KINDS}
    best = max(texts, key=lambda kind: texts[kind])
    return (
        Judged(f"{spread['greedy']:.1%} greedy, {spread['sampled']:.1%} at 1", max(spread.values()) <= 0.03),
        Judged(
            f"{warm}: " + ", ".join(f"{loss} {row['alpha_sampled']:.3f}" for loss, row in losses.items()),
            warm in ("total variation", "Jensen-Shannon"),
        ),
        Judged(", ".join(f"{kind} {alpha:.3f}" for kind, alpha in texts.items()), best == TARGET),
    )


def panels(rows: Rows) -> Sequence[Panel]:
    """Bars of acceptance by loss and by text."""

    def bars(field: str, chosen: Rows) -> tuple[Curve, ...]:
        names = tuple(row[field].replace(" ", "\n") for row in chosen)
        return tuple(
            Curve(label, names, tuple(row[column] for row in chosen))
            for label, column in (("greedy", "alpha_greedy"), ("T = 1", "alpha_sampled"))
        )

    untaught = where(rows, loss=UNTAUGHT)
    return (
        Panel(f"Loss ({TARGET})", "", "acceptance", bars("loss", [*untaught, *where(rows, text=TARGET)])),
        Panel(f"Text ({FIRST})", "", "acceptance", bars("text", where(rows, loss=FIRST))),
    )


X10 = Experiment(
    name="X10",
    question="Which loss and which text align a drafter best?",
    predictions=(
        "losses differ by 3 % of the tokens a round at most",
        "total variation or Jensen-Shannon has the highest acceptance at temperature 1",
        "text that the target wrote gives a higher greedy acceptance than source text or the drafter's own",
    ),
    refuted_by="a loss that is over 10 % better than forward KL, the recipe's: the pair would need another",
    keys=keys,
    measure=measure,
    judge=judge,
    panels=panels,
)
