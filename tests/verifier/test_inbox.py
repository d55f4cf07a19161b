"""The engine's inbox: who merges a draft, and when."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice

import pytest
from ngram_lm import LAYOUT

from outrider.lm.kv.pool import SlotPool
from outrider.wire.codec import SessionKey
from speculative.fragment import Fragment
from speculative.hashing import prefix_hash
from speculative.params import SamplingParams
from speculative.stop import FinishReason, StopChecker
from tests.in_time import in_time
from verifier_service.engine.kv_cache import KVCache
from verifier_service.engine.messages import Cancel, InFlight, Offers, load_of
from verifier_service.engine.scheduler import Scheduler
from verifier_service.engine.session import Session
from verifier_service.engine.session_pool import SessionPool
from verifier_service.engine.stats import CountsByName, EngineTotals
from verifier_service.engine.thread import EngineInbox
from verifier_service.sessions.request import SessionRequest, SourceSet

DRAFT = Fragment(1, 1, 3, 0, (7,), (-1,), (0.5,))


class Sessions:
    """Notes who merges what; fails where two threads do so at once."""

    def __init__(self) -> None:
        self.merged: list[int] = []
        self.unknown: set[int] = set()
        self.takes_s = 0.0
        self.held = threading.Lock()

    def merge(self, handle: int, fragment: Fragment, arrived_s: float) -> bool:
        assert self.held.acquire(blocking=False), "two touch the sessions at once"
        time.sleep(self.takes_s)
        if known := handle not in self.unknown:
            self.merged.append(handle)
        self.held.release()
        return known


@pytest.fixture
def sessions() -> Sessions:
    return Sessions()


@pytest.fixture
def inbox(sessions: Sessions) -> EngineInbox:
    return EngineInbox(sessions.merge)


def offers(*handles: int, in_flight: InFlight | None = None) -> Offers:
    counted = in_flight or InFlight()
    counted.put += len(handles)
    return Offers(tuple((handle, DRAFT) for handle in handles), 0.0, counted)


def left(inbox: EngineInbox) -> list[list[int]]:
    """Handles of the drafts that wait for the engine's thread."""
    waiting = [command for command in inbox.waiting() if isinstance(command, Offers)]
    return [[handle for handle, _ in command.drafts] for command in waiting]


@contextmanager
def running(*work: threading.Thread) -> Iterator[None]:
    for thread in work:
        thread.start()
    yield
    for thread in work:
        thread.join(60)
        assert not thread.is_alive()


def test_drafts_that_come_between_two_passes_wait_for_the_engine(
    inbox: EngineInbox, sessions: Sessions
) -> None:
    inbox.put(offers(1, 2))
    with inbox.computing():
        pass
    inbox.put(offers(3))
    assert sessions.merged == []
    assert left(inbox) == [[1, 2], [3]]


def test_drafts_that_come_while_the_target_computes_are_merged_at_once(
    inbox: EngineInbox, sessions: Sessions
) -> None:
    in_flight = InFlight()
    with inbox.computing():
        inbox.put(offers(1, 2, in_flight=in_flight))
        assert sessions.merged == [1, 2]
        assert in_flight.count == 2, "however fast they are merged, a link may bring so many in a step"
    assert left(inbox) == []
    assert in_flight.count == 0


def test_other_commands_wait_whenever_they_come(inbox: EngineInbox) -> None:
    with inbox.computing():
        inbox.put(Cancel(1))
    inbox.put(Cancel(2))
    assert list(inbox.waiting()) == [Cancel(1), Cancel(2)]
    assert inbox.get(0.0) is None


def test_a_large_draft_counts_for_as_many_as_take_as_long_to_merge(
    inbox: EngineInbox, sessions: Sessions
) -> None:
    large = Fragment(1, 1, 3, 0, (7,) * 255, tuple(range(-1, 254)), (0.5,) * 255)
    drafts = ((1, large), (2, DRAFT))
    in_flight = InFlight(put=load_of(drafts))
    assert in_flight.count == 9
    sessions.unknown = {2}
    with inbox.computing():
        inbox.put(Offers(drafts, 0.0, in_flight))
    assert in_flight.count == 1
    running_sessions()[0].take_offers(Offers(drafts[1:], 0.0, in_flight))
    assert in_flight.count == 0


def test_what_comes_while_the_engine_takes_commands_waits_for_the_next_time(inbox: EngineInbox) -> None:
    inbox.put(offers(0))
    taken = []
    for command in islice(inbox.waiting(), 10):
        inbox.put(offers(len(taken) + 1))
        taken.append(command)
    assert len(taken) == 1, "a source that drafts faster than the engine merges would hold up every session"
    assert left(inbox) == [[1]]


