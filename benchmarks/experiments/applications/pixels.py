"""X16: ids that are no text. A target and a drafter of grey levels of a photograph, 8 x 8 pixels at a time.

Both models are trained here, in a minute, on the upper part of the photograph that matplotlib brings along;
pictures come from the lower part.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional
from transformers import LlamaForCausalLM

from benchmarks.experiments.alignment.pupils import forward_kl
from benchmarks.experiments.experiment import Experiment, Judged, Rows, line, only, where
from benchmarks.experiments.pair import ModelPair, Scale
from benchmarks.plots.curves import Curve, Panel
from benchmarks.shared.resumable import Key
from speculative.noise import gumbel
from training.batches import shuffled
from training.loop import optimisers, rate_factor
from training.model import LlamaShape, build

SIDE, LEVELS, SHRINK = 8, 17, 3
PLACES, BEGIN = SIDE * SIDE, LEVELS
GIVEN = SIDE
"""Pixels of a picture that are given: its first row."""
TARGET = LlamaShape(4, 96, 3, 3, 32, 256, vocabulary=LEVELS + 1, context=PLACES + 1)
DRAFTER = LlamaShape(1, 48, 2, 2, 24, 96, vocabulary=LEVELS + 1, context=PLACES + 1)
STEPS, BATCH, RATE = 150, 32, 4e-3
PICTURES = {False: 24, True: 96}
WINDOW = 8
TOLERANCES = (0, 1, 2)
Ids = NDArray[np.int64]


def photograph() -> NDArray[np.float64]:
    """Grey values of matplotlib's sample photograph, made smaller: float64 [height, width], 0 to 1."""
    try:
        from matplotlib import cbook, image
    except ImportError as missing:
        raise SystemExit("X16 needs matplotlib's photograph: pip install 'outrider[plot]'") from missing
    file = cbook.get_sample_data("grace_hopper.jpg", asfileobj=False)
    grey = image.imread(file, format="jpg").mean(-1) / 255
    height, width = (size // SHRINK * SHRINK for size in grey.shape)
    blocks = grey[:height, :width].reshape(height // SHRINK, SHRINK, width // SHRINK, SHRINK)
    small: NDArray[np.float64] = blocks.mean((1, 3))
    return small


def pictures(grey: NDArray[np.float64], step: int) -> Ids:
    """All squares of SIDE pixels, `step` pixels apart, as ids of levels: int64 [n, PLACES + 1]."""
    levels = np.minimum((grey * LEVELS).astype(np.int64), LEVELS - 1)
    height, width = levels.shape
    found = [
        [BEGIN, *levels[top : top + SIDE, left : left + SIDE].ravel().tolist()]
        for top in range(0, height - SIDE + 1, step)
        for left in range(0, width - SIDE + 1, step)
    ]
    return np.array(found, dtype=np.int64)


@dataclass(frozen=True)
class PixelPair:
    """A target and a drafter of pictures, and pictures that neither has seen: int64 [n, PLACES + 1]."""

    target: LlamaForCausalLM
    drafter: LlamaForCausalLM
    unseen: Ids


def trained(model: LlamaForCausalLM, teacher: LlamaForCausalLM | None, seen: Ids) -> LlamaForCausalLM:
    """Trains a model on pictures, or on what a teacher says about them."""
    using = optimisers(model.train(), RATE, lambda name, _: "embed" in name)
    for step in range(STEPS):
        for group in (group for optimiser in using for group in optimiser.param_groups):
            group["lr"] = RATE * rate_factor(step, step / STEPS)
        ids = torch.from_numpy(seen[shuffled(len(seen), BATCH, 1, step)])
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        if teacher is None:
            loss = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        else:
            with torch.no_grad():
                wanted = teacher(input_ids=ids[:, :-1], use_cache=False).logits.log_softmax(-1)
            loss = forward_kl(wanted, logits.log_softmax(-1)).mean()
        loss.backward()
        for optimiser in using:
            optimiser.step()
            optimiser.zero_grad()
    model.eval()
    return model


@cache
def pixel_pair() -> PixelPair:
    """The trained pair; the lower third of the photograph is unseen."""
    grey = photograph()
    border = 2 * len(grey) // 3
    seen = pictures(grey[:border], 2)
    target = trained(build(TARGET, BEGIN, seed=0), None, seen)
    return PixelPair(
        target, trained(build(DRAFTER, BEGIN, seed=0), target, seen), pictures(grey[border:], SIDE)
    )


@torch.inference_mode()
def logits_of(model: LlamaForCausalLM, ids: Sequence[int]) -> NDArray[np.float32]:
    """Logits of levels after each id: float32 [len(ids), LEVELS]."""
    found: NDArray[np.float32] = (
        model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0, :, :LEVELS].numpy()
    )
    return found


def choice(row: NDArray[np.float32], noise: NDArray[np.float64] | None) -> int:
    """The level chosen from one row of logits: the likeliest, or the likeliest with noise."""
    return int(np.argmax(row if noise is None else row + noise))


@dataclass
class Painted:
    """One picture as it was decoded."""

    ids: list[int]
    rounds: int
    by_place: list[bool]
    """Whether each decoded pixel was drafted and accepted."""
    logprob: float
    """Mean log-probability of the pixels under the target."""


def paint(pair: PixelPair, first: Sequence[int], seed: int | None, tolerance: int) -> Painted:
    """Decodes a picture by rounds of WINDOW drafted pixels.

    A drafted pixel passes if it is within `tolerance` levels of the target's own.

    Args:
        first: the ids that are given.
        seed: of the noise; None: greedy.
    """
    ids, rounds, drafted_places = list(first), 0, []
    noise = [None if seed is None else gumbel(seed, place, LEVELS) for place in range(PLACES + 1)]
    chances: list[float] = []
    while len(ids) <= PLACES:
        draft: list[int] = []
        while len(draft) < min(WINDOW, PLACES - len(ids)):
            place = len(ids) + len(draft)
            draft.append(choice(logits_of(pair.drafter, [*ids, *draft])[-1], noise[place]))
        rows = logits_of(pair.target, [*ids, *draft])[len(ids) - 1 :]
        rounds += 1
        for depth, row in enumerate(rows):
            own = choice(row, noise[len(ids)])
            passes = depth < len(draft) and abs(draft[depth] - own) <= tolerance
            token = draft[depth] if passes else own
            ids.append(token)
            drafted_places.append(passes)
            chances.append(float(row[token] - np.logaddexp.reduce(row.astype(np.float64))))
            if not passes:
                break
    return Painted(ids, rounds, drafted_places, float(np.mean(chances)))


def keys(scale: Scale) -> list[Key]:
    """An arm for each temperature and tolerance."""
    return [(temperature, tolerance) for temperature in (0.0, 1.0) for tolerance in TOLERANCES]


def measure(pair: ModelPair, key: Key) -> dict[str, Any]:
    """Acceptance and likelihood of pictures, and how far they are from the exact ones."""
    temperature, tolerance = float(key[0]), int(key[1])
    models = pixel_pair()
    chosen = chosen_of(models, PICTURES[pair.scale.is_full])
    painted = list(_painted(models, chosen, temperature > 0, tolerance))
    exact = exact_ones(PICTURES[pair.scale.is_full], temperature > 0)
    off = [
        abs(one - other)
        for done, ids in zip(painted, exact, strict=True)
        for one, other in zip(done.ids[GIVEN + 1 :], ids[GIVEN + 1 :], strict=True)
    ]
    places = np.array([done.by_place for done in painted], dtype=np.float64).mean(0)
    decoded = (PLACES - GIVEN) * len(painted)
    return {
        "temperature": temperature,
        "tolerance": tolerance,
        "pictures": len(painted),
        "identical": all(done.ids == ids for done, ids in zip(painted, exact, strict=True)),
        "acceptance_length": round(decoded / sum(done.rounds for done in painted), 3),
        "levels_off": round(float(np.mean(off)), 3),
        "mean_logprob": round(float(np.mean([done.logprob for done in painted])), 4),
        "accepted_by_row": [round(float(row.mean()), 3) for row in places.reshape(-1, SIDE)],
    }


def chosen_of(models: PixelPair, count: int) -> Ids:
    """About `count` of the unseen pictures, spread evenly."""
    return models.unseen[:: max(1, len(models.unseen) // count)]


@cache
def exact_ones(count: int, sampled: bool) -> list[list[int]]:
    """The pictures as the target alone decodes them."""
    models = pixel_pair()
    chosen = chosen_of(models, count)
    return [plain(models, picture, seed if sampled else None) for seed, picture in enumerate(chosen)]


def _painted(models: PixelPair, chosen: Ids, sampled: bool, tolerance: int) -> Iterator[Painted]:
    for seed, picture in enumerate(chosen):
        yield paint(models, picture[: GIVEN + 1].tolist(), seed if sampled else None, tolerance)


def plain(models: PixelPair, picture: Ids, seed: int | None) -> list[int]:
    """The picture as the target alone decodes it, one pixel at a time."""
    ids: list[int] = picture[: GIVEN + 1].tolist()
    while len(ids) <= PLACES:
        noise = None if seed is None else gumbel(seed, len(ids), LEVELS)
        ids.append(choice(logits_of(models.target, ids)[-1], noise))
    return ids


def judge(rows: Rows) -> Sequence[Judged]:
    """Holds the predictions against the rows."""
    exact = {t: only(rows, temperature=t, tolerance=0) for t in (0.0, 1.0)}
    near = {t: only(rows, temperature=t, tolerance=1) for t in (0.0, 1.0)}
    lengths = [row["acceptance_length"] for row in exact.values()]
    wider = [row["acceptance_length"] for row in near.values()]
    lost = [exact[t]["mean_logprob"] - near[t]["mean_logprob"] for t in (0.0, 1.0)]
    return (
        Judged(
            "equal" if all(row["identical"] for row in exact.values()) else "not equal",
            all(row["identical"] for row in exact.values()),
        ),
        Judged(f"{lengths[0]:.2f} greedy, {lengths[1]:.2f} at 1", all(3 <= each <= 6 for each in lengths)),
        Judged(f"{wider[0]:.2f} greedy, {wider[1]:.2f} at 1", all(each >= 6 for each in wider)),
        Judged(f"{lost[0]:.2f} nats a pixel greedy, {lost[1]:.2f} at 1", all(each <= 0.1 for each in lost)),
    )


def panels(rows: Rows) -> Sequence[Panel]:
    """Pixels a round over tolerance, and acceptance from the top row to the bottom."""
    lengths = tuple(
        line(f"T = {t:g}", where(rows, temperature=t), "tolerance", "acceptance_length") for t in (0.0, 1.0)
    )
    by_row = tuple(
        Curve(
            f"T = {row['temperature']:g}",
            tuple(range(2, SIDE + 1)),
            tuple(row["accepted_by_row"]),
        )
        for row in where(rows, tolerance=0)
    )
    return (
        Panel(f"Chains of {WINDOW} pixels", "tolerance, levels of 17", "pixels a round", lengths),
        Panel("Exact drafts", "row of the picture", "accepted share", by_row),
    )


X16 = Experiment(
    name="X16",
    question="Does speculation work for ids that are no text?",
    predictions=(
        "with no tolerance the pictures are those of the target alone, id for id",
        "3 to 6 pixels a round with no tolerance",
        "6 pixels a round or more where one level off passes",
        "one level off costs .1 nats a pixel at most",
    ),
    refuted_by="fewer than 1.5 pixels a round: drafts would then be a matter of text",
    keys=keys,
    measure=measure,
    judge=judge,
    panels=panels,
)
