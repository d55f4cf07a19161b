"""Reads the vocabulary of a GGUF file, llama.cpp's format, and its digest; nothing else of the file is read.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. All numbers are little-endian.
"""

import hashlib
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from outrider.edge.top_k import DraftModelFailed

UNUSED = 5
"""Type of a token that only pads the vocabulary to the width of the model."""
_TOKENS, _TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
_MOST_BYTES, _MOST_ENTRIES = 1 << 24, 1 << 24
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def vocabulary_digest(tokens: Sequence[str], types: Sequence[int]) -> str:
    """SHA-256, hexadecimal, of the lines "id<tab>token" of all tokens that are not UNUSED, in order of id.

    Equal to `TokenTable.digest` of the tokenizer that the file was converted from.
    """
    kinds = types or [0] * len(tokens)
    lines = "".join(
        f"{id_}\t{token}\n"
        for id_, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind != UNUSED
    )
    return hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()


def read_vocabulary(path: Path) -> tuple[list[str], list[int]]:
    """The tokens of a GGUF file in order of id, and their types, which may be missing.

    Raises:
        DraftModelFailed: the file cannot be read, is not GGUF, or has no vocabulary.
    """
    try:
        with path.open("rb") as file:
            found = _metadata(file)
    except (OSError, struct.error, ValueError, KeyError, RecursionError) as error:
        raise DraftModelFailed(f"{path} cannot be read as a GGUF file: {error}") from error
    tokens, types = found.get(_TOKENS), found.get(_TYPES, [])
    if not isinstance(tokens, list) or not isinstance(types, list) or not tokens:
        raise DraftModelFailed(f"{path} has no vocabulary: convert the model with its tokenizer")
    if types and len(types) != len(tokens):
        raise DraftModelFailed(f"{path} has {len(tokens)} tokens, but {len(types)} types of tokens")
    return [str(token) for token in tokens], [int(kind) for kind in types]


def _metadata(file: BinaryIO) -> dict[str, object]:
    """The two values of the GGUF header that define the vocabulary."""
    magic, version = _read(file, "4sI")
    if magic != b"GGUF" or not 2 <= version <= 3:
        raise ValueError("it does not begin like a GGUF file of version 2 or 3")
    _, entries = _read(file, "QQ")
    found: dict[str, object] = {}
    for _ in range(_bounded(entries, _MOST_ENTRIES)):
        key = _string(file)
        (kind,) = _read(file, "I")
        value = _value(file, kind)
        if key in (_TOKENS, _TYPES):
            found[key] = value
            if len(found) == 2:
                break
    return found


def _value(file: BinaryIO, kind: int) -> object:
    if kind == _STRING:
        return _string(file)
    if kind != _ARRAY:
        return _read(file, _NUMBERS[kind])[0]
    inner, count = _read(file, "IQ")
    count = _bounded(count, _MOST_ENTRIES)
    if inner == _STRING:
        return [_string(file) for _ in range(count)]
    if inner == _ARRAY:
        return [_value(file, inner) for _ in range(count)]
    return list(_read(file, f"{count}{_NUMBERS[inner]}"))


def _string(file: BinaryIO) -> str:
    (length,) = _read(file, "Q")
    data = file.read(_bounded(length, _MOST_BYTES))
    if len(data) < length:
        raise ValueError("it ends in the middle of a text; download it again")
    return data.decode("utf-8", "surrogateescape")


def _read(file: BinaryIO, layout: str) -> tuple[Any, ...]:
    layout = "<" + layout
    return struct.unpack(layout, file.read(struct.calcsize(layout)))


def _bounded(count: int, most: int) -> int:
    if count > most:
        raise ValueError(f"it claims a list of {count} entries; the file is damaged")
    return count