def test_what_only_the_engine_can_decide_waits_for_it(inbox: EngineInbox, sessions: Sessions) -> None:
    sessions.unknown = {2}
    in_flight = InFlight()
    with inbox.computing():
        inbox.put(offers(1, 2, 3, in_flight=in_flight))
    assert sessions.merged == [1, 3]
    assert left(inbox) == [[2]]
    assert in_flight.count == 1


def test_the_engine_has_the_sessions_again_after_a_pass_that_failed(
    inbox: EngineInbox, sessions: Sessions
) -> None:
    with pytest.raises(ValueError, match="no memory"), inbox.computing():
        raise ValueError("no memory")
    inbox.put(offers(1))
    assert sessions.merged == []


def test_the_engine_waits_for_one_draft_and_not_for_a_whole_message(
    inbox: EngineInbox, sessions: Sessions
) -> None:
    sessions.takes_s = 0.05
    bringing = threading.Event()

    def bring() -> None:
        bringing.wait()
        inbox.put(offers(*range(100)))

    with running(threading.Thread(target=bring)):
        with inbox.computing():
            bringing.set()
            while not sessions.merged:
                time.sleep(0.001)
        in_time(len(sessions.merged) < 50)
        now = len(sessions.merged)
        time.sleep(0.2)
        assert len(sessions.merged) == now
    assert left(inbox) == [list(range(now, 100))]


def test_every_draft_is_merged_by_one_thread_at_a_time_and_none_is_lost(
    inbox: EngineInbox, sessions: Sessions
) -> None:
    in_flight, taken = [InFlight() for _ in range(4)], []

    def bring(source: int) -> None:
        for first in range(0, 1000, 5):
            low = 1000 * source + first
            inbox.put(offers(*range(low, low + 5), in_flight=in_flight[source]))
            time.sleep(0.0001)

    with running(*[threading.Thread(target=bring, args=[source]) for source in range(4)]):
        while len(taken) + len(sessions.merged) < 4000:
            with inbox.computing():
                time.sleep(0.0005)
            assert sessions.held.acquire(blocking=False), "the engine does not have the sessions"
            for command in inbox.waiting():
                assert isinstance(command, Offers)
                taken += [handle for handle, _ in command.drafts]
                command.in_flight.taken += len(command.drafts)
            sessions.held.release()
    assert sorted(taken + sessions.merged) == list(range(4000))
    assert sessions.merged
    assert [counted.count for counted in in_flight] == [0] * 4


IDS = (5, 6, 7)


def session(handle: int) -> Session:
    key = SessionKey("", f"s{handle}")
    request = SessionRequest(key, 1, IDS, len(IDS), 32, SamplingParams(temperature=0.0), 0, (), None, 8, ())
    stop_checker = StopChecker(frozenset(), request.limit, (), None, IDS, len(IDS))
    return Session(handle, request, stop_checker, 16, SourceSet(("far",), frozenset(), frozenset({1})))


def running_sessions(*sessions: Session) -> tuple[SessionPool, CountsByName]:
    counts = CountsByName()
    kv = KVCache(SlotPool(LAYOUT, 1024), reuse=False, lease_s=0.0)
    running = SessionPool(kv, Scheduler(8), EngineTotals(), counts)
    for one in sessions:
        running.open(one, 0.0)
    return running, counts


def draft(token: int) -> Fragment:
    return Fragment(1, 1, len(IDS), prefix_hash(IDS), (token,), (-1,), (0.5,))


def test_a_draft_for_a_session_that_is_still_on_its_way_is_not_lost() -> None:
    running, counts = running_sessions()
    assert not running.merge(1, draft(3), 0.0)
    running.open(session(1), 0.0)
    running.take_offers(Offers(((1, draft(3)),), 0.0, InFlight(put=1)))
    assert counts["far"].kept == 1


def test_a_malformed_draft_mutes_its_source_at_once() -> None:
    one = session(1)
    running, counts = running_sessions(one)
    assert running.merge(1, draft(16), 0.0)
    assert not one.sources.listens_to(1)
    assert counts["far"].malformed == 1
    assert len(running.take_events()[1]) == 1


def test_a_draft_that_breaks_its_session_ends_it_when_the_pass_is_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = session(1), session(2)
    running, counts = running_sessions(bad, good)
    monkeypatch.setattr(bad, "offer", lambda fragment: 1 // 0)
    assert not running.merge(1, draft(3), 0.0)
    assert bad in running, "its rows may be computed at this moment"
    running.take_offers(Offers(((1, draft(3)), (2, draft(3))), 0.0, InFlight(put=2)))
    assert bad not in running
    assert good in running
    assert counts["far"].kept == 1
    (update,), _ = running.take_events()
    assert update.finish is not None
    assert update.finish.reason is FinishReason.ERROR
    assert "ZeroDivisionError" in caplog.text
