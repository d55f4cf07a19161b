"""What is kept away from training: the held-out modules, and every file that nearly copies one of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

WINDOW = 50
"""Length, in tokens, of the windows that two files are compared by."""

SHARE = 0.1
"""A file that has at least this share of its windows in held-out text is a near-copy."""

NAMES = (
    "asyncio/queues.py",
    "calendar.py",
    "cmd.py",
    "concurrent/futures/thread.py",
    "csv.py",
    "dataclasses.py",
    "fractions.py",
    "graphlib.py",
    "heapq.py",
    "html/parser.py",
    "http/cookies.py",
    "json/decoder.py",
    "logging/handlers.py",
    "poplib.py",
    "queue.py",
    "sched.py",
    "shlex.py",
    "statistics.py",
    "textwrap.py",
    "tkinter/filedialog.py",
    "tomllib/_parser.py",
    "urllib/robotparser.py",
    "xml/dom/pulldom.py",
    "zipapp.py",
)
"""Held-out modules of the standard library, as paths below its directory."""

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def windows(ids: Sequence[int]) -> npt.NDArray[np.uint64]:
    """A hash of every run of `WINDOW` ids, in order: uint64, shape (max(0, len(ids) - WINDOW + 1),)."""
    values = np.asarray(ids, dtype=np.uint64) + np.uint64(1)
    count = len(values) - WINDOW + 1
    if count <= 0:
        return np.zeros(0, dtype=np.uint64)
    hashes = np.zeros(count, dtype=np.uint64)
    for offset in range(WINDOW):
        hashes = hashes * _MULTIPLIER + values[offset : offset + count]
    return hashes


def near_copies(files: Mapping[str, Sequence[int]], held: Iterable[Sequence[int]]) -> list[str]:
    """Names of the files (token ids by name) that have `SHARE` of their windows in the held-out texts."""
    known = np.unique(np.concatenate([windows(ids) for ids in held] or [np.zeros(0, dtype=np.uint64)]))
    return [name for name, ids in files.items() if _share(windows(ids), known) >= SHARE]


def _share(hashes: npt.NDArray[np.uint64], known: npt.NDArray[np.uint64]) -> float:
    if not len(hashes) or not len(known):
        return 0.0
    # `known` is sorted once; np.isin would sort it for every file.
    nearest = known[np.minimum(np.searchsorted(known, hashes), len(known) - 1)]
    return float((nearest == hashes).mean())
