"""Prompts for text in the middle, between a prefix and a suffix, by the marks that a tokenizer has. Pure."""

from collections.abc import Set
from typing import NamedTuple

from orchestrator.front.http.field_faults import FieldRefused


class MiddleMarks(NamedTuple):
    """The special tokens that a family of models was trained to fill gaps with."""

    prefix: str
    """Before the text that precedes the gap."""
    suffix: str
    """Before the text that follows the gap."""
    middle: str
    """Behind both texts: the model's answer follows; empty: the answer follows the prefix."""
    suffix_first: bool = False
    """Whether the suffix stands before the prefix."""


MARKS = (
    MiddleMarks("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen Coder, CodeGemma
    MiddleMarks("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, StarCoder2, Granite Code
    MiddleMarks("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    MiddleMarks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    MiddleMarks("[PREFIX]", "[SUFFIX]", "", suffix_first=True),  # Codestral
)


def fill_in_middle(prefix: str, suffix: str, added_tokens: Set[str]) -> str:
    """The prompt whose answer stands between the two texts.

    Raises FieldRefused where the tokenizer has no family's marks.

    Args:
        added_tokens: texts of the tokens that the tokenizer adds to its vocabulary.
    """
    for marks in MARKS:
        if added_tokens >= {mark for mark in marks[:3] if mark}:
            before, after = marks.prefix + prefix, marks.suffix + suffix
            return (after + before if marks.suffix_first else before + after) + marks.middle
    raise FieldRefused(
        "suffix", "suffix cannot be used: the model's tokenizer has no special tokens for text in the middle"
    )
