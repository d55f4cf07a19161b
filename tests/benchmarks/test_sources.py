"""The benchmark of sources: its prompts, its figures from given runs, and a small run end to end."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from benchmarks.shared.heldout import tokenizer_of
from benchmarks.sources.arms import (
    LOOKUP_BESIDE_MERGED,
    MERGED,
    PLAIN,
    PLAIN_BESIDE_MERGED,
    CellRuns,
    SourceCounts,
)
from benchmarks.sources.cell_figures import cell_figures, least_merged
from benchmarks.sources.noise_trees import trees_of
from benchmarks.sources.prompt_sets import CORRUPTED, SETS, corrupted, prompt_set, renamed_once
from drafter_service.drafters.causal_lm import CausalLMDrafter
from outrider.cli.local.up_settings import embedded
from outrider.lm.runner import PackedLM
from outrider.pair.simulation import continuation
from speculative.params import SamplingParams

TARGET = str(embedded("target"))


def turn(ids: Sequence[int], rounds: int, seconds: float, **accepted: int) -> list[dict[str, Any]]:
    fields = {"ids": list(ids), "rounds": rounds, "seconds": seconds, "accepted": accepted}
    return [fields | {"accept_lengths": [1] * rounds}]


def a_cell(merged: Sequence[int] = range(12)) -> CellRuns:
    """One request of twelve tokens: lookup halves the rounds, the drafter's rounds are slow."""
    return CellRuns(
        by_arm={
            PLAIN: {(0, 0): turn(range(12), 12, 1.2)},
            "lookup": {(0, 0): turn(range(12), 6, 0.6, lookup=6)},
            "drafter": {(0, 0): turn(range(12), 6, 2.4, drafter=6)},
            MERGED: {(0, 0): turn(merged, 4, 0.5, lookup=6, drafter=2)},
            PLAIN_BESIDE_MERGED: {(0, 0): turn(range(12), 12, 1.0)},
        },
        without={
            "lookup": {(0, 0): turn(range(12), 7, 1.0, drafter=5)},
            "drafter": {(0, 0): turn(range(12), 6, 0.6, lookup=6)},
        },
        processor_s={
            name: Counter({"verifier": 0.12, "drafter": 0.03})
            for name in (PLAIN, "lookup", "drafter", MERGED, PLAIN_BESIDE_MERGED)
        },
        counts={"lookup": SourceCounts(12, 6), "drafter": SourceCounts(0, 0)},
    )


def test_merged_sources_are_held_against_the_fastest_single_source() -> None:
    figures = cell_figures(a_cell())

    assert figures["identical"]
    assert figures["best_single"] == ["lookup"]
    assert figures["merged_over_best"]["median"] == 1.2
    assert figures["over_plain"]["drafter"]["median"] == 0.5
    assert figures["acceptance_length"] == {"plain": 1.0, "lookup": 2.0, "drafter": 2.0, "merged": 3.0}
    assert figures["round_ms"] == {"plain": 100.0, "lookup": 100.0, "drafter": 400.0, "merged": 125.0}
    assert figures["processor_ms"][PLAIN] == {"verifier": 10.0, "drafter": 2.5}
    assert figures["processor_ms"][MERGED] == {"verifier": 30.0, "drafter": 7.5}
    assert figures["merged_services_over_others"]["median"] == 1.2
    assert least_merged({"held_out": {"0": figures}}) == 1.2


def test_a_repeat_is_held_against_the_source_that_was_the_fastest_in_the_other_repeats() -> None:
    cell = a_cell()
    for name, seconds in ((PLAIN, 1.2), ("lookup", 2.0), ("drafter", 0.4), (MERGED, 0.5)):
        cell.by_arm[name][0, 1] = turn(range(12), 6, seconds)
    cell.by_arm[PLAIN_BESIDE_MERGED][0, 1] = turn(range(12), 12, 1.2)

    figures = cell_figures(cell)

    assert figures["best_single"] == ["drafter", "lookup"]
    assert figures["merged_over_best"]["median"] == pytest.approx((2.4 / 0.5 + 2.0 / 0.5) / 2)


