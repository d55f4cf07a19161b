"""Forgetting while the same tenant is fed."""

from pathlib import Path

import pytest

from retrieval_service.past.outputs import PastOutputs
from retrieval_service.past.tenant import Tenant


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
