"""The file of a tenant's past outputs is whole, or there is none."""

from collections.abc import Iterator
from pathlib import Path

import pytest

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
