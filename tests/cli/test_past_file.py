"""The file of a tenant's past outputs is whole, or there is none."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.cli.failures import CommandFailed
from outrider.cli.past_file import write_past
from outrider.v1 import retrieval_pb2


class LostWorker:
    """A worker that is lost behind the first output."""

    def ExportPast(self, _request: object, timeout: float) -> Iterator[retrieval_pb2.ExportPastResponse]:
        yield retrieval_pb2.ExportPastResponse(outputs=2)
        yield retrieval_pb2.ExportPastResponse(output=retrieval_pb2.PastOutput(session="s", ids=[1, 2]))
        raise RuntimeError("the worker is lost")


def test_a_lost_worker_leaves_none_of_the_tenants_outputs_behind(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        write_past(tmp_path / "past.jsonl", "acme", LostWorker())
    assert list(tmp_path.iterdir()) == []


def test_a_part_of_a_tenants_outputs_that_cannot_be_removed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "unlink", refused)
    said = r"\.past\.jsonl\.partial holds outputs of the tenant and cannot be removed: Read-only file system"
    with pytest.raises(CommandFailed, match=said):
        write_past(tmp_path / "past.jsonl", "acme", LostWorker())
