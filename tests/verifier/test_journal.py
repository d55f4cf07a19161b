"""The last rounds of each session are kept, and what sources had to do with each can be told."""

from collections.abc import Mapping
from typing import Any

import pytest

from outrider.wire.codec import SessionKey
from speculative.commit import FinishReason
from verifier_service.engine.stats import Phases
from verifier_service.journal import Entry, Journal, Record, Share, Step

KEY = SessionKey("us", "one")


def step(number: int) -> Step:
    return Step(number, float(number), number + 0.5, 1, 4, 0.0)


def record(number: int, *, drafted: Mapping[int, int] | None = None, **how: Any) -> Record:
    fields: dict[str, Any] = {
        "position": 4 + number,
        "pending": 1,
        "prompt_passes": 0,
        "candidates": 3,
        "admitted": (1, 1, 2),
        "credits": b"\x01\x00",
    }
    return Record(step(number), **(fields | how), drafted=drafted or {})


def opened(journal: Journal, key: SessionKey = KEY, epoch: int = 7) -> None:
    journal.opened(Entry(key, epoch, 4, 16, 0.0))


def test_a_round_says_what_each_source_drafted_since_the_one_before() -> None:
    journal = Journal()
    opened(journal)
    journal.add(KEY, 7, record(0, drafted={1: 5, 2: 2}), ("lookup", "drafter"), None)
    journal.add(KEY, 7, record(1, drafted={1: 5, 2: 6}, admitted=(2,), credits=b"\x02\x02\x00"), (), None)
    (entry,) = journal.find(KEY)
    first, second = (shares for _, shares in entry.shares())
    assert first == [Share(1, 5, 2, 1), Share(2, 2, 1, 0)]
    assert second == [Share(2, 4, 1, 2)]


def test_what_was_drafted_before_the_oldest_round_that_is_kept_is_not_counted_to_it() -> None:
    journal = Journal(most_of_a_session=2)
    opened(journal)
    for number in range(5):
        journal.add(KEY, 7, record(number, drafted={1: 10 * (number + 1)}, admitted=()), (), None)
    (entry,) = journal.find(KEY)
    assert entry.forgotten == 3
    assert [found.step.number for found, _ in entry.shares()] == [3, 4]
    assert [shares[0].drafted for _, shares in entry.shares()] == [10, 10]
    assert len(journal) == 2


def test_a_session_that_was_parked_counts_its_drafts_anew() -> None:
    journal = Journal()
    opened(journal)
    journal.add(KEY, 7, record(0, drafted={1: 9}), (), None)
    opened(journal)
    journal.add(KEY, 7, record(1, drafted={1: 4}), (), None)
    (entry,) = journal.find(KEY)
    assert [shares[0].drafted for _, shares in entry.shares()] == [9, 4]


def test_epochs_of_a_session_are_told_apart_and_other_tenants_sessions_are_not_found() -> None:
    journal = Journal()
    opened(journal, epoch=9)
    opened(journal, epoch=7)
    opened(journal, KEY._replace(tenant="them"))
    assert [entry.epoch for entry in journal.find(KEY)] == [7, 9]
    assert [entry.key.tenant for entry in journal.find(KEY._replace(tenant="them"))] == ["them"]
    assert journal.find(KEY._replace(tenant="")) == []


def test_sessions_that_ended_are_forgotten_before_those_that_run() -> None:
    journal = Journal(most=6)
    keys = [SessionKey("", f"s{number}") for number in range(3)]
    for key in keys:
        opened(journal, key)
        journal.add(key, 7, record(0), (), None)
        journal.add(key, 7, record(1), (), None)
    journal.add(keys[1], 7, None, (), FinishReason.LENGTH)
    journal.add(keys[0], 7, record(2), (), None)
    assert [bool(journal.find(key)) for key in keys] == [True, False, True]
    assert len(journal) == 5


def test_it_stays_within_its_bound_whatever_comes() -> None:
    journal = Journal(most=50, most_of_a_session=20)
    for number in range(40):
        key = SessionKey("", f"s{number}")
        opened(journal, key)
        for round_ in range(30):
            journal.add(key, 7, record(round_), (), FinishReason.STOP if round_ == 29 else None)
            assert len(journal) <= 50
    assert journal.find(SessionKey("", "s39"))
    assert not journal.find(SessionKey("", "s0"))


def test_what_is_no_longer_known_is_no_error() -> None:
    journal = Journal()
    journal.add(KEY, 7, record(0), (), FinishReason.STOP)
    assert journal.find(KEY) == []


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
