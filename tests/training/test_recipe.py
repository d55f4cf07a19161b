"""The whole recipe, at a toy size: from source text to two folders that load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from training import embedded, evaluate, prompts, tokenizer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    make(folder)
    return folder


def make(folder: Path) -> None:
    options = ["--out", str(folder / "out"), "--work", str(folder / "work"), "--preset", "toy"]
    embedded.main([*options, "--minutes-target", "0.05", "--minutes-drafter", "0.04"])


def held_out_losses(folder: Path, run: str) -> list[float]:
    lines = [json.loads(line) for line in (folder / "work" / "log.jsonl").read_text().splitlines()]
    return [line["held_out_loss"] for line in lines if line["run"] == run]


@pytest.mark.parametrize("name", ["target", "drafter"])
def test_a_made_model_loads_and_predicts_better_than_chance(made: Path, name: str) -> None:
    model = evaluate.load(made / "out" / name)
    bpe = tokenizer.load(made / "out" / name / "tokenizer.json")
    texts = [text.prompt for text in prompts.read(made / "out" / "heldout.jsonl")]
    untrained = torch.log(torch.tensor(float(bpe.get_vocab_size()))).item()
    assert evaluate.loss(model, bpe, texts)["nats_per_token"] < 0.85 * untrained


@pytest.mark.parametrize("name", ["target", "drafter"])
def test_the_held_out_loss_falls(made: Path, name: str) -> None:
    losses = held_out_losses(made, name)
    assert losses[-1] < losses[0]


def test_making_a_finished_pair_again_trains_nothing_and_keeps_the_cards(made: Path) -> None:
    card = made / "out" / "target" / "README.md"
    card.write_text("a card")
    weights = made / "out" / "target" / "model.safetensors"
    before, log = weights.read_bytes(), held_out_losses(made, "drafter")
    make(made)
    assert (weights.read_bytes(), card.read_text()) == (before, "a card")
    assert held_out_losses(made, "drafter") == log


def test_the_evaluation_ends_in_one_json_object(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = made / "out"
    evaluate.main([str(out / "target"), str(out / "drafter"), "--heldout", str(out / "heldout.jsonl")])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["ratio"] > 0
    assert 0 < result["agreement"]["top_1"] <= result["agreement"]["top_4"] <= 1
    assert set(result["held_out"]) == {"target", "drafter"}


def test_a_wrong_preset_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        embedded.main(["--out", "nowhere", "--preset", "enormous"])
    assert "enormous" in capsys.readouterr().err
