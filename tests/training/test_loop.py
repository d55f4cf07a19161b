"""The training loop stops and goes on without losing or repeating anything."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import BinaryIO

import pytest
import torch

from training.loop import Interrupted, Run, Settings, plateaued

FOREVER = Settings(budget=1e9, rate=1e-2, evaluate_every=1e9, save_every=1e9)


class Tiny:
    """A linear model, its loss, and the steps and batches that were asked for."""

    def __init__(self, stop_at: int) -> None:
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 4)
        self.model = torch.nn.Sequential(self.layer)
        self.steps: list[int] = []
        self.stop_at = stop_at

    def loss(self, step: int, _share: float) -> torch.Tensor:
        self.steps.append(step)
        if step + 1 == self.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        output: torch.Tensor = self.model(batch)
        return (output - batch.flip(1)).square().mean()


def run_until(stop_at: int, folder: Path) -> Tiny:
    tiny = Tiny(stop_at)
    with pytest.raises(Interrupted):
        Run("tiny", tiny.model, FOREVER, folder).train(tiny.loss, lambda: 1.0)
    return tiny


def test_a_terminated_run_goes_on_with_the_step_after_its_last(tmp_path: Path) -> None:
    assert run_until(5, tmp_path).steps == [0, 1, 2, 3, 4]
    assert run_until(9, tmp_path).steps == [5, 6, 7, 8]


def test_a_run_in_two_parts_ends_with_the_weights_of_a_run_in_one(tmp_path: Path) -> None:
    parts, whole = tmp_path / "parts", tmp_path / "whole"
    for folder in (parts, whole):
        folder.mkdir()
    run_until(5, parts)
    assert torch.equal(run_until(9, parts).layer.weight, run_until(9, whole).layer.weight)


def test_a_run_that_is_terminated_behind_its_last_step_ends_as_terminated_and_is_finished(
    tmp_path: Path,
) -> None:
    def evaluate() -> float:
        os.kill(os.getpid(), signal.SIGTERM)
        return 2.5

    short, first, second = Settings(budget=0.05, rate=1e-2), Tiny(0), Tiny(0)
    with pytest.raises(Interrupted):
        Run("tiny", first.model, short, tmp_path).train(first.loss, evaluate)
    Run("tiny", second.model, short, tmp_path).train(second.loss, lambda: 2.5)
    assert not second.steps


def test_the_handler_of_sigterm_is_put_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    run_until(1, tmp_path)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_checkpoint_cut_short_while_written_does_not_replace_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_until(5, tmp_path)
    run = Run("tiny", Tiny(0).model, FOREVER, tmp_path)

    def cut_short(_state: object, file: BinaryIO) -> None:
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", cut_short)
    with pytest.raises(OSError, match="disk full"):
        run.save()
    assert Run("tiny", Tiny(0).model, FOREVER, tmp_path).progress.step == 5


def test_a_checkpoint_on_a_full_disk_is_an_error_that_says_so(tmp_path: Path) -> None:
    run = Run("tiny", Tiny(0).model, FOREVER, tmp_path)
    (tmp_path / "tiny.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        run.save()


def test_a_finished_run_is_not_trained_further(tmp_path: Path) -> None:
    short = Settings(budget=0.05, rate=1e-2)
    first, second = Tiny(0), Tiny(0)
    Run("tiny", first.model, short, tmp_path).train(first.loss, lambda: 2.5)
    Run("tiny", second.model, short, tmp_path).train(second.loss, lambda: 2.5)
    assert first.steps
    assert not second.steps
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [(line["run"], line["held_out_loss"]) for line in lines] == [("tiny", 2.5)]


def test_less_than_a_hundredth_in_half_an_hour_is_a_standstill() -> None:
    assert plateaued([(0.0, 3.0), (1800.0, 2.98)])
    assert not plateaued([(0.0, 3.0), (1800.0, 2.96)])
    assert not plateaued([(0.0, 3.0), (1700.0, 3.0)])
    assert not plateaued([])
