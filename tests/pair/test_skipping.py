"""The search of layers that a target can skip."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from outrider.cli.models import app
from outrider.lm.continuations import Continuations
from outrider.lm.load.part import ModelPart
from outrider.lm.runner import PackedLM
from outrider.pair import skipping
from outrider.pair.costs import Cost
from outrider.pair.skipping import Shares, Skipped, measure_shares, search, speedup, units_of
from outrider.skip_set import SkipSet, Sublayer, read_skips, whole_layers
from speculative.errors import ModelRefused
from tests.lm.families import model_of

PROMPTS = [[3, 17, 40], [5, 22, 8, 9]]


EQUAL = Shares(0.1, 0.1)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_layer_that_does_nothing_is_skipped_first(temperature: float) -> None:
    model = model_of("llama")
    with torch.no_grad():
        model.model.layers[2].self_attn.o_proj.weight.zero_()
        model.model.layers[2].mlp.down_proj.weight.zero_()
    texts = Continuations(model, PROMPTS, 8, temperature)
    found = list(search(texts, units_of(texts, whole=True), EQUAL.cost))
    assert [len(one.skip) for one in found] == [2, 4, 6]
    assert found[0] == Skipped(whole_layers([2]), 1.0, 0.8)
    assert found[-1].acceptance < 1.0
    assert found[0].skip < found[1].skip
    assert texts.acceptance(frozenset()) == 1.0, "nothing is left skipped behind a search"
    assert texts.acceptance(whole_layers([0, 1]), guesses=61) == 1.0


def test_a_sublayer_that_does_nothing_is_skipped_first() -> None:
    model = model_of("qwen3")
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight.zero_()
        model.model.layers[2].mlp.down_proj.weight.zero_()
    texts = Continuations(model, PROMPTS, 8)
    found = list(search(texts, units_of(texts), Shares(0.05, 0.1).cost))
    assert [len(one.skip) for one in found] == list(range(1, 8)), "one attention is left"
    assert found[0] == Skipped(frozenset([Sublayer(2, "mlp")]), 1.0, 0.9), "of two equals the dearer"
    assert found[1].skip == {Sublayer(1, "attention"), Sublayer(2, "mlp")}
    assert (found[1].acceptance, found[1].cost) == (1.0, pytest.approx(0.85))
    assert found[1].written == ("1.attention", "2.mlp")
    assert texts.acceptance(frozenset()) == 1.0


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_acceptance_without_sublayers_is_that_of_a_drafter_without_them(family: str) -> None:
    skip = read_skips(["0.attention", "3.mlp"])
    whole, part = model_of(family), model_of(family)
    texts = Continuations(whole, PROMPTS, 12)
    ModelPart(skip).apply(part)
    right = 0
    for prompt in PROMPTS:
        made = whole.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0)
        with torch.no_grad():
            scores = part(made[:, :-1], use_cache=False).logits[0, len(prompt) - 1 :]
        right += int((scores.topk(8).indices == made[0, len(prompt) :, None]).sum())
    assert texts.acceptance(skip, guesses=8) == right / 24
    assert 0 < right < 24


def test_layers_of_another_form_are_searched_whole() -> None:
    texts = Continuations(model_of("gemma3_text"), PROMPTS, 4)
    found = list(search(texts, units_of(texts), EQUAL.cost))
    assert [len(one.skip) for one in found] == [2, 4, 6]
    with pytest.raises(ModelRefused, match="no sublayer of gemma3_text can be skipped"):
        texts.acceptance(frozenset([Sublayer(0, "mlp")]))


def test_a_search_ends_in_time_with_the_sets_that_are_complete() -> None:
    texts = Continuations(model_of("llama"), PROMPTS, 4)
    passes = iter(range(100))
    said: list[str] = []
    found = list(search(texts, units_of(texts), EQUAL.cost, said.append, lambda: next(passes) >= 8 + 7 + 3))
    assert [len(one.skip) for one in found] == [1, 2]
    assert said[-1] == "the time is over: sets of more than 2 sublayers were not searched"


def test_speed_counts_each_drafted_token_s_pass() -> None:
    assert speedup(1.0, 0.5, 3) == pytest.approx(4 / 2.5)
    assert speedup(0.5, 0.5, 1) == 1.0, "an acceptance that equals the cost breaks even"
    assert Skipped((1,), 0.3, 0.6).speedup == 1.0, "drafting nothing is plain decoding"


def test_the_cost_of_a_set_is_what_its_sublayers_take_of_a_pass() -> None:
    shares = Shares(0.05, 0.02)
    assert shares.cost(frozenset()) == 1.0
    assert shares.cost(read_skips(["0.attention", "1"])) == pytest.approx(1 - 0.05 - 0.05 - 0.02)
    assert Shares(0.6, 0.6).cost(whole_layers([0])) == 0.0


@pytest.mark.parametrize(
    ("in_part", "expected"),
    [(True, Shares(0.06, 0.03)), (False, Shares(0.045, 0.045))],
    ids=["parts", "whole"],
)
def test_shares_are_what_passes_without_half_of_the_sublayers_save(
    in_part: bool, expected: Shares, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass takes 0.6 ms for each attention, 0.3 ms for each MLP, and the rest."""
    left: list[SkipSet] = []

    def load(part: ModelPart) -> PackedLM:
        left.append(part.skip)
        model = model_of("llama")
        part.apply(model)
        return PackedLM(model, kv_mb=1)

    def timed(_whole: PackedLM, _part: PackedLM, _clock: object) -> tuple[Cost, Cost]:
        saved = sum(0.6 if kind == "attention" else 0.3 for _, kind in left[-1])
        return Cost(10.0, 0.1), Cost(10.0 - saved, 0.1)

    monkeypatch.setattr(skipping, "measure", timed)
    found = measure_shares(PackedLM(model_of("llama"), kv_mb=1), load, in_part)
    assert (found.attention, found.mlp) == pytest.approx((expected.attention, expected.mlp))
    assert {sublayer.layer for skip in left for sublayer in skip} == {2, 3}


@pytest.mark.parametrize(
    ("flags", "sizes"), [([], [1, 2, 3]), (["--whole-layers"], [1])], ids=["sublayers", "layers"]
)
def test_the_command_names_sets_and_what_they_bring(
    tiny_llama: Path, flags: list[str], sizes: list[int]
) -> None:
    arguments = ["skip", str(tiny_llama), "--tokens", "4", "--prompts", "1", "--threads", "1", "--json"]
    result = CliRunner().invoke(app, [*arguments, *flags])
    counted, what = (2, "layers") if flags else (1, "sublayers")
    assert result.exit_code == 0, result.output
    assert f"searching {4 // counted} {what} for at most 10 minutes, with at most" in result.stderr
    found = json.loads(result.stdout.splitlines()[-1])["sets"]
    assert [len(read_skips(one["skip"])) // counted for one in found] == sizes
    assert all(0 <= one["acceptance"] <= 1 for one in found)
