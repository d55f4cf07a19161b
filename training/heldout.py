"""Text kept away from training: the held-out modules, and every file that nearly copies one of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from outrider.near_copies import KeptOut

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


def near_copies(files: Mapping[str, Sequence[int]], held: Iterable[Sequence[int]]) -> list[str]:
    """Names of the files (token ids by name) that nearly copy the held-out texts."""
    kept_out = KeptOut(held)
    return [name for name, ids in files.items() if kept_out.nearly_copied_by(ids)]
