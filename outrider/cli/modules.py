"""Replaces the process of a command by another Python program: a service or a benchmark of the clone."""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from outrider.cli.failures import CommandFailed, usage
from outrider.runtime.children import ROOT


def become(arguments: Sequence[str]) -> NoReturn:
    """Replaces this process by Python with these arguments and the import path of this process."""
    if sys.stdout is not None:
        sys.stdout.flush()
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    # -P keeps the working directory and a script's folder off the path, where files could shadow packages.
    os.execve(sys.executable, [sys.executable, "-P", *arguments], {**os.environ, "PYTHONPATH": path})


def find_benchmark(name: str, root: Path = ROOT) -> Path:
    """Path of a benchmark: benchmarks/NAME.py of the clone, or benchmarks/NAME/__main__.py.

    A hyphen in the name also stands for an underscore. Raises CommandFailed where there is no clone or no
    such benchmark.
    """
    folder = root / "benchmarks"
    if not folder.is_dir():
        raise CommandFailed(f"no benchmarks at {folder}: they come with a clone, not with an installed wheel")
    stem = name.replace("-", "_")
    path = folder / f"{stem}.py"
    if not path.is_file():
        path = folder / stem / "__main__.py"
    if not re.fullmatch(r"[a-z0-9_-]+", name) or not path.is_file() or not _is_benchmark(path):
        raise usage(f"no benchmark {name!r}; there are: {', '.join(benchmark_names(folder)) or 'none'}")
    return path


def benchmark_names(folder: Path) -> list[str]:
    """Names of the benchmarks in a folder: its files, and its subfolders that Python can run."""
    files = [(path.stem, path) for path in folder.glob("*.py")]
    folders = [(path.parent.name, path) for path in folder.glob("*/__main__.py")]
    return sorted(name for name, path in (*files, *folders) if _is_benchmark(path))


def _is_benchmark(path: Path) -> bool:
    return "print_result(" in path.read_text(encoding="utf-8")
