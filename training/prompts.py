"""Held-out prompts: text of every held-out module up to a line that opens a block, and its continuation."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenizers import Tokenizer

from outrider.json_lines import json_lines
from training.corpus import LICENCE

PROMPT_TOKENS = 280
CONTINUATION_TOKENS = 220
_OPENS = re.compile(r"\s*(async def|def|class)\b.*:$")


@dataclass(frozen=True)
class Prompt:
    """One held-out text; `prompt + continuation` is a verbatim run of whole lines of `origin`."""

    name: str
    origin: str
    licence: str
    prompt: str
    continuation: str


def cut(name: str, text: str, tokenizer: Tokenizer) -> Prompt:
    """The prompt of a module, cut after the middle one of its definition lines with room around them."""
    lines = text.splitlines(keepends=True)
    sizes = [len(encoding.ids) for encoding in tokenizer.encode_batch(lines)]
    cuts = [index + 1 for index, line in enumerate(lines) if _OPENS.match(line.rstrip("\n"))]
    roomy = [c for c in cuts if sum(sizes[:c]) >= PROMPT_TOKENS and sum(sizes[c:]) >= CONTINUATION_TOKENS]
    at = (roomy or cuts)[len(roomy or cuts) // 2]
    start = _start(lines, sizes, at)
    end = at + _fitting(sizes[at:], CONTINUATION_TOKENS)
    origin = f"CPython {platform.python_version()} Lib/{name}"
    return Prompt(name, origin, LICENCE, "".join(lines[start:at]), "".join(lines[at:end]))


def write(files: Mapping[str, str], tokenizer: Tokenizer, path: Path) -> None:
    """Writes one JSON line per held-out file."""
    lines = [
        json.dumps(asdict(cut(name, text, tokenizer)), ensure_ascii=False) for name, text in files.items()
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read(path: Path) -> list[Prompt]:
    """The prompts of a file of JSON lines."""
    return [Prompt(**json.loads(line)) for line in json_lines(path.read_text(encoding="utf-8"))]


def _start(lines: Sequence[str], sizes: Sequence[int], at: int) -> int:
    """Index of the first line after a blank line from which a prompt is neither too long nor too short."""
    first = at - _fitting(sizes[:at][::-1], PROMPT_TOKENS)
    last = at - _fitting(sizes[:at][::-1], PROMPT_TOKENS // 2)
    tidy = (i for i in range(max(1, first), last + 1) if lines[i].strip() and not lines[i - 1].strip())
    return next(tidy, first)


def _fitting(sizes: Iterable[int], limit: int) -> int:
    total = count = 0
    for size in sizes:
        total += size
        if total > limit:
            break
        count += 1
    return count
