"""Python source to train on: the standard library of the running interpreter, without held-out modules."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from training import heldout

LICENCE = "PSF-2.0"

# Tests repeat what they test, tables are not code, and site-packages is other people's work.
_LEFT_OUT = frozenset(
    {"test", "tests", "idle_test", "site-packages", "encodings", "pydoc_data", "__pycache__", "lib-dynload"}
)
_LEFT_OUT_PREFIXES = ("config-", "_sysconfigdata")


@dataclass(frozen=True)
class Corpus:
    """Token ids of files in name order, each file followed by eos; the fields are uint16, shape (tokens,)."""

    train: npt.NDArray[np.uint16]
    """Token ids of the training files."""
    held: npt.NDArray[np.uint16]
    """Token ids of the held-out files."""


def stdlib() -> dict[str, str]:
    """Source text by path below the library's directory, in name order, held-out modules included."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = {path.relative_to(root).as_posix(): path for path in _sources(root)}
    return {name: _text(paths[name]) for name in sorted(paths)}


def split(files: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Splits files (text by name) into training files and held-out files."""
    train = {name: text for name, text in files.items() if name not in heldout.NAMES}
    return train, {name: text for name, text in files.items() if name in heldout.NAMES}


def encode(tokenizer: Tokenizer, files: Mapping[str, str]) -> dict[str, list[int]]:
    """Token ids of files, by name."""
    encodings = tokenizer.encode_batch(list(files.values()), add_special_tokens=False)
    return {name: encoding.ids for name, encoding in zip(files, encodings, strict=True)}


def build(tokenizer: Tokenizer, files: Mapping[str, str], extra_held: Iterable[str] = ()) -> Corpus:
    """The corpus of `files`; see `training_files` for the files left out."""
    train, held = training_files(tokenizer, files, extra_held)
    eos = tokenizer.get_vocab_size() - 1
    return Corpus(_pack(train.values(), eos), _pack(held.values(), eos))


def training_files(
    tokenizer: Tokenizer, files: Mapping[str, str], extra_held: Iterable[str]
) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Token ids by name of the files to train on, and of the held-out files.

    Near-copies of a held-out module, or of one of the `extra_held` texts, are in neither.
    """
    train, held = (encode(tokenizer, part) for part in split(files))
    extra = [tokenizer.encode(text, add_special_tokens=False).ids for text in extra_held]
    copies = set(heldout.near_copies(train, [*held.values(), *extra]))
    return {name: ids for name, ids in train.items() if name not in copies}, held


def _sources(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.name in _LEFT_OUT or path.name.startswith(_LEFT_OUT_PREFIXES):
            continue
        if path.is_dir():
            yield from _sources(path)
        elif path.suffix == ".py":
            yield path


def _text(path: Path) -> str:
    return path.read_bytes().decode("utf-8", errors="replace").replace("\r\n", "\n")


def _pack(documents: Iterable[list[int]], eos: int) -> npt.NDArray[np.uint16]:
    return np.concatenate([np.array([*ids, eos], dtype=np.uint16) for ids in documents])
