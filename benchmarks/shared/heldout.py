"""The held-out prompts that benchmarks send, as the target's tokenizer encodes them."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.shared.envelope import MODELS

HELD_OUT = MODELS / "heldout.jsonl"


def held_out_records(count: int, path: Path = HELD_OUT) -> list[dict[str, Any]]:
    """The first `count` held-out records, each with its `name`, `prompt` and `continuation`."""
    return [json.loads(line) for line in path.read_text().splitlines()[:count]]


def tokenizer_of(model: str | Path) -> Tokenizer:
    """The tokenizer in a model's folder."""
    return Tokenizer.from_file(str(Path(model) / "tokenizer.json"))


def load_prompts(model: str | Path, count: int) -> list[tuple[int, ...]]:
    """Token ids of the first `count` held-out prompts under the model's tokenizer."""
    tokenizer = tokenizer_of(model)
    return [tuple(tokenizer.encode(record["prompt"]).ids) for record in held_out_records(count)]


def repeated(text: str) -> str:
    """The text with its first half repeated behind it."""
    return f"{text}\n\n{text[: len(text) // 2]}"
