"""Views of sessions, epochs, and who reads which session."""

import sys
import threading

import pytest

from outrider.wire.codec import SessionKey
from speculative.errors import InvalidRequest, StaleEpoch
from speculative.logprobs import TokenLogprob
from speculative.params import SamplingParams
from speculative.stats import UsageCount
from speculative.stop import FinishReason
from verifier_service.engine.messages import Finish, Update
from verifier_service.sessions.request import SessionRequest
from verifier_service.sessions.table import SessionTable, SessionView

KEY = SessionKey("tenant", "s")
NOW_MS = 1_700_000_000_000


class Notes:
    """A cursor that records its notifications."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def updated(self) -> None:
        self.said.append("updated")

    def superseded(self) -> None:
        self.said.append("superseded")


def added(table: SessionTable, epoch: int = 1, key: SessionKey = KEY) -> SessionView:
    request = SessionRequest(key, epoch, (1, 2), 2, 9, SamplingParams(), 0, (), None, 0, ())
    view = SessionView(table.new_handle(), request, (), {}, unread_since=0.0)
    table.add(view)
    return view


def update(view: SessionView, *ids: int, finish: Finish | None = None) -> Update:
    return Update(view.handle, len(view.ids), ids, bytes(len(ids)), 0, finish)


FINISH = Finish(FinishReason.STOP, UsageCount(2))


def test_a_view_grows_with_what_is_committed_and_notifies_its_readers() -> None:
    table, notes = SessionTable(), Notes()
    view = added(table)
    view.add_cursor(notes)
    table.absorb(update(view, 5, 6), now=1.0)
    assert (view.ids, bytes(view.token_sources)) == ([1, 2, 5, 6], bytes(4))
    assert notes.said == ["updated"]
    assert table.running == 1


def test_a_cancel_of_what_is_not_open_yet_is_meant_for_its_epoch_alone() -> None:
    table = SessionTable()
    table.fence(KEY, 5, NOW_MS)
    table.cancel_unopened(KEY)
    table.fence(KEY, 5, NOW_MS)
    assert table.is_cancelled_unopened(KEY)
    table.fence(KEY, 6, NOW_MS)
    assert not table.is_cancelled_unopened(KEY)


def test_cancels_of_what_is_never_opened_are_forgotten_with_their_epochs() -> None:
    table = SessionTable()
    for number in range(70_000):
        key = KEY._replace(session=str(number))
        table.fence(key, 5, NOW_MS)
        table.cancel_unopened(key)
    assert not table.is_cancelled_unopened(KEY._replace(session="0"))
    assert len(table._cancelled_unopened) == len(table._epochs)


def test_what_ends_counts_no_longer_and_stays_readable_for_a_while() -> None:
    table = SessionTable()
    view = added(table)
    table.absorb(update(view, 5, finish=FINISH), now=1.0)
    assert (table.running, view.finish) == (0, FINISH)
    table.forget_kept(now=5.0, lease_s=5.0)
    assert table.find(KEY) is view
    table.forget_kept(now=6.5, lease_s=5.0)
    assert table.find(KEY) is None
    assert table.absorb(update(view, 6), now=7.0) is None


def test_a_session_without_a_reader_becomes_an_orphan() -> None:
    table, notes = SessionTable(), Notes()
    view = added(table)
    assert table.orphans(now=5.0, grace_s=5.0) == []
    assert table.orphans(now=5.1, grace_s=5.0) == [view]
    view.add_cursor(notes)
    assert table.orphans(now=100.0, grace_s=5.0) == []
    view.remove_cursor(notes, now=100.0)
    assert table.orphans(now=104.0, grace_s=5.0) == []
    assert table.orphans(now=105.1, grace_s=5.0) == [view]


def parked(table: SessionTable, view: SessionView, now: float) -> None:
    usage = UsageCount(2, completion_tokens=len(view.ids) - 2)
    table.absorb(update(view)._replace(parked=usage), now)


def test_a_parked_session_runs_no_longer_and_is_kept_until_its_lease_ends() -> None:
    table = SessionTable()
    view = added(table)
    parked(table, view, now=1.0)
    assert (table.running, table.parked, table.orphans(99.0, 1.0)) == (0, 1, [])
    assert table.absorb(update(view, 5), now=2.0) is None
    table.forget_kept(now=6.0, lease_s=5.0)
    assert table.find(KEY) is view
    table.forget_kept(now=6.1, lease_s=5.0)
    assert table.find(KEY) is None
    assert (table.running, table.parked) == (0, 0)


def test_a_parked_session_that_goes_on_is_kept_for_good() -> None:
    table = SessionTable()
    view = added(table)
    parked(table, view, now=1.0)
    table.resume(view)
    table.forget_kept(now=100.0, lease_s=5.0)
    assert table.absorb(update(view, 5), now=100.0) is view
    assert (table.running, table.parked, view.ids) == (1, 0, [1, 2, 5])


@pytest.mark.parametrize("bounds", [{"most_kept": 2}, {"most_kept_ids": 6}])
def test_the_oldest_are_forgotten_where_too_many_are_kept(bounds: dict[str, int]) -> None:
    table = SessionTable(**bounds)
    views = [added(table, key=KEY._replace(choice=choice)) for choice in range(4)]
    parked(table, views[0], now=1.0)
    table.absorb(update(views[1], 5, finish=FINISH), now=2.0)
    parked(table, views[2], now=3.0)
    table.forget_kept(now=3.0, lease_s=100.0)
    known = [choice for choice in range(4) if table.find(KEY._replace(choice=choice))]
    assert known == [1, 2, 3]


def test_how_many_are_parked_can_be_asked_from_another_thread() -> None:
    table, failures, ended = SessionTable(most_kept=50), [], threading.Event()

    def ask() -> None:
        while not ended.is_set():
            try:
                assert 0 <= table.parked <= 51
            except Exception as error:
                failures.append(error)
                return

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    asker = threading.Thread(target=ask)
    asker.start()
    try:
        for number in range(2000):
            parked(table, added(table, key=KEY._replace(session=f"s{number}")), now=float(number))
            table.forget_kept(now=float(number), lease_s=1e9)
    finally:
        ended.set()
        asker.join()
        sys.setswitchinterval(before)
    assert not failures
    assert table.parked == 50


def test_log_probabilities_count_for_what_they_take() -> None:
    table = SessionTable(most_kept_ids=40)
    views = [added(table, key=KEY._replace(choice=choice)) for choice in range(3)]
    plain, wordy, last = views
    table.absorb(update(plain, *range(30), finish=FINISH), now=1.0)
    table.forget_kept(now=1.0, lease_s=100.0)
    assert table.find(plain.key) is plain
    logprobs = tuple(TokenLogprob.of(-1.0, [5] * 20, [-1.0] * 20) for _ in range(3))
    table.absorb(update(wordy, 5, 6, 7, finish=FINISH)._replace(logprobs=logprobs), now=2.0)
    table.forget_kept(now=2.0, lease_s=100.0)
    assert table.find(plain.key) is None, "three ids' log-probabilities take as much as 24 more"
    table.absorb(update(last, 5, finish=FINISH), now=3.0)
    table.forget_kept(now=3.0, lease_s=100.0)
    assert table.find(wordy.key) is wordy
    table.forget_kept(now=200.0, lease_s=1.0)
    table.absorb(update(added(table, epoch=2), *range(30), finish=FINISH), now=201.0)
    table.forget_kept(now=201.0, lease_s=100.0)
    assert table.find(KEY) is not None, "what is forgotten weighs nothing any more"


def test_the_highest_epoch_is_a_fence_even_after_the_session_is_gone() -> None:
    table = SessionTable()
    table.fence(KEY, 7, NOW_MS)
    table.fence(KEY, 7, NOW_MS)
    with pytest.raises(StaleEpoch) as stale:
        table.fence(KEY, 6, NOW_MS)
    assert stale.value.highest == 7
    table.fence(KEY._replace(choice=1), 1, NOW_MS)
    table.fence(KEY._replace(tenant="other"), 1, NOW_MS)


def test_an_epoch_from_the_future_is_refused_and_fences_nobody_off() -> None:
    table = SessionTable()
    with pytest.raises(InvalidRequest, match="days ahead"):
        table.fence(KEY, 2**64 - 1, NOW_MS)
    table.fence(KEY, NOW_MS << 20, NOW_MS)


def test_a_session_that_is_taken_over_is_forgotten_and_its_readers_are_notified() -> None:
    table, notes = SessionTable(), Notes()
    old = added(table)
    old.add_cursor(notes)
    table.supersede(old)
    new = added(table, epoch=2)
    assert notes.said == ["superseded"]
    assert table.find(KEY) is new
    assert table.running == 1
    assert table.absorb(update(old, 9), now=1.0) is None
    assert new.ids == [1, 2]


def test_a_session_that_is_here_is_fenced_off_however_many_others_came_since() -> None:
    table = SessionTable()
    table.fence(KEY, 7, NOW_MS)
    view = added(table, epoch=7)
    for number in range(70_000):
        table.fence(KEY._replace(session=str(number)), 5, NOW_MS)
    with pytest.raises(StaleEpoch) as stale:
        table.fence(KEY, 6, NOW_MS)
    assert stale.value.highest == 7
    table.fence(view.key, 7, NOW_MS)
