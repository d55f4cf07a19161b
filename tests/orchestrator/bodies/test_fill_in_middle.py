"""Prompts for text in the middle, by the marks that tokenizers have."""

import pytest

from orchestrator.front.http.bodies.fill_in_middle import MARKS, fill_in_middle
from orchestrator.front.http.field_faults import FieldRefused


def test_the_families_marks_stand_around_the_texts() -> None:
    qwen = {"<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|im_end|>"}
    assert fill_in_middle("a(", ")", qwen) == "<|fim_prefix|>a(<|fim_suffix|>)<|fim_middle|>"
    assert fill_in_middle("a(", ")", {"[PREFIX]", "[SUFFIX]"}) == "[SUFFIX])[PREFIX]a("


@pytest.mark.parametrize("marks", MARKS)
def test_a_family_needs_all_of_its_marks(marks: tuple[str, ...]) -> None:
    with pytest.raises(FieldRefused, match="no special tokens"):
        fill_in_middle("a", "b", {marks[0]})
