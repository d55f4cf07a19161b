"""Rows of tokens to train on, from texts and from past outputs, without what is held out.

Documents and past outputs that nearly copy a text of a file of held-out prompts are left out, by the rule of
`outrider.near_copies`. Without such a file, the held-out text is cut off the end of the text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from outrider.json_lines import json_lines
from outrider.near_copies import KeptOut
from outrider.tokens import TokenTable
from speculative.errors import InvalidRequest
from training.batches import scattered
from training.heads.frozen import Ids

FIXED, TARGET, DRAFTER, MIXED = "fixed", "target", "drafter", "mixed"
DATA = (FIXED, TARGET, DRAFTER, MIXED)
"""What `--data` takes: the text as it is, continuations of its beginnings by the target or by a drafter, or
some of each."""

_HELD_SHARE = 20
_HELD_ROWS = 24
_FORMAT = "outrider past outputs 1"


@dataclass
class TrainingText:
    """Tokens to cut rows from, and where they came from."""

    text: Ids
    """Tokens of the documents, each followed by the id that ends a text."""
    past: Ids
    """Tokens of the past outputs, each output followed by the id that ends a text."""
    prompts: list[Sequence[int]]
    """Held-out prompts."""
    documents: int
    """Number of documents trained on."""
    left_out: int
    """Number of documents left out because they nearly copy held-out text."""
    tenants: dict[str, int] = field(default_factory=dict)
    """Number of past outputs trained on, by tenant."""
    outputs_left_out: int = 0
    """Number of past outputs left out because they nearly copy held-out text."""

    @property
    def digest(self) -> str:
        """Hexadecimal digest of all tokens, which decides whether an interrupted run may continue."""
        parts = [self.text.tobytes(), self.past.tobytes(), repr(self.prompts).encode()]
        return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:32]


def read_text(
    table: TokenTable,
    eos: int,
    documents: Iterable[str],
    past: Sequence[Path],
    held_out: Path | None,
    window: int,
) -> TrainingText:
    """Encodes documents and reads exported past outputs.

    Without a file of held-out prompts, the last twentieth of the tokens is held out, at most 24 rows.

    Raises InvalidRequest if a file cannot be used, or if fewer tokens than two rows are left.
    """
    held = [] if held_out is None else _held_out(table, held_out)
    kept_out = KeptOut(whole for _, whole in held)
    kept: list[Ids] = []
    left_out = 0
    for document in documents:
        ids = np.asarray(table.encode(document), dtype=np.uint32)
        if kept_out.nearly_copied_by(ids):
            left_out += 1
        else:
            kept.append(_ended(ids, eos))
    outputs, tenants, outputs_left_out = _past(table, past, eos, kept_out)
    text = TrainingText(
        _joined(kept),
        _joined(outputs),
        [prompt for prompt, _ in held],
        len(kept),
        left_out,
        tenants,
        outputs_left_out,
    )
    if held_out is None:
        _hold_out(text, window)
    if len(text.text) + len(text.past) <= 2 * window:
        raise InvalidRequest(
            f"there are {len(text.text) + len(text.past)} tokens to train on, and a row has {window}: "
            "give more text, or a smaller --window"
        )
    return text


class RowCounts(NamedTuple):
    """Numbers of rows by who wrote them."""

    fixed: int
    """Rows of text as it is."""
    target: int
    """Rows whose second half the target writes."""
    drafter: int
    """Rows whose second half a drafter writes."""


def row_counts(data: str, share: float, rows: int, has_drafter: bool) -> RowCounts:
    """How `rows` rows are divided.

    Args:
        data: one of `DATA`.
        share: with mixed data, share of the rows that a model continues.
        has_drafter: with mixed data, whether a drafter continues half of these rows.
    """
    written = {FIXED: 0, MIXED: round(share * rows)}.get(data, rows)
    drafted = {DRAFTER: rows, MIXED: written // 2 if has_drafter else 0}.get(data, 0)
    return RowCounts(rows - written, written - drafted, drafted)


def fixed_rows(text: TrainingText, count: int, window: int, seed: int) -> Ids:
    """At most `count` rows of text as it is, and all past outputs: uint32 [rows, window]."""
    rows = [_every(text.past, window)]
    if count and len(text.text) > window:
        rows.append(scattered(text.text, min(count, len(text.text) // window + 1), window, seed))
    return np.concatenate(rows).astype(np.uint32)


def beginnings(text: TrainingText, count: int, window: int, seed: int) -> Ids:
    """Text for a model to continue, half a window each: uint32 [count, window // 2]."""
    length = window // 2
    if not count or len(text.text) <= length:
        return np.zeros((0, length), dtype=np.uint32)
    return scattered(text.text, count, length, seed).astype(np.uint32)


def _held_out(table: TokenTable, path: Path) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Prompts of a file of JSON lines, each alone and with its continuation."""
    held: list[tuple[Sequence[int], Sequence[int]]] = []
    for number, line in enumerate(_lines(path), start=1):
        try:
            record = json.loads(line)
            prompt, whole = record["prompt"], record["prompt"] + record.get("continuation", "")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidRequest(
                f"{path}, line {number}: a held-out prompt is a JSON object with `prompt`"
            ) from error
        held.append((table.encode(prompt), table.encode(whole)))
    if not held:
        raise InvalidRequest(f"{path} has no held-out prompt; give JSON lines with `prompt`")
    return held


def _past(
    table: TokenTable, paths: Sequence[Path], eos: int, kept_out: KeptOut
) -> tuple[list[Ids], dict[str, int], int]:
    """The outputs to train on, their numbers by tenant, and the number of those that were left out."""
    outputs: list[Ids] = []
    tenants: dict[str, int] = {}
    left_out = 0
    for path in paths:
        tenant, found = _exported(table, path)
        kept = [ids for ids in found if not kept_out.nearly_copied_by(ids)]
        outputs += [_ended(ids, eos) for ids in kept]
        tenants[tenant] = tenants.get(tenant, 0) + len(kept)
        left_out += len(found) - len(kept)
    return outputs, tenants, left_out


def _exported(table: TokenTable, path: Path) -> tuple[str, list[Ids]]:
    """The tenant and the outputs of a file that `outrider memory export` wrote."""
    first, *lines = _lines(path) or [""]
    try:
        header = json.loads(first)
        tenant, count, tokenizer = header["tenant"], header["outputs"], header["tokenizer"]
        if header["format"] != _FORMAT:
            raise ValueError(header["format"])
        outputs = [np.asarray(json.loads(line)["ids"], dtype=np.uint32) for line in lines]
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise InvalidRequest(
            f"{path} is not a file of past outputs, or is damaged: write it with `outrider memory export`"
        ) from error
    if count != len(outputs):
        raise InvalidRequest(
            f"{path} has {len(outputs)} of its {count} past outputs: it was cut off; export it again"
        )
    if tokenizer and tokenizer != table.digest:
        raise InvalidRequest(f"{path} has tokens of another tokenizer than the target's: {tokenizer}")
    if any(len(ids) and int(ids.max()) >= table.size for ids in outputs):
        raise InvalidRequest(f"{path} has ids beyond the target's vocabulary of {table.size}")
    return str(tenant), [ids for ids in outputs if len(ids)]


def _lines(path: Path) -> list[str]:
    try:
        return json_lines(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path} is not UTF-8 at byte {error.start}; give JSON lines") from error


def _hold_out(text: TrainingText, window: int) -> None:
    """Moves the last twentieth of the tokens, at most 24 rows, to the prompts."""
    name = "text" if len(text.text) >= len(text.past) else "past"
    ids: Ids = getattr(text, name)
    rows = min(_HELD_ROWS, max(1, len(ids) // window // _HELD_SHARE))
    if len(ids) <= rows * window:
        return
    setattr(text, name, ids[: -rows * window])
    text.prompts += [row[: window // 2].tolist() for row in ids[-rows * window :].reshape(rows, window)]


def _every(ids: Ids, window: int) -> Ids:
    whole = len(ids) // window
    return ids[: whole * window].reshape(whole, window)


def _ended(ids: Ids, eos: int) -> Ids:
    return ids if len(ids) and ids[-1] == eos else np.append(ids, np.uint32(eos)).astype(np.uint32)


def _joined(parts: Sequence[Ids]) -> Ids:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.uint32)
