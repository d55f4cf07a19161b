"""The table of families, and the choice among candidates."""

import tomllib

import pytest

from outrider.pair.drafter_choice import (
    LARGEST_SHARE,
    TABLE,
    SizedModel,
    cached_siblings,
    choose_drafter,
    listed_siblings,
)


def test_the_table_names_each_model_once_with_its_size() -> None:
    families = tomllib.loads(TABLE.read_text())
    names = [name for models in families.values() for name in models]
    assert len(names) == len(set(names))
    assert all(size > 0 for models in families.values() for size in models.values())
    assert all(name.count("/") == 1 for name in names)


@pytest.mark.parametrize(
    "target",
    [
        "Qwen/Qwen3-8B",
        "Qwen/Qwen3-8B@main",
        "/weights/Qwen3-8B",
        "Qwen/Qwen3-8B-FP8",
        "someone/Qwen3-8B-AWQ",
        "unsloth/Qwen3-8B-bnb-4bit",
        "RedHatAI/Qwen3-8B-quantized.w4a16",
    ],
)
def test_a_model_is_known_by_its_name_whoever_quantised_it(target: str) -> None:
    assert [one.name for one in listed_siblings(target)] == ["Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B"]


def test_a_model_that_no_family_has_or_that_is_its_smallest_has_no_siblings() -> None:
    assert listed_siblings("me/own") == []
    assert listed_siblings("Qwen/Qwen3-0.6B") == []


def test_models_of_this_machine_come_smallest_first_without_large_ones() -> None:
    found = cached_siblings(
        [("b", 20), ("large", int(100 * LARGEST_SHARE) + 1), ("a", 10), ("empty", 0)], 100
    )
    assert [one.name for one in found] == ["a", "b"]


def test_the_first_model_that_can_draft_is_chosen_and_the_others_keep_their_reason() -> None:
    models = [SizedModel("a", 1, "first"), SizedModel("b", 2, "second"), SizedModel("c", 3, "third")]
    choice = choose_drafter(models, lambda name: "gated" if name == "a" else "")
    assert (choice.drafter, choice.why, choice.passed_over) == ("b", "second", (("a", "gated"),))
    nothing = choose_drafter(models, lambda name: "no")
    assert nothing.drafter == ""
    assert nothing.why.endswith("lookup drafts alone")
    assert len(nothing.passed_over) == 3
