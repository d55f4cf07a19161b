"""A session that has ended tells its readers so, whatever comes between the end and their next message."""

import pytest

from outrider.v1 import common_pb2
from tests.verifier.sessions.test_session_table import FINISH
from tests.verifier.sessions.test_watch import Watched


async def test_a_session_that_ended_before_it_was_taken_over_tells_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(monkeypatch, interval_ms=200)
    watched.commit(1)
    watched.told()
    watched.commit(2, finish=FINISH)
    watched.table.supersede(watched.view)
    (end,) = watched.reader._collect().committed
    assert (list(end.ids), end.code) == ([2], 0)
    assert end.finished == common_pb2.FINISH_REASON_STOP
    assert watched.reader._notices == {}
