"""Whose weights a learning head goes on with: those learnt from the given head and target, and no others."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outrider.learning.versions import WeightVersions
from outrider.lm.heads.medusa import MedusaHeads
from outrider.lm.heads.published import write_head
from outrider.lm.runner import PackedLM
from outrider.runtime.metrics import Metrics
from speculative.errors import InvalidRequest
from tests.lm.random_heads import shaken
from training.heads.frozen import FrozenTarget
from verifier_service.learning.service import HeadLearning
from verifier_service.settings import VerifierSettings

COMMIT = "1" * 40


@pytest.fixture(scope="module")
def target(tiny_llama: Path) -> PackedLM:
    return PackedLM.load(str(tiny_llama), check=False)


@pytest.fixture(scope="module")
def heads(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two heads of other training, `a` and `b`, with their weights in files of pickles."""
    folder, parts = tmp_path_factory.mktemp("heads"), FrozenTarget.load(str(tiny_llama), "cpu").parts
    for seed, name in enumerate("ab"):
        write_head(shaken(MedusaHeads(parts, 3), seed), folder / name, torch.float32)
        written = folder / name / MedusaHeads.weights_file
        torch.save(load_file(written), folder / name / "medusa_lm_head.pt")
        written.unlink()
    return folder


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch, tiny_llama: Path, tmp_path: Path) -> Path:
    """The snapshot of org/tiny as it is before a first load: its configuration alone."""
    cache = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("huggingface_hub.constants.HF_HUB_CACHE", "transformers.utils.hub.constants.HF_HUB_CACHE"):
        monkeypatch.setattr(name, str(cache))
    snapshot = cache / "models--org--tiny" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    shutil.copy(tiny_llama / "config.json", snapshot)
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    for ref in ("main", "better"):
        (refs / ref).write_text(COMMIT)
    return snapshot


def learning(head: Path, folder: Path, **given: Any) -> HeadLearning:
    settings = {"heads": str(head), "learn": "tenant:ann", "learn_dir": folder, "device": "cpu", **given}
    return HeadLearning(VerifierSettings(**settings, passes="eager"), Metrics("verifier"))


def versions_of(taught: HeadLearning) -> WeightVersions:
    assert taught._learner is not None
    return taught._learner._versions


@pytest.mark.parametrize("model", ["org/tiny", "org/tiny@better"])
def test_a_target_that_the_first_start_downloads_is_the_same_at_the_next(
    model: str, target: PackedLM, tiny_llama: Path, heads: Path, cached: Path, tmp_path: Path
) -> None:
    first = learning(heads / "a", tmp_path / "learnt", model=model)
    for file in tiny_llama.iterdir():  # as the load of the target leaves the snapshot
        shutil.copy(file, cached)
    first.make_head(target)
    taught = versions_of(first)
    taught.begin()
    shutil.copytree(heads / "a", taught.name_of(1))
    taught.use(1)
    first.stop(10.0)
    again = learning(heads / "a", tmp_path / "learnt", model=model)
    again.make_head(target)
    assert (versions_of(again).state.current, again._serving) == (1, 1)
    again.stop(10.0)


def test_another_head_in_a_file_of_pickles_is_refused_what_the_first_learnt(
    target: PackedLM, tiny_llama: Path, heads: Path, tmp_path: Path
) -> None:
    first = learning(heads / "a", tmp_path / "learnt", model=str(tiny_llama))
    first.make_head(target)
    versions_of(first).begin()
    first.stop(10.0)
    other = learning(heads / "b", tmp_path / "learnt", model=str(tiny_llama))
    with pytest.raises(InvalidRequest, match="give another --learn-dir, or remove this one"):
        other.make_head(target)


def test_weights_that_nothing_tells_from_others_are_refused(
    target: PackedLM, heads: Path, cached: Path, tmp_path: Path
) -> None:
    taught = learning(heads / "a", tmp_path / "learnt", model="org/tiny")
    with pytest.raises(
        InvalidRequest, match=r"--model org/tiny: .*give a folder or id that has both, or drop"
    ):
        taught.make_head(target)
    assert not (tmp_path / "learnt").exists()
