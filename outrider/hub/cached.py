"""Finds models whose files are all in this machine's cache."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants

from outrider.hub.listing import DEFAULT_REVISION, INDEX, WEIGHTS, storage_of
from outrider.tokens import split_revision

_PREFIX = "models--"


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model in the cache with its configuration and all of its weights."""

    name: str
    """ORG/NAME."""
    folder: Path
    size: int
    """Bytes of the model's weights."""


def cached(text: str) -> CachedModel | None:
    """The model ORG/NAME or ORG/NAME@REVISION from the cache; None if the cache lacks a part of the model."""
    name, revision = split_revision(text)
    storage, revision = storage_of(name), revision or DEFAULT_REVISION
    ref = storage / "refs" / revision
    commit = ref.read_text(encoding="utf-8").strip() if ref.is_file() else revision
    return whole_model(name, storage / "snapshots" / commit)


def all_cached() -> Iterator[CachedModel]:
    """Models of the cache at their default revision."""
    root = Path(constants.HF_HUB_CACHE).expanduser()
    for storage in sorted(root.glob(f"{_PREFIX}*")):
        if found := cached(storage.name.removeprefix(_PREFIX).replace("--", "/", 1)):
            yield found


def whole_model(name: str, folder: Path) -> CachedModel | None:
    """The model in a folder; None where its configuration or a part of its weights is missing."""
    if not (folder / "config.json").is_file():
        return None
    for pattern in WEIGHTS:
        files = set(folder.glob(pattern))
        for index in folder.glob(pattern + INDEX):
            try:
                files |= {
                    folder / part for part in json.loads(index.read_text("utf-8"))["weight_map"].values()
                }
            except (ValueError, KeyError, TypeError, AttributeError, OSError):
                return None
        if files:
            found = all(file.is_file() for file in files)
            return CachedModel(name, folder, sum(file.stat().st_size for file in files)) if found else None
    return None
