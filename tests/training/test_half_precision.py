"""Heads for a target in half precision, as a GPU loads it: measured, trained and written as for any other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.training.conftest import TEXTS, quiet
from training.heads import untrained
from training.heads.block_lm import BlockLM
from training.heads.boost import FirstDrafter
from training.heads.frozen import FrozenTarget
from training.heads.job import distil
from training.heads.look_ahead import TrainedLookAhead
from training.heads.recipe import DistilOptions
from training.heads.small_lm import SmallLM
from training.heads.unrolled import TrainedHead, layers_of, unrolled

KINDS = ("medusa", "blockwise", "hydra", "eagle", "eagle3", "mtp", "pass", "lm", "block")
DEVICES = (
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
        ],
    ),
)
DEPTH = 2


def head_of(kind: str, frozen: FrozenTarget, small: Path) -> TrainedHead:
    """An untrained head, the same for targets of the same weights."""
    torch.manual_seed(1)
    made: dict[str, Callable[[], TrainedHead]] = {
        "medusa": partial(untrained.medusa, frozen, DEPTH),
        "blockwise": partial(untrained.blockwise, frozen, DEPTH),
        "hydra": partial(untrained.hydra, frozen, DEPTH),
        "eagle": partial(untrained.eagle, frozen),
        "eagle3": partial(untrained.eagle3, frozen, torch.arange(0, 300, 3)),
        "mtp": partial(untrained.mtp, frozen),
        "pass": partial(TrainedLookAhead, frozen, DEPTH),
        "lm": partial(SmallLM.load, str(small), frozen),
        "block": partial(BlockLM.widened, str(small), frozen, DEPTH),
    }
    return made[kind]()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [*KINDS, "boosted"])
def test_a_head_of_each_kind_is_trained_for_a_target_in_half_precision(
    options: DistilOptions, kind: str, device: str, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FrozenTarget, "load", partial(FrozenTarget.load, dtype="bfloat16"))
    first = str(small) if kind == "boosted" else None
    kind = "lm" if first else kind
    drafter = str(small) if kind in ("lm", "block") else None
    chosen = replace(options, kind=kind, device=device, drafter=drafter, boost_of=first)
    result = distil(chosen, TEXTS, quiet)
    assert result["steps"] == options.steps
    assert all(found["before"] and found["after"] for found in result["acceptance"].values())
    (weights,) = map(load_file, options.out.glob("*.safetensors"))
    numbers = [tensor for tensor in weights.values() if tensor.is_floating_point()]
    assert {tensor.dtype for tensor in numbers} == {torch.bfloat16}
    assert all(tensor.isfinite().all() for tensor in numbers)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_drafts_for_a_target_in_half_precision_nearly_what_it_drafts_in_float32(
    kind: str, dtype: str, target: Path, small: Path
) -> None:
    ids = torch.arange(40).reshape(2, 20) + 7
    roots = torch.arange(2, 12)
    logits = []
    for chosen in ("float32", dtype):
        frozen = FrozenTarget.load(str(target), "cpu", chosen)
        head = head_of(kind, frozen, small)
        with torch.no_grad():
            states = frozen.states(ids, layers_of(head))
            drafted = [step for step, _ in unrolled(head, ids, states.read, DEPTH, roots)]
        logits.append(torch.stack(drafted))
    whole, half = logits
    assert half.dtype == torch.float32
    drafts = whole.isfinite()
    assert torch.equal(drafts, half.isfinite())
    apart = (whole[drafts] - half[drafts]).abs().max()
    assert apart < 0.05 * whole[drafts].abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_of_training_reaches_every_weight_that_float32_reaches(
    kind: str, target: Path, small: Path, options: DistilOptions
) -> None:
    ids = torch.arange(40).reshape(2, 20) + 7
    reached = []
    for dtype in ("float32", "bfloat16"):
        frozen = FrozenTarget.load(str(target), "cpu", dtype)
        head = head_of(kind, frozen, small)
        states = frozen.states(ids, layers_of(head))
        depth = 1 if kind == "lm" else DEPTH
        loss = replace(options, kind=kind, depth=depth).loss.of_batch(
            head, frozen, ids, states.last.clone(), seed=3, read=states.read.clone()
        )
        loss.backward()
        grads = {name: one.grad for name, one in head.named_parameters() if one.grad is not None}
        assert all(grad.dtype == torch.float32 and grad.isfinite().all() for grad in grads.values())
        reached.append({name for name, grad in grads.items() if grad.any()})
    assert reached[0]
    assert reached[0] == reached[1]


def test_places_that_a_first_drafter_has_right_are_found_for_a_target_in_half_precision(
    target: Path,
) -> None:
    frozen = FrozenTarget.load(str(target), "cpu", "bfloat16")
    first = FirstDrafter(SmallLM.load(str(target), frozen), 0.25)  # the target itself, in float32
    ids = torch.arange(64).reshape(2, 32) % 280
    features = frozen.features(ids).clone()
    features[1] *= -1.0
    weights = first.weights(frozen, ids, features)
    assert weights.unique().numel() == 2
    assert (weights[0] < weights.max()).float().mean() > 0.9
    assert (weights[1] == weights.max()).float().mean() > 0.9
