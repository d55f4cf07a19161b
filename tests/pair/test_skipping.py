"""The search of layers that a target can skip."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from outrider.cli.models import app
from outrider.lm.continuations import Continuations
from outrider.pair.costs import Cost
from outrider.pair.skipping import Skipped, linear_cost, search, speedup
from tests.lm.families import model_of

PROMPTS = [[3, 17, 40], [5, 22, 8, 9]]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_layer_that_does_nothing_is_skipped_first(temperature: float) -> None:
    model = model_of("llama")
    with torch.no_grad():
        model.model.layers[2].self_attn.o_proj.weight.zero_()
        model.model.layers[2].mlp.down_proj.weight.zero_()
    texts = Continuations(model, PROMPTS, 8, temperature)
    found = list(search(texts, lambda kept: kept / 4))
    assert [len(one.layers) for one in found] == [1, 2, 3]
    assert found[0] == Skipped((2,), 1.0, 0.75)
    assert found[-1].acceptance < 1.0
    assert set(found[0].layers) < set(found[1].layers)
    assert texts.acceptance(()) == 1.0, "nothing is left skipped behind a search"
    assert texts.acceptance((0, 1), guesses=61) == 1.0


def test_speed_counts_each_drafted_token_s_pass() -> None:
    assert speedup(1.0, 0.5, 3) == pytest.approx(4 / 2.5)
    assert speedup(0.5, 0.5, 1) == 1.0, "an acceptance that equals the cost breaks even"
    assert Skipped((1,), 0.3, 0.6).speedup == 1.0, "drafting nothing is plain decoding"


def test_the_cost_of_layers_is_what_passes_of_the_whole_and_of_half_say() -> None:
    measured = Cost(10.0, 0.1), Cost(6.0, 0.1)
    assert linear_cost(8, 4, 8, measured=measured) == pytest.approx(1.0)
    assert linear_cost(8, 4, 6, measured=measured) == pytest.approx(0.8)
    assert linear_cost(8, 4, 1, measured=measured) == pytest.approx(0.3)


def test_the_command_names_sets_of_layers_and_what_they_bring(tiny_llama: Path) -> None:
    arguments = ["skip", str(tiny_llama), "--tokens", "4", "--prompts", "1", "--threads", "1", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    (only,) = json.loads(result.stdout.splitlines()[-1])["sets"]
    assert only["skip"] in ([0], [1])
    assert 0 <= only["acceptance"] <= 1
