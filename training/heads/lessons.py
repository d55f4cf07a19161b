"""What a head learns from: rows of tokens and the target's features, worked out once and kept in files.

Rows come in chunks, each a file that is written whole or not at all, so that a run that is killed at any
moment loses one chunk at most.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from speculative.errors import InvalidRequest
from training.batches import shuffled
from training.continued import continue_
from training.heads.frozen import FrozenTarget, Ids

CHUNK = 32
"""Rows of a file."""
_MOST = 65_504.0
_AT_ONCE = 4

Advance = Callable[[int, int], None]
"""Callback that takes the done part and the total of a stage."""


class Lessons:
    """Rows (uint32 [rows, window]) with the target's features (float16 [rows, window, width] in files)."""

    def __init__(self, ids: Ids, features: list[npt.NDArray[np.float16]], batch: int, seed: int) -> None:
        self._ids = ids
        self._features = features
        self._batch = max(1, min(batch, len(ids)))
        self._seed = seed

    @property
    def tokens(self) -> int:
        """Number of tokens of all rows."""
        return int(self._ids.size)

    @property
    def steps_per_epoch(self) -> int:
        """Number of batches that together read every row once."""
        return max(1, len(self._ids) // self._batch)

    def at(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The batch of `step`: ids int64 [rows, window], and features float32 [rows, window, width]."""
        rows = shuffled(len(self._ids), self._batch, self._seed, step)
        features = np.stack([self._features[row // CHUNK][row % CHUNK] for row in rows])
        return torch.from_numpy(self._ids[rows].astype(np.int64)), torch.from_numpy(features).float()


def written_rows(
    model: PreTrainedModel, beginnings: Ids, window: int, folder: Path, name: str, advance: Advance
) -> Ids:
    """Beginnings (uint32 [rows, length]) continued by a model to `window` tokens: uint32 [rows, window].

    Every second row is greedy, the others are sampled at temperature 0.8. The rows are kept in files that
    begin with `name`.
    """
    chunks = []
    for number, start in enumerate(range(0, len(beginnings), CHUNK)):
        part = beginnings[start : start + CHUNK]
        path = folder / f"{name}-{number:04}.npy"
        shape = (len(part), window)
        found = _whole(path, shape, np.uint32)
        if found is None:
            found = _keep(path, continue_(model, part, window))
        chunks.append(np.array(found))
        advance(start + len(part), len(beginnings))
    return np.concatenate(chunks) if chunks else np.zeros((0, window), dtype=np.uint32)


def features_of(
    target: FrozenTarget, ids: Ids, folder: Path, advance: Advance
) -> list[npt.NDArray[np.float16]]:
    """The target's features of rows, one array of `CHUNK` rows after the other, mapped from files.

    Raises InvalidRequest if the disk has no room for the files.
    """
    shapes = [(len(part), ids.shape[1], target.parts.shape.width) for part in _parts(ids)]
    paths = [folder / f"features-{number:04}.npy" for number in range(len(shapes))]
    _check_room(folder, sum(2 * int(np.prod(shape)) for shape in shapes) - sum(map(_size, paths)))
    found: list[npt.NDArray[np.float16]] = []
    for part, path, shape in zip(_parts(ids), paths, shapes, strict=True):
        if _whole(path, shape, np.float16) is None:
            _keep(path, _computed(target, part))
        whole = _whole(path, shape, np.float16)
        assert whole is not None, "the file was written just now"
        found.append(whole)
        advance(sum(map(len, found)), len(ids))
    return found


def _computed(target: FrozenTarget, ids: Ids) -> npt.NDArray[np.float16]:
    parts = []
    for start in range(0, len(ids), _AT_ONCE):
        given = torch.from_numpy(ids[start : start + _AT_ONCE].astype(np.int64)).to(target.device)
        with torch.autocast(target.device.type, torch.bfloat16):
            hidden = target.features(given)
        parts.append(hidden.float().clamp(-_MOST, _MOST).half().cpu().numpy())
    return np.concatenate(parts)


def _parts(ids: Ids) -> Iterator[Ids]:
    return (ids[start : start + CHUNK] for start in range(0, len(ids), CHUNK))


def _whole(path: Path, shape: tuple[int, ...], kind: type[np.generic]) -> npt.NDArray[Any] | None:
    """The array in a file; None if the file is missing, cut off, or of another kind."""
    try:
        found: npt.NDArray[Any] = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError):
        return None
    return found if found.shape == shape and found.dtype == kind else None


def _keep(path: Path, made: npt.NDArray[Any]) -> npt.NDArray[Any]:
    partial = path.with_suffix(".partial.npy")
    np.save(partial, made)
    os.replace(partial, path)
    return made


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise InvalidRequest(
            f"the target's features take {needed / 1e9:.1f} GB in {folder}, which has {free / 1e9:.1f} GB "
            "free: give a smaller --tokens, or another --work"
        )
