"""X13: what a drafter loses by quantisation or pruning. Its drafts change, the target's text never does."""

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.experiments.chains import acceptance_length, all_rounds
from benchmarks.experiments.experiment import Experiment, Judged, Rows, only
from benchmarks.experiments.pair import ModelPair, Scale, rights
from benchmarks.plots.curves import Curve, Panel
from benchmarks.shared.resumable import Key
from outrider.lm.runner import PackedLM

LENGTH = 8
Change = Callable[[torch.Tensor], torch.Tensor]


def rounded_rows(bits: int) -> Change:
    """Weights rounded to signed integers of `bits` bits, with one scale for each output row."""
    most = 2 ** (bits - 1) - 1

    def change(matrix: torch.Tensor) -> torch.Tensor:
        scale = matrix.abs().amax(1, keepdim=True).clamp(min=1e-12) / most
        rounded: torch.Tensor = (matrix / scale).round().clamp(-most, most) * scale
        return rounded

    return change


def two_of_four(matrix: torch.Tensor) -> torch.Tensor:
    """The two smaller of every four neighbouring weights of a row set to zero: what sparse kernels take."""
    groups = matrix.reshape(matrix.shape[0], -1, 4)
    kept = groups.abs().topk(2, dim=-1).indices
    return (groups * torch.zeros_like(groups).scatter_(-1, kept, 1.0)).reshape(matrix.shape)


ARMS: Mapping[str, Change] = {
    "float32": lambda matrix: matrix,
    "bfloat16": lambda matrix: matrix.bfloat16().float(),
    "int8": rounded_rows(8),
    "int6": rounded_rows(6),
    "int4": rounded_rows(4),
    "2:4 sparse": two_of_four,
}


def changed(folder: Path, change: Change, out: Path) -> None:
    """Writes a copy of a model whose matrices inside the layers are changed."""
    shutil.copytree(folder, out, dirs_exist_ok=True)
    for path in out.glob("*.safetensors"):
        weights = load_file(path)
        save_file(
            {
                name: (change(weight.float()) if weight.ndim == 2 and "layers" in name else weight.float())
                for name, weight in weights.items()
            },
            path,
            metadata={"format": "pt"},
        )


def keys(scale: Scale) -> list[Key]:
    """An arm for each change and temperature."""
    return [(arm, temperature) for temperature in (0.0, 0.8) for arm in ARMS]


def measure(pair: ModelPair, key: Key) -> dict[str, Any]:
    """Acceptance of the changed drafter on the target's texts."""
    arm, temperature = str(key[0]), float(key[1])
    with tempfile.TemporaryDirectory(prefix="outrider-changed-") as folder:
        changed(pair.drafter_path, ARMS[arm], Path(folder))
        drafter = PackedLM.load(folder, check=False)
    texts = rights(drafter, pair.texts(temperature))
    return {
        "arm": arm,
        "temperature": temperature,
        "alpha": round(sum(map(sum, texts)) / sum(map(len, texts)), 4),
        "acceptance_length": round(acceptance_length(all_rounds(texts, LENGTH)), 3),
        "places": sum(map(len, texts)),
    }


def judge(rows: Rows) -> Sequence[Judged]:
    """Holds the predictions against the rows."""
    alpha = {arm: only(rows, arm=arm, temperature=0.0)["alpha"] for arm in ARMS}
    lost = {arm: 100 * (alpha["float32"] - value) for arm, value in alpha.items()}
    return (
        Judged(f"{lost['bfloat16']:+.1f} points", abs(lost["bfloat16"]) <= 0.5),
        Judged(f"{lost['int8']:+.1f} points", lost["int8"] <= 2.0),
        Judged(
            f"{lost['int4']:+.1f} points at 4 bits, {lost['2:4 sparse']:+.1f} sparse",
            lost["2:4 sparse"] > lost["int4"] > lost["int8"],
        ),
    )


def panels(rows: Rows) -> Sequence[Panel]:
    """Bars of acceptance and of tokens a round."""
    arms = tuple(ARMS)

    def bars(field: str) -> tuple[Curve, ...]:
        return tuple(
            Curve(
                f"T = {temperature:g}",
                arms,
                tuple(only(rows, arm=arm, temperature=temperature)[field] for arm in arms),
            )
            for temperature in (0.0, 0.8)
        )

    return (
        Panel("Per-token acceptance", "", "share", bars("alpha")),
        Panel(f"Chains of {LENGTH} tokens", "", "tokens per round", bars("acceptance_length")),
    )


X13 = Experiment(
    name="X13",
    question="What does a quantised or pruned drafter lose?",
    predictions=(
        "bfloat16 changes greedy acceptance by half a point at most",
        "weights of 8 bits cost 2 points at most",
        "4 bits cost more than 8, and pruning half of the weights without training costs more than 4 bits",
    ),
    refuted_by="8 bits that cost more than 2 points: quantisation would then have to be paid for in drafts",
    keys=keys,
    measure=measure,
    judge=judge,
    panels=panels,
)
