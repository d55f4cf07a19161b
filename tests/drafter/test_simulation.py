"""The simulator that trees are tuned with: runs, and says that a better drafter is better."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import drafter_sim


@pytest.fixture
def simulate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_llama: Path
) -> Callable[..., dict[str, Any]]:
    """Runs the benchmark small, with a drafter and flags; returns its last line."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "def add(left, right):"}) + "\n")

    def run(drafter: Path, *flags: str) -> dict[str, Any]:
        arguments = ["--target", str(tiny_llama), "--drafter", str(drafter), "--prompts", str(prompts)]
        monkeypatch.setattr(sys, "argv", ["drafter_sim", *arguments, "--tokens", "16", *flags])
        drafter_sim.main()
        line: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
        return line

    return run


def test_a_drafter_that_is_the_target_is_better_than_another(
    simulate: Callable[..., dict[str, Any]], tiny_llama: Path, tiny_llama_b: Path
) -> None:
    same, other = simulate(tiny_llama, "--scale", "0.1"), simulate(tiny_llama_b, "--json")
    assert same["name"] == "drafter_sim"
    for temperature in ("0", "0.8"):
        lengths = [found["by_temperature"][temperature]["acceptance_length"] for found in (same, other)]
        assert lengths[0] > lengths[1] >= 1


def test_without_drafts_every_round_commits_one_token(
    simulate: Callable[..., dict[str, Any]], tiny_llama: Path
) -> None:
    found = simulate(tiny_llama, "--node-limit", "0", "--temperature", "0")["by_temperature"]["0"]
    assert (found["acceptance_length"], found["bare_rounds"]) == (1.0, 1.0)
