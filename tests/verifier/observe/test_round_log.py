"""The last rounds of each session are kept, with the part that each source had in them."""

from collections.abc import Mapping
from typing import Any

import pytest

from outrider.wire.codec import SessionKey
from speculative.stop import FinishReason
from speculative.tree import ROOT
from verifier_service.engine.stats import Phases
from verifier_service.observe.round_log import (
    TREES_OF_A_SESSION,
    RoundLog,
    RoundRecord,
    RoundTree,
    SessionLog,
    SourceShare,
    Step,
)

KEY = SessionKey("us", "one")
TREE = RoundTree((5, 7, 8), (ROOT, 0, ROOT), (0.9, 0.5, 0.1), (1, 1, 2))


def step(number: int) -> Step:
    return Step(number, float(number), number + 0.5, 1, 4, 0.0)


def record(number: int, *, drafted: Mapping[int, int] | None = None, **how: Any) -> RoundRecord:
    fields: dict[str, Any] = {
        "position": 4 + number,
        "uncomputed": 1,
        "prompt_passes": 0,
        "candidates": 3,
        "admitted": (1, 1, 2),
        "token_sources": b"\x01\x00",
        "tokens": (5, 9),
        "tree": TREE,
    }
    return RoundRecord(step(number), **(fields | how), drafted=drafted or {})


def opened(rounds: RoundLog, key: SessionKey = KEY, epoch: int = 7) -> None:
    rounds.open(SessionLog(key, epoch, 4, 16, 0.0))


def test_a_round_says_what_each_source_drafted_since_the_one_before() -> None:
    rounds = RoundLog()
    opened(rounds)
    rounds.add(KEY, 7, record(0, drafted={1: 5, 2: 2}), ("lookup", "drafter"), None)
    rounds.add(
        KEY, 7, record(1, drafted={1: 5, 2: 6}, admitted=(2,), token_sources=b"\x02\x02\x00"), (), None
    )
    (log,) = rounds.find(KEY)
    first, second = (shares for _, shares in log.shares())
    assert first == [SourceShare(1, 5, 2, 1), SourceShare(2, 2, 1, 0)]
    assert second == [SourceShare(2, 4, 1, 2)]


def test_what_was_drafted_before_the_oldest_round_that_is_kept_is_not_counted_to_it() -> None:
    rounds = RoundLog(most_of_a_session=2)
    opened(rounds)
    for number in range(5):
        rounds.add(KEY, 7, record(number, drafted={1: 10 * (number + 1)}, admitted=()), (), None)
    (log,) = rounds.find(KEY)
    assert log.forgotten == 3
    assert [found.step.number for found, _ in log.shares()] == [3, 4]
    assert [shares[0].drafted for _, shares in log.shares()] == [10, 10]
    assert len(rounds) == 2


def test_the_accepted_nodes_of_a_round_are_the_path_of_its_drafted_tokens() -> None:
    assert record(0).accepted_nodes() == {0}
    assert record(0, tokens=(5, 7, 1), token_sources=b"\x01\x01\x00").accepted_nodes() == {0, 1}
    assert record(0, tokens=(8, 7), token_sources=b"\x02\x00").accepted_nodes() == {2}
    assert record(0, tokens=(5,), token_sources=b"\x00").accepted_nodes() == set()


def test_the_latest_rounds_alone_keep_their_trees() -> None:
    rounds = RoundLog()
    opened(rounds)
    for number in range(TREES_OF_A_SESSION + 3):
        rounds.add(KEY, 7, record(number), (), None)
    (log,) = rounds.find(KEY)
    assert [one.step.number for one in log.rounds if one.tree is None] == [0, 1, 2]
    assert log.rounds[0].accepted_nodes() == set()


def test_a_session_that_was_parked_counts_its_drafts_anew() -> None:
    rounds = RoundLog()
    opened(rounds)
    rounds.add(KEY, 7, record(0, drafted={1: 9}), (), None)
    opened(rounds)
    rounds.add(KEY, 7, record(1, drafted={1: 4}), (), None)
    (log,) = rounds.find(KEY)
    assert [shares[0].drafted for _, shares in log.shares()] == [9, 4]


def test_each_epoch_of_a_session_has_its_own_log_and_other_tenants_sessions_are_not_found() -> None:
    rounds = RoundLog()
    opened(rounds, epoch=9)
    opened(rounds, epoch=7)
    opened(rounds, KEY._replace(tenant="them"))
    assert [log.epoch for log in rounds.find(KEY)] == [7, 9]
    assert [log.key.tenant for log in rounds.find(KEY._replace(tenant="them"))] == ["them"]
    assert rounds.find(KEY._replace(tenant="")) == []


def test_sessions_that_ended_are_forgotten_before_those_that_run() -> None:
    rounds = RoundLog(most=6)
    keys = [SessionKey("", f"s{number}") for number in range(3)]
    for key in keys:
        opened(rounds, key)
        rounds.add(key, 7, record(0), (), None)
        rounds.add(key, 7, record(1), (), None)
    rounds.add(keys[1], 7, None, (), FinishReason.LENGTH)
    rounds.add(keys[0], 7, record(2), (), None)
    assert [bool(rounds.find(key)) for key in keys] == [True, False, True]
    assert len(rounds) == 5


def test_it_stays_within_its_bound_whatever_comes() -> None:
    rounds = RoundLog(most=50, most_of_a_session=20)
    for number in range(40):
        key = SessionKey("", f"s{number}")
        opened(rounds, key)
        for round_ in range(30):
            rounds.add(key, 7, record(round_), (), FinishReason.STOP if round_ == 29 else None)
            assert len(rounds) <= 50
    assert rounds.find(SessionKey("", "s39"))
    assert not rounds.find(SessionKey("", "s0"))


def test_what_is_no_longer_known_is_no_error() -> None:
    rounds = RoundLog()
    rounds.add(KEY, 7, record(0), (), FinishReason.STOP)
    assert rounds.find(KEY) == []


def seconds(samples: Any) -> tuple[int, float]:
    return sum(samples.buckets), samples.total_ms / 1000


def test_a_session_waits_reads_and_decodes() -> None:
    phases = Phases()
    phases.opened(1, 10.0)
    phases.began(1, 12.0)
    phases.committed(1, 15.0)
    phases.committed(1, 16.0)
    phases.ended(1, 20.0)
    assert seconds(phases.queue) == (1, pytest.approx(2.0))
    assert seconds(phases.prefill) == (1, pytest.approx(3.0))
    assert seconds(phases.decode) == (1, pytest.approx(5.0))


def test_giving_way_and_going_on_begins_no_phase_again() -> None:
    phases = Phases()
    phases.opened(1, 0.0)
    phases.began(1, 1.0)
    phases.committed(1, 2.0)
    phases.began(1, 5.0)
    phases.ended(1, 6.0)
    assert seconds(phases.queue) == (1, pytest.approx(1.0))
    assert seconds(phases.decode) == (1, pytest.approx(4.0))


def test_one_that_ends_before_its_first_round_was_never_decoded() -> None:
    phases = Phases()
    phases.opened(1, 0.0)
    phases.ended(1, 3.0)
    phases.ended(2, 3.0)
    assert [seconds(samples)[0] for samples in (phases.queue, phases.prefill, phases.decode)] == [0, 0, 0]
