"""Forgetting while the same tenant is fed, and while the worker ends."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from retrieval_service.past.outputs import PastOutputs
from retrieval_service.past.tenant import Tenant
from retrieval_service.past.writer import Writer
from speculative.errors import Unavailable

WAIT_S = 60.0
Forget = Callable[[PastOutputs], int]
FORGETS: list[Forget] = [lambda past: past.forget("t", "s"), lambda past: past.forget_tenant("t")]


def test_a_tenant_that_is_fed_first_while_a_session_of_it_is_forgotten_keeps_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    past = PastOutputs(tmp_path)
    make = past._new

    def fed_meanwhile(name: str) -> Tenant:
        monkeypatch.undo()
        made = make(name)
        past.extend(name, "new", [1, 2, 3])
        assert past.flush()
        return made

    monkeypatch.setattr(past, "_new", fed_meanwhile)
    assert past.forget("t", "old") == 0
    past.extend("t", "new", [4, 5, 6])
    assert past.flush()
    past.close()
    again = PastOutputs(tmp_path)
    kept = [ids.tolist() for _, ids in again.outputs("t")]
    again.close()
    assert kept == [[1, 2, 3, 4, 5, 6]]


@pytest.mark.parametrize("forget", FORGETS, ids=["a session", "a tenant"])
def test_what_is_to_be_forgotten_after_the_end_is_not_said_to_be_gone(tmp_path: Path, forget: Forget) -> None:
    past = PastOutputs(tmp_path)
    past.extend("t", "s", [1, 2, 3])
    past.close()
    with pytest.raises(Unavailable, match="as the worker ends"):
        forget(past)
    past.close()
    again = PastOutputs(tmp_path)
    assert forget(again) == 3
    again.close()
    last = PastOutputs(tmp_path)
    assert last.outputs("t") == []
    last.close()


@pytest.mark.parametrize("forget", FORGETS, ids=["a session", "a tenant"])
def test_what_is_to_be_forgotten_just_as_the_end_begins_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forget: Forget
) -> None:
    held, go_on, carry_out = threading.Event(), threading.Event(), Writer._carry_out

    def hold(self: Writer, items: Any) -> None:
        if None in items:
            held.set()
            assert go_on.wait(WAIT_S)
        carry_out(self, items)

    monkeypatch.setattr(Writer, "_carry_out", hold)
    past = PastOutputs(tmp_path)
    past.extend("t", "s", [1, 2, 3])
    assert past.flush()
    with ThreadPoolExecutor() as pool:
        closing = pool.submit(past.close)
        assert held.wait(WAIT_S), "the thread has taken the end from its queue"
        forgetting = pool.submit(forget, past)
        while not past.stats().waiting_records:
            pass
        go_on.set()
        assert forgetting.result(WAIT_S) == 3
        closing.result(WAIT_S)
    again = PastOutputs(tmp_path)
    assert again.outputs("t") == []
    again.close()
