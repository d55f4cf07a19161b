"""Small models that `outrider distil` trains: a second drafter beside a first, and one that writes blocks."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafter_service.drafters import load
from drafter_service.settings import DrafterSettings
from outrider.folder_lock import LOCK
from speculative.errors import InvalidRequest
from tests.training.conftest import TEXTS, quiet
from training.heads.block_lm import BlockLM
from training.heads.boost import FirstDrafter
from training.heads.frozen import FrozenTarget
from training.heads.job import distil
from training.heads.recipe import DistilOptions
from training.heads.small_lm import SmallLM
from training.heads.unrolled import unrolled
from training.loop import Interrupted


@pytest.fixture
def first(options: DistilOptions, small: Path, tmp_path: Path) -> Path:
    """A drafter that has learnt a little."""
    out = tmp_path / "first"
    distil(replace(options, kind="lm", drafter=str(small), steps=30, rate=1e-2, out=out), TEXTS, quiet)
    return out


def test_places_that_the_first_drafter_has_right_weigh_less(first: Path, target: Path) -> None:
    frozen = FrozenTarget.load(str(target), "cpu")
    ids = torch.arange(64).reshape(2, 32) % 280
    features = frozen.features(ids)
    model = SmallLM.load(str(first), frozen)
    right = model.logits(model.hidden(ids)).argmax(-1) == frozen.parts.lm_head(features).argmax(-1)
    weights = FirstDrafter.load(str(first), frozen, 0.25).weights(frozen, ids, features)
    assert weights.mean() == pytest.approx(1.0)
    assert 0 < right.sum() < right.numel()
    assert torch.allclose(weights[right] / weights[~right].mean(), torch.tensor(0.25))
    even = FirstDrafter.load(str(first), frozen, 1.0).weights(frozen, ids, features)
    assert torch.equal(even, torch.ones_like(even))


def test_a_weight_of_zero_takes_a_place_out_of_the_loss(options: DistilOptions, small: Path) -> None:
    frozen = FrozenTarget.load(options.target, "cpu")
    head = SmallLM.load(str(small), frozen)
    ids = torch.arange(64).reshape(2, 32) % 280
    weights = torch.ones(2, 32)
    weights[1] = 0.0
    loss = replace(options, kind="lm", depth=1).loss

    def of(rows: torch.Tensor, weights: torch.Tensor | None) -> float:
        return loss.of_batch(head, frozen, rows, frozen.features(rows), None, weights).item()

    assert of(ids, weights) == pytest.approx(0.5 * of(ids[:1], None), rel=1e-2)
    assert of(ids, torch.ones(2, 32)) == pytest.approx(of(ids, None), rel=1e-4)


def test_a_second_drafter_is_measured_beside_the_first(
    options: DistilOptions, small: Path, first: Path, tmp_path: Path
) -> None:
    asked = replace(
        options,
        kind="lm",
        drafter=str(small),
        boost_of=str(first),
        work=tmp_path / "two",
        steps=20,
        rate=1e-2,
    )
    result = distil(asked, TEXTS, quiet)
    for name, found in result["boost"].items():
        both = found["both"]["acceptance_length"]
        assert both > 0.97 * found["first"]["acceptance_length"]  # the last round of a text may be cut off
        assert both > 0.97 * result["acceptance"][name]["after"]["acceptance_length"]
    card = (options.out / "README.md").read_text()
    assert f"--boost-of {first} --boost 0.2" in card
    assert f"Beside `{first}`, greedy" in card


def test_a_block_is_drafted_from_the_text_up_to_its_root_alone(options: DistilOptions, small: Path) -> None:
    """What comes behind a root, and other roots' masks, change nothing."""
    frozen = FrozenTarget.load(options.target, "cpu")
    head = BlockLM.widened(str(small), frozen, 3).eval()
    ids = torch.arange(40).reshape(1, 40) + 7
    roots = torch.tensor([3, 9, 20])
    with torch.no_grad():
        together = head.block(ids, roots)
        for at, root in enumerate(roots.tolist()):
            alone = torch.cat([ids[:, : root + 1], torch.tensor([list(head.masks)])], dim=1)
            expected = head.hidden(alone)[:, root:]
            assert torch.allclose(together[:, at], expected, atol=1e-5)
    assert head.logits(together).shape == (1, 3, 4, frozen.parts.shape.vocabulary_size)


def test_a_block_learns_the_tokens_behind_the_one_that_the_target_adds_to_a_root(
    options: DistilOptions, small: Path
) -> None:
    frozen = FrozenTarget.load(options.target, "cpu")
    head = BlockLM.widened(str(small), frozen, 3).eval()
    ids, roots = torch.arange(40).reshape(1, 40) + 7, torch.tensor([3, 9, 20])
    with torch.no_grad():
        (first, _), *_ = unrolled(head, ids, frozen.features(ids), 3, roots)
        expected = head.logits(head.hidden(ids)[:, roots + 1])
    assert torch.allclose(first, expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["lm", "block"])
