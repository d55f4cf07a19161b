"""Which workers have registered, and until when, on a clock of the test's own."""

from dataclasses import replace

import pytest

from orchestrator.fleet.directory import MAX_UNANSWERED, MAX_UNANSWERED_ELSEWHERE, Directory
from outrider.wire.workers import BELIEVED_S, CONTRACT, WorkerEntry, WorkerState
from speculative.errors import Overloaded

ENTRY = WorkerEntry("verifier", "v:1", WorkerState(model="m", sessions=3))
DRAFTER = WorkerEntry("drafter", "d:1", WorkerState())


def gone(address: str) -> bool:
    return False


def there(address: str) -> bool:
    return True


def test_what_is_new_is_news_and_what_only_grows_is_not() -> None:
    directory = Directory()
    assert directory.heard(ENTRY, 0.0)
    assert not directory.heard(replace(ENTRY, state=WorkerState(sessions=9)), 1.0)
    assert directory.heard(replace(ENTRY, draining=True), 2.0)
    assert directory.entries("verifier") == [replace(ENTRY, draining=True)]
    assert directory.entries("drafter") == []


def test_nobody_takes_the_address_of_a_worker_of_another_role_that_is_heard_of() -> None:
    directory = Directory()
    directory.heard(ENTRY, 0.0)
    with pytest.raises(Overloaded, match="a verifier announces itself at v:1, not a drafter"):
        directory.heard(replace(DRAFTER, address="v:1"), BELIEVED_S - 0.1)
    assert directory.entries("verifier", "drafter") == [ENTRY]
    assert directory.heard(replace(DRAFTER, address="v:1"), BELIEVED_S + 0.1), "its port is another's now"


def test_who_is_not_heard_of_is_dropped_unless_it_is_alive() -> None:
    directory = Directory()
    directory.heard(ENTRY, 0.0)
    directory.heard(DRAFTER, 1.0)
    directory.forget(BELIEVED_S - 0.1, gone)
    assert len(directory) == 2
    directory.forget(BELIEVED_S + 0.1, there)
    assert len(directory) == 2
    directory.forget(BELIEVED_S + 0.1, gone)
    assert directory.entries("verifier", "drafter") == [DRAFTER]


def test_a_worker_s_own_word_stands_against_what_others_heard_until_it_falls_silent() -> None:
    directory = Directory()
    directory.heard(replace(ENTRY, draining=True), 0.0)
    directory.learnt([ENTRY, DRAFTER], 1.0)
    assert directory.entries("verifier") == [replace(ENTRY, draining=True)]
    assert directory.entries("drafter") == [DRAFTER]
    directory.learnt([ENTRY], BELIEVED_S + 1)
    assert directory.entries("verifier") == [ENTRY]


def test_only_what_a_worker_said_here_is_passed_on_and_once() -> None:
    directory = Directory()
    directory.learnt([DRAFTER], 0.0)
    directory.heard(ENTRY, 0.0)
    directory.heard(replace(ENTRY, draining=True), 0.5)
    assert directory.take_fresh() == [replace(ENTRY, draining=True)]
    assert directory.take_fresh() == []


def test_one_of_another_contract_is_known_and_not_used() -> None:
    directory = Directory()
    directory.heard(replace(ENTRY, contract=CONTRACT + 1), 0.0)
    directory.learnt([replace(DRAFTER, contract=CONTRACT + 1)], 0.0)
    assert directory.entries("verifier", "drafter") == []
    assert {address: it.kind for address, it in directory.refused().items()} == {
        "v:1": "contract",
        "d:1": "contract",
    }


def test_there_is_room_for_so_many_and_those_that_are_in_stay() -> None:
    directory = Directory(most=1)
    directory.heard(ENTRY, 0.0)
    directory.heard(ENTRY, 1.0)
    with pytest.raises(Overloaded):
        directory.heard(DRAFTER, 1.0)
    directory.learnt([DRAFTER], 1.0)
    assert directory.entries("verifier", "drafter") == [ENTRY]


def drafters(count: int, host: str = "lies") -> list[WorkerEntry]:
    return [replace(DRAFTER, address=f"{host}:{port}") for port in range(1, count + 1)]


def test_an_announcer_of_false_addresses_is_bounded_and_leaves_room_for_others() -> None:
    directory = Directory()
    for entry in drafters(MAX_UNANSWERED):
        assert directory.heard(entry, 0.0, "mad")
    with pytest.raises(Overloaded, match=f"mad has announced {MAX_UNANSWERED} addresses"):
        directory.heard(DRAFTER, 0.0, "mad")
    assert not directory.heard(drafters(1)[0], 1.0, "mad"), "an address that is known is no further one"
    assert directory.heard(DRAFTER, 1.0, "honest")


def test_workers_that_have_answered_take_no_room_from_those_that_have_not() -> None:
    directory = Directory()
    for entry in drafters(MAX_UNANSWERED, "fine"):
        directory.heard(entry, 0.0, "host")
    directory.forget(0.1, lambda address: address.startswith("fine"))
    for entry in drafters(MAX_UNANSWERED):
        directory.heard(entry, 1.0, "host")
    directory.heard(drafters(1, "fine")[0], 2.0, "host")
    with pytest.raises(Overloaded):
        directory.heard(DRAFTER, 2.0, "host")


def test_a_flood_that_others_have_heard_is_taken_in_part_and_goes_on_as_workers_answer() -> None:
    directory = Directory()
    directory.heard(ENTRY, 0.0, "honest")
    told = drafters(MAX_UNANSWERED_ELSEWHERE + 10)
    for now in (0.0, 1.0):
        directory.learnt(told, now)
        assert len(directory) == 1 + MAX_UNANSWERED_ELSEWHERE
    directory.forget(1.0, there)
    directory.learnt(told, 2.0)
    assert len(directory) == 1 + len(told)
    assert ENTRY in directory.entries("verifier")
