"""When and where a request whose orchestrator is lost is asked again."""

from outrider.completions import Folding
from outrider.resuming import Resuming
from outrider.v1 import generation_pb2
from speculative.errors import Superseded, Unavailable

LOST = Unavailable("connection reset")


def request() -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(start=generation_pb2.GenerateStart(text="x"))


def test_the_next_orchestrator_is_asked_until_patience_ends() -> None:
    resuming = Resuming(request(), 2, patience_s=1.0)
    assert resuming.again(LOST, Folding(), now=10.0) is not None
    assert resuming.orchestrator == 1
    assert resuming.again(LOST, Folding(), now=10.9) is not None
    assert resuming.orchestrator == 0
    assert resuming.again(LOST, Folding(), now=11.0) is None


def test_a_request_whose_time_is_over_is_not_asked_again() -> None:
    resuming = Resuming(request(), 2, patience_s=30.0, ends=12.0)
    assert resuming.again(LOST, Folding(), now=11.9) is not None
    assert resuming.again(LOST, Folding(), now=12.0) is None


def test_one_that_lost_a_race_is_not_asked_again() -> None:
    assert Resuming(request(), 2, patience_s=30.0).again(Superseded("later"), Folding(), now=0.0) is None


def test_one_that_was_lost_before_may_take_the_session_back_once() -> None:
    resuming = Resuming(request(), 2, patience_s=30.0)
    assert resuming.again(LOST, Folding(), now=0.0) is not None
    assert resuming.again(Superseded("by the one that was lost"), Folding(), now=0.1) is not None
    assert resuming.again(Superseded("by somebody else"), Folding(), now=0.2) is None
