"""The sets of prompts that sources are measured on, each with another kind of text to copy from."""

import keyword
import random
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from benchmarks.shared.heldout import held_out_records, tokenizer_of
from benchmarks.shared.questions import Question, read_questions

PYTHON_TASKS = Path(__file__).parents[1] / "spec_bench" / "python_tasks.jsonl"
HELD_OUT, EDITS, MULTI_TURN, RELATED = "held_out", "edits", "multi_turn", "related"
SETS = (HELD_OUT, EDITS, MULTI_TURN, RELATED)
CORRUPTED = (0.0, 0.02, 0.1)
"""Shares of replaced tokens in the files of `edits`, which prompts take in turn."""
_FILE = 1000
"""Characters of a file that is to be edited."""
_BEGUN = 200
"""Characters of the edited file that the prompt holds; the answer goes on from there."""
_IDENTIFIER = re.compile(r"\b[a-z_][a-z0-9_]{3,}\b")


class PromptSet(NamedTuple):
    """Requests of one kind, conversations among them."""

    name: str
    questions: tuple[Question, ...]
    edit: bool = False
    """Whether the prompt's last document is a reference of the request."""


def prompt_set(name: str, target: str, count: int) -> PromptSet:
    """The first `count` requests of a set, or all of fewer.

    Args:
        name: one of SETS.
        target: folder of the target, whose tokens are replaced in `edits`.
    """
    if name == HELD_OUT:
        return PromptSet(name, _numbered(name, [record["prompt"] for record in held_out_records(count)]))
    if name == EDITS:
        return PromptSet(name, _numbered(name, edited_files(tokenizer_of(target), count)), edit=True)
    task = {MULTI_TURN: "two_turns", RELATED: "related"}[name]
    asked = [question for question in read_questions(PYTHON_TASKS) if question.task == task]
    return PromptSet(name, tuple(asked[:count]))


def edited_files(tokenizer: Tokenizer, count: int) -> list[str]:
    """Prompts that hold a file and the beginning of the same file with its commonest name changed.

    Tokens of the file are replaced by random ones, as many as CORRUPTED says; its beginning is as it was.
    """
    prompts = []
    for number, record in enumerate(held_out_records(count)):
        text = (record["prompt"] + record["continuation"])[:_FILE]
        file = corrupted(tokenizer, text, CORRUPTED[number % len(CORRUPTED)], number)
        prompts.append(f"{file}\n\n\n{renamed_once(text)[:_BEGUN]}")
    return prompts


def corrupted(tokenizer: Tokenizer, text: str, share: float, seed: int) -> str:
    """The text with about this share of its tokens replaced by any of the vocabulary."""
    chance = random.Random(seed)
    size = tokenizer.get_vocab_size()
    ids = [chance.randrange(size) if chance.random() < share else id_ for id_ in tokenizer.encode(text).ids]
    decoded: str = tokenizer.decode(ids)
    return decoded


def renamed_once(text: str) -> str:
    """The text with its commonest identifier renamed, keywords left out."""
    found = Counter(name for name in _IDENTIFIER.findall(text) if not keyword.iskeyword(name))
    found.pop("self", None)
    name = max(found, key=lambda one: (found[one], one))
    return re.sub(rf"\b{name}\b", f"other_{name.strip('_')}", text)


def _numbered(name: str, prompts: list[str]) -> tuple[Question, ...]:
    return tuple(Question(number, name, (prompt,)) for number, prompt in enumerate(prompts))
