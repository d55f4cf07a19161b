"""Past outputs whose files need mending at a start for which the disk has no room."""

import subprocess
import sys
from array import array
from pathlib import Path

import pytest

from retrieval_service.past.outputs import PastOutputs
from retrieval_service.past.tenant_files import TenantFiles

ROOT = Path(__file__).parents[3]
STARTS = """
import os, resource, sys
from pathlib import Path
from retrieval_service.past.outputs import PastOutputs
from retrieval_service.past.writer import DiskPolicy

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

limit(0)
outputs = PastOutputs(Path(sys.argv[1]), policy=DiskPolicy(sync_s=0.05), say=lambda _: None)
assert outputs.memory("one").lookup([1], node_limit=1, depth=1).tokens == (2,)
assert not outputs.flush()
assert outputs.stats().behind == 1
if sys.argv[2] == "recovers":
    limit(resource.RLIM_INFINITY)
    assert outputs.flush()
    assert outputs.stats().behind == 0
os._exit(0)
"""


def started_on_a_full_disk(folder: Path, how: str) -> None:
    command = [sys.executable, "-c", STARTS, str(folder), how]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr


def found(folder: Path) -> dict[str, list[int]]:
    """What the next start reads, by session."""
    outputs = PastOutputs(folder, say=lambda _: None)
    try:
        return {session: list(ids) for session, ids in outputs.outputs("one")}
    finally:
        outputs.close()


@pytest.fixture
def files(tmp_path: Path) -> TenantFiles:
    files = TenantFiles(tmp_path, "one", lambda _: None)
    files.snapshot([(0, "s", array("I", [1, 2])), (1, "secret", array("I", [3, 4]))], 2)
    return files


@pytest.mark.parametrize("how", ["dies", "recovers"])
def test_damaged_files_stay_until_what_was_read_of_them_has_room(
    files: TenantFiles, tmp_path: Path, how: str
) -> None:
    (log,) = files.folder.glob("*.log")
    log.write_bytes(b"?" + log.read_bytes()[1:])
    started_on_a_full_disk(tmp_path, how)
    assert found(tmp_path) == {"s": [1, 2], "secret": [3, 4]}


@pytest.mark.parametrize(("how", "left"), [("dies", {}), ("recovers", {"s": [1, 2]})])
def test_what_was_not_to_be_forgotten_is_written_again_once_there_is_room(
    files: TenantFiles, tmp_path: Path, how: str, left: dict[str, list[int]]
) -> None:
    files._intend(["secret"])  # and there the process died
    started_on_a_full_disk(tmp_path, how)
    assert found(tmp_path) == left