def test_a_model_of_another_width_is_refused_before_any_text_is_written(
    options: DistilOptions, small: Path, tmp_path: Path, kind: str
) -> None:
    widened = tmp_path / "widened"
    BlockLM.widened(str(small), FrozenTarget.load(options.target, "cpu"), 3).write(widened)
    with pytest.raises(InvalidRequest, match="its last 3 ids are masks: give the model that it was trained"):
        distil(replace(options, kind=kind, drafter=str(widened)), TEXTS, quiet)
    assert [path.name for path in options.work.iterdir()] == [LOCK]


@pytest.mark.slow
def test_a_block_drafter_learns_places_further_away(options: DistilOptions, small: Path) -> None:
    trained = replace(
        options, kind="block", drafter=str(small), steps=120, rate=1e-2, held_tokens=24, depth=4
    )
    found = distil(trained, TEXTS, quiet)["acceptance"]["greedy"]
    assert found["after"]["acceptance_length"] > found["before"]["acceptance_length"]
    made = load(DrafterSettings(model=str(options.out), drafter="block", threads=1, passes="eager"))
    assert len(made.abilities.masks) == 3


def test_a_model_with_dropout_ends_with_the_same_weights_however_often_its_run_is_stopped(
    options: DistilOptions, small: Path, tmp_path: Path
) -> None:
    forgetful = tmp_path / "forgetful"
    shutil.copytree(small, forgetful)
    config = json.loads((forgetful / "config.json").read_text())
    (forgetful / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    chosen = replace(options, kind="lm", drafter=str(forgetful), data="fixed")
    whole = replace(chosen, out=tmp_path / "whole", work=tmp_path / "whole.work")
    distil(whole, TEXTS, quiet)
    with pytest.raises(Interrupted):
        distil(chosen, TEXTS, stopped_after(3))
    distil(chosen, TEXTS, quiet)
    one, other = (load_file(made.out / "model.safetensors") for made in (whole, chosen))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("flag", ["drafter", "boost_of"])
def test_a_work_folder_of_other_weights_in_the_same_folder_is_refused(
    options: DistilOptions, small: Path, tmp_path: Path, flag: str
) -> None:
    model = Path(shutil.copytree(small, tmp_path / "model"))
    chosen = replace(options, kind="lm", steps=1, data="fixed", drafter=str(small))
    chosen = replace(chosen, **{flag: str(model)})  # type: ignore[arg-type]
    distil(chosen, TEXTS, quiet)
    weights = load_file(model / "model.safetensors")
    save_file({name: one + 1 for name, one in weights.items()}, model / "model.safetensors", {"format": "pt"})
    said = f"the weights of --{flag.replace('_', '-')} have changed since this run began: give another --work"
    with pytest.raises(InvalidRequest, match=said):
        distil(chosen, TEXTS, quiet)


def test_a_work_folder_of_a_version_that_did_not_keep_the_drafters_weights_is_used_and_completed(
    options: DistilOptions, small: Path
) -> None:
    chosen = replace(options, kind="lm", steps=1, data="fixed", drafter=str(small))
    distil(chosen, TEXTS, quiet)
    kept = options.work / "data.json"
    now = json.loads(kept.read_text())
    kept.write_text(json.dumps({name: value for name, value in now.items() if name != "weights of drafter"}))
    distil(chosen, TEXTS, quiet)
    assert json.loads(kept.read_text()) == now


def test_settings_that_differ_from_the_earlier_runs_are_named_as_the_flags_are(
    options: DistilOptions, small: Path
) -> None:
    chosen = replace(options, kind="lm", steps=1, data="fixed", drafter=str(small))
    distil(chosen, TEXTS, quiet)
    with pytest.raises(InvalidRequest, match=r"--boost was 0.2 and is now 0.5: give another --work"):
        distil(replace(chosen, boost=0.5), TEXTS, quiet)
    with pytest.raises(
        InvalidRequest, match="and the text has changed since, --tokens was 2048 and is now 1024"
    ):
        distil(replace(chosen, tokens=1024), TEXTS[1:], quiet)


def stopped_after(steps: int) -> Callable[..., None]:
    """A progress that asks the run to stop after so many steps of training."""

    def show(name: str, done: int, total: int, remark: str = "") -> None:
        if (name, done) == ("training", steps):
            os.kill(os.getpid(), signal.SIGTERM)

    return show
