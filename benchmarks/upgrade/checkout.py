"""The code of the previous release: a folder, or a revision of this repository in a work tree of its own."""

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from outrider.runtime.children import ROOT

SERVICES = ("verifier_service", "drafter_service", "retrieval_service", "orchestrator")


@contextlib.contextmanager
def code_of(previous: str) -> Iterator[Path]:
    """The folder with the services of a release; a revision's folder is temporary.

    Args:
        previous: a folder, or a revision that git knows.

    Raises RuntimeError where `previous` is neither, or holds no services.
    """
    if (folder := Path(previous)).is_dir():
        yield _checked(folder.resolve())
        return
    with tempfile.TemporaryDirectory(prefix="outrider-previous-") as held:
        tree = Path(held) / "tree"
        try:
            _git("worktree", "add", "--quiet", "--detach", str(tree), previous)
        except subprocess.CalledProcessError as error:
            raise RuntimeError(
                f"previous is {previous!r}, neither a folder nor a revision: {error.stderr.strip()}"
            ) from None
        try:
            yield _checked(tree)
        finally:
            _git("worktree", "remove", "--force", str(tree))


def revision_of(folder: Path) -> str:
    """The commit that a folder is at; "unknown" outside a checkout."""
    try:
        return _git("rev-parse", "--short=12", "HEAD", at=folder)
    except subprocess.CalledProcessError:
        return "unknown"


def _checked(folder: Path) -> Path:
    missing = [name for name in SERVICES if not (folder / name / "__main__.py").is_file()]
    if missing:
        raise RuntimeError(f"{folder} holds no release: {', '.join(missing)} is missing")
    return folder


def _git(*arguments: str, at: Path = ROOT) -> str:
    done = subprocess.run(["git", *arguments], cwd=at, capture_output=True, text=True, check=True)
    return done.stdout.strip()
