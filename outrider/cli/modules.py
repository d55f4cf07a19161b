"""Becoming another Python program: a service, or a benchmark of the clone."""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from outrider.cli.failures import CommandFailed, usage
from outrider.runtime.children import ROOT


def become(arguments: Sequence[str]) -> NoReturn:
    """Replaces this process by Python with these arguments, which finds the packages that this one found."""
    sys.stdout.flush()
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    os.execve(sys.executable, [sys.executable, *_safe(arguments)], {**os.environ, "PYTHONPATH": path})


def _safe(arguments: Sequence[str]) -> list[str]:
    """A module is run without the working directory on its path: nothing there may shadow a package."""
    return ["-P", *arguments] if arguments[0] == "-m" else list(arguments)


def find_benchmark(name: str, root: Path = ROOT) -> Path:
    """benchmarks/NAME.py of the clone; in the name a hyphen stands for an underscore too. A file whose name a
    module of the standard library has is called NAME_.py, as the folder comes before that on its path.

    Raises CommandFailed where there is no clone or no such benchmark.
    """
    folder = root / "benchmarks"
    if not folder.is_dir():
        raise CommandFailed(f"no benchmarks at {folder}: they come with a clone, not with an installed wheel")
    stem = name.replace("-", "_")
    path = folder / f"{stem}_.py" if stem in sys.stdlib_module_names else folder / f"{stem}.py"
    if not re.fullmatch(r"[a-z0-9_-]+", name) or not path.is_file() or not _is_benchmark(path):
        raise usage(f"no benchmark {name!r}; there are: {', '.join(benchmark_names(folder)) or 'none'}")
    return path


def benchmark_names(folder: Path) -> list[str]:
    """Programs among the folder's files; the others are what they share."""
    return sorted(path.stem.rstrip("_") for path in folder.glob("*.py") if _is_benchmark(path))


def _is_benchmark(path: Path) -> bool:
    return "print_result(" in path.read_text(encoding="utf-8") and path.stem != "envelope"
