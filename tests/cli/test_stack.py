"""Decisions of `up` before it starts processes and between two starts."""

import socket

import pytest

from outrider.cli.failures import CommandFailed
from outrider.cli.local.stack import MOST_RESTARTS, STEADY_S, Restarts, Stack, check_pair
from outrider.cli.local.up_settings import StackOptions
from outrider.v1.draft_source_pb2 import SourceDescription
from outrider.v1.verifier_pb2 import VerifierDescription


def test_a_target_alone_has_no_drafter() -> None:
    assert StackOptions(target="org/name").models() == ("org/name", "")
    assert StackOptions(target="org/name", drafter="none").models() == ("org/name", "")
    assert StackOptions(target="org/name", drafter="org/small").models() == ("org/name", "org/small")


def test_a_path_that_is_not_there_is_found_out_before_anything_starts() -> None:
    with pytest.raises(CommandFailed, match="no model at /nowhere"):
        StackOptions(target="/nowhere").models()
    with pytest.raises(CommandFailed, match="no model at /nowhere"):
        StackOptions(target="org/name", drafter="/nowhere").models()


@pytest.mark.parametrize(
    ("cores", "with_drafter", "counts"),
    [(1, True, (1, 1)), (2, True, (1, 1)), (4, True, (2, 1)), (16, True, (12, 3)), (16, False, (15, 1))],
)
def test_compute_threads_leave_a_core_to_the_rest(
    cores: int, with_drafter: bool, counts: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.cli.local.up_settings.cpu_limit", lambda: float(cores))
    assert StackOptions().thread_counts(with_drafter) == counts
    assert StackOptions(threads=5).thread_counts(with_drafter) == (5, 5)


def test_a_drafter_with_another_tokenizer_is_refused_with_both_names() -> None:
    target = VerifierDescription(model="big", tokenizer_digest="a" * 64)
    check_pair(target, SourceDescription(model="small", tokenizer_digest="a" * 64))
    check_pair(target, SourceDescription(model="corpus", tokenizer_digest=""))
    with pytest.raises(CommandFailed, match=r"small \(b{12}\) is not that of big \(a{12}\)"):
        check_pair(target, SourceDescription(model="small", tokenizer_digest="b" * 64))
    with pytest.raises(CommandFailed, match="none"):
        check_pair(VerifierDescription(model="big"), SourceDescription(model="s", tokenizer_digest="b"))


def test_a_reserved_port_is_free_only_for_a_child_that_names_it() -> None:
    stack = Stack(StackOptions(target="org/name"))
    try:
        address = stack._reserve()
        port = int(address.rpartition(":")[2])
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with socket.socket() as child:
            child.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            child.bind(("127.0.0.1", port))
            child.listen()
            with socket.create_connection(("127.0.0.1", port), timeout=100):
                pass
    finally:
        stack.close()


def test_a_worker_is_started_again_after_growing_pauses_until_it_runs_steadily() -> None:
    restarts, now_s = Restarts(None), 100.0
    waits = []
    for _ in range(8):
        wait_s = restarts.ended(now_s)
        assert wait_s is not None
        waits.append(wait_s)
        assert restarts.due_s == now_s + wait_s
        restarts.started(now_s := restarts.due_s)
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert restarts.ended(now_s + STEADY_S) == 0.5


def test_a_verifier_that_ends_after_every_restart_is_given_up() -> None:
    restarts, now_s = Restarts(MOST_RESTARTS), 0.0
    for _ in range(MOST_RESTARTS):
        assert restarts.ended(now_s) is not None
        restarts.started(now_s := restarts.due_s)
    assert restarts.ended(now_s + STEADY_S - 1) is None
    assert restarts.ended(now_s + STEADY_S) == 0.5, "it ran steadily, and its ends count anew"