def test_merged_sources_are_held_against_lookup_by_the_same_services() -> None:
    cell = a_cell()
    cell.by_arm[LOOKUP_BESIDE_MERGED] = {(0, 0): turn(range(12), 6, 0.5, lookup=6)}

    figures = cell_figures(cell)

    assert figures["merged_over_best"]["median"] == 1.0
    assert LOOKUP_BESIDE_MERGED not in figures["round_ms"]


def test_a_source_is_worth_the_rounds_that_are_missing_without_it_per_node() -> None:
    marginal = cell_figures(a_cell())["marginal"]

    assert marginal["lookup"]["gained_tokens"] == 3
    assert marginal["lookup"]["gained_per_node"] == 0.25
    assert marginal["drafter"]["gained_tokens"] == 2
    assert marginal["drafter"]["gained_per_node"] is None, "none of its nodes was computed"


def test_one_other_id_is_not_identical() -> None:
    assert not cell_figures(a_cell(merged=[*range(11), 7]))["identical"]


@pytest.mark.parametrize("name", SETS)
def test_a_set_has_as_many_different_requests_as_asked_for(name: str) -> None:
    prompts = prompt_set(name, TARGET, 3)

    assert len({question.turns for question in prompts.questions}) == 3
    assert prompts.edit == (name == "edits")
    assert all(len(question.turns) == 1 + (name == "multi_turn") for question in prompts.questions)


def test_an_edit_changes_the_commonest_name_wherever_it_stands() -> None:
    text = "def total(values):\n    values = sorted(values)\n    return sum(values)\n"

    assert renamed_once(text) == text.replace("values", "other_values")


@pytest.mark.parametrize("share", CORRUPTED)
def test_about_the_given_share_of_tokens_is_corrupted(share: float) -> None:
    tokenizer = tokenizer_of(TARGET)
    text = "value = value + 1\n" * 100
    ids = tokenizer.encode(text).ids

    changed = corrupted(tokenizer, text, share, 0)

    if share == 0:
        assert changed == text
    else:
        kept = sum(line == "value = value + 1" for line in changed.splitlines())
        assert 100 * (1 - 2 * share) ** (len(ids) / 100) < kept < 100


@pytest.mark.slow
def test_trees_with_the_sessions_noise_beat_trees_of_the_likeliest_tokens_where_tokens_are_drawn() -> None:
    lm = PackedLM.load(TARGET, check=False)
    prompt = lm_prompt()
    texts = [continuation(lm, prompt, SamplingParams(temperature=1.2), seed, 48) for seed in range(3)]

    found = trees_of(CausalLMDrafter(lm), texts, 4)

    # The target drafts for itself, so with the noise its first choice is always right.
    assert found["keyed_noise"] > 3
    assert found["keyed_noise"] > 1.2 * found["top_k"]


def lm_prompt() -> list[int]:
    return list(tokenizer_of(TARGET).encode("import os\n\n\ndef remove(path):\n").ids)


@pytest.mark.long
def test_a_small_run_gives_plain_ids_in_every_arm(bench: Callable[..., dict[str, Any]]) -> None:
    result = bench(
        *("sources", "--sets", "edits", "--temperatures", "0,1", "--sources", "lookup,drafter,references"),
        *("--prompts", "1", "--tokens", "16", "--repeats", "1", "--tree-prompts", "1", "--tree-nodes", "4"),
    )

    assert result["identical"]
    assert set(result["figures"]["edits"]) == {"0", "1"}
    for cell in result["figures"]["edits"].values():
        assert set(cell["marginal"]) == {"lookup", "drafter", "references"}
        assert cell["acceptance_length"]["plain"] == 1
    greedy = result["trees"]["0"]["4"]
    assert greedy["keyed_noise"] == greedy["top_k"], "greedy drafts have no noise to know"
