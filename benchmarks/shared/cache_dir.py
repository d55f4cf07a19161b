"""The folder in which a benchmark keeps compiled passes."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outrider.runtime.settings import default_cache_dir


@contextmanager
def kept_or_temporary(folder: Path | None) -> Iterator[Path]:
    """The folder, which is kept for later runs; without one, a folder that is removed in the end."""
    if folder is not None:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as made:
        yield Path(made)


def cache_for(passes: str) -> Path | None:
    """The folder that keeps compiled passes from one run to the next; None for eager passes."""
    return default_cache_dir() if passes == "compiled" else None
