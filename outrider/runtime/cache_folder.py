"""The folder in which processes keep what they would otherwise compute again at the next start."""

import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator


def cache_folder() -> Path:
    """The user's cache folder of Outrider. Raises RuntimeError for a user without a home folder."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "outrider"


def default_cache_dir() -> Path | None:
    """The user's cache folder of Outrider; None for a user without a home folder."""
    try:
        return cache_folder()
    except RuntimeError:
        return None


def _named(path: Any) -> Any:
    return None if path in ("", "none") else path


CacheDir = Annotated[Path | None, BeforeValidator(_named)]
"""A folder for what is kept between starts; `none`: nothing is kept."""
