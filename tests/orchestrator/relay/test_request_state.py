"""A request's state tells those who listen that the request ended, whether they listen before or after."""

import pytest

from orchestrator.relay.request_state import RequestState
from speculative.errors import OutriderError, Superseded


@pytest.mark.parametrize("is_before", [True, False], ids=["listened before", "listened after"])
def test_a_cancel_is_heard_once(is_before: bool) -> None:
    state, heard = RequestState(), list[str]()
    for listens in (is_before, not is_before):
        if listens:
            state.when_cancelled(lambda: heard.append("cancelled"))
        else:
            state.cancel()
    assert heard == ["cancelled"]


@pytest.mark.parametrize("is_before", [True, False], ids=["attached before", "attached after"])
def test_an_error_reaches_the_readers_once(is_before: bool) -> None:
    state, failed, error = RequestState(), list[OutriderError](), Superseded("a later request")
    for attaches in (is_before, not is_before):
        if attaches:
            state.attach(failed.append)
        else:
            state.end(error)
    assert failed == [error]
