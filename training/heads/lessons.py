"""What a head learns from: rows of tokens and the target's features, worked out once and kept in files.

Rows come in chunks, each a file that is written whole or not at all, so that a run that is killed at any
moment loses one chunk at most.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from outrider.lm.features import LAST
from speculative.errors import InvalidRequest
from training.batches import shuffled
from training.continued import continue_
from training.heads.frozen import FrozenTarget, Ids

FREQUENT = 0.98
"""Share of the text that the ids make up which an EAGLE-3 head may draft."""
CHUNK = 32
"""Rows of a file."""
_MOST = 65_504.0
_AT_ONCE = 4

Advance = Callable[[int, int], None]
"""Callback that takes the done part and the total of a stage."""


Halves = list[npt.NDArray[np.float16]]
"""Numbers of rows, `CHUNK` rows in each array, which files hold."""


class HeadLesson(NamedTuple):
    """The rows of one batch."""

    ids: torch.Tensor
    """Tokens, int64 [rows, window]."""
    features: torch.Tensor
    """Hidden states of the target after its last norm, float32 [rows, window, width]."""
    read: torch.Tensor | None
    """Hidden states of several layers, [rows, window, layers, width]; None: the head reads `features`."""

    def to(self, device: torch.device) -> HeadLesson:
        """The rows on a device."""
        read = None if self.read is None else self.read.to(device)
        return HeadLesson(self.ids.to(device), self.features.to(device), read)


class Lessons:
    """Rows with the target's features.

    Args:
        ids: rows, uint32 [rows, window].
        features: features of the rows, [rows, window, width].
        batch: rows of a batch.
        seed: seed of the order of rows.
        read: outputs of the layers that the head reads, [rows, window, layers, width]; None: the head reads
            `features`.
    """

    def __init__(self, ids: Ids, features: Halves, batch: int, seed: int, read: Halves | None = None) -> None:
        self._ids = ids
        self._features, self._read = features, read
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

    def at(self, step: int) -> HeadLesson:
        """The batch of `step`."""
        rows = shuffled(len(self._ids), self._batch, self._seed, step)
        ids = torch.from_numpy(self._ids[rows].astype(np.int64))
        read = None if self._read is None else _picked(self._read, rows)
        return HeadLesson(ids, _picked(self._features, rows), read)

    def frequent(self, count: int) -> torch.Tensor:
        """The `count` ids that the rows have most often, int64, ascending; ids that no row has fill them up.

        Without a count, as many as together make up `FREQUENT` of the rows.
        """
        times = np.bincount(self._ids.ravel(), minlength=count)
        most = np.argsort(-times, kind="stable")
        if not count:
            count = 1 + int((times[most].cumsum() < FREQUENT * times.sum()).sum())
        return torch.from_numpy(np.sort(most[:count]).astype(np.int64))


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
    target: FrozenTarget, ids: Ids, reads: Sequence[int], folder: Path, advance: Advance
) -> tuple[Halves, Halves | None]:
    """The target's features of rows, and the outputs of the layers `reads`, mapped from files.

    The latter are None where `reads` is the last norm alone. Raises InvalidRequest if the disk has no room
    for the files.
    """
    layers = () if tuple(reads) == (LAST,) else tuple(reads)
    width = target.parts.shape.width
    names = ["features"] + (["layers-" + "-".join(map(str, layers))] if layers else [])
    ends = [(width,), (len(layers), width)][: len(names)]
    needed = sum(2 * ids.size * int(np.prod(end)) for end in ends)
    there = sum(map(_size, (path for name in names for path in folder.glob(f"{name}-[0-9]*.npy"))))
    _check_room(folder, needed - there)
    found: list[Halves] = [[] for _ in names]
    for number, part in enumerate(_parts(ids)):
        paths = [folder / f"{name}-{number:04}.npy" for name in names]
        shapes = [(*part.shape, *end) for end in ends]
        if any(_whole(*one, np.float16) is None for one in zip(paths, shapes, strict=True)):
            for path, made in zip(paths, _computed(target, part, layers), strict=True):
                _keep(path, made)
        for kept, path, shape in zip(found, paths, shapes, strict=True):
            whole = _whole(path, shape, np.float16)
            assert whole is not None, "the file was written just now"
            kept.append(whole)
        advance(sum(map(len, found[0])), len(ids))
    return found[0], found[1] if layers else None


def _computed(target: FrozenTarget, ids: Ids, layers: Sequence[int]) -> list[npt.NDArray[np.float16]]:
    """The features of rows, and the outputs of these layers if there are any."""
    parts = []
    for start in range(0, len(ids), _AT_ONCE):
        given = torch.from_numpy(ids[start : start + _AT_ONCE].astype(np.int64)).to(target.device)
        with torch.autocast(target.device.type, torch.bfloat16):
            states = target.states(given, layers or (LAST,))
        wanted = states if layers else states[:1]
        parts.append([one.clamp(-_MOST, _MOST).half().cpu().numpy() for one in wanted])
    return [np.concatenate(one) for one in zip(*parts, strict=True)]


def _picked(chunks: Halves, rows: npt.NDArray[np.int64]) -> torch.Tensor:
    """Some rows, float32."""
    return torch.from_numpy(np.stack([chunks[row // CHUNK][row % CHUNK] for row in rows])).float()


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
