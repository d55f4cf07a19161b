"""Mirrors, epochs and who reads what."""

import sys
import threading

import pytest

from outrider.wire.codec import SessionKey
from speculative.commit import FinishReason
from speculative.errors import InvalidRequest, StaleEpoch
from speculative.logprobs import TokenLogprob
from speculative.params import SamplingParams
from speculative.stats import UsageCount
from verifier_service.engine.messages import Finish, Update
from verifier_service.registry import Mirror, Registry
from verifier_service.request import Request

KEY = SessionKey("tenant", "s")
NOW_MS = 1_700_000_000_000


class Notes:
    """A cursor that remembers what it was told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def touched(self) -> None:
        self.said.append("touched")

    def superseded(self) -> None:
        self.said.append("superseded")


def added(registry: Registry, epoch: int = 1, key: SessionKey = KEY) -> Mirror:
    request = Request(key, epoch, (1, 2), 2, 9, SamplingParams(), 0, (), None, 0, ())
    mirror = Mirror(registry.new_handle(), request, (), {}, unread_since=0.0)
    registry.add(mirror)
    return mirror


def update(mirror: Mirror, *ids: int, finish: Finish | None = None) -> Update:
    return Update(mirror.handle, len(mirror.ids), ids, bytes(len(ids)), 0, finish)


FINISH = Finish(FinishReason.STOP, UsageCount(2))


def test_a_mirror_grows_with_what_is_committed_and_tells_its_readers() -> None:
    registry, notes = Registry(), Notes()
    mirror = added(registry)
    mirror.subscribe(notes)
    registry.absorb(update(mirror, 5, 6), now=1.0)
    assert (mirror.ids, bytes(mirror.credits)) == ([1, 2, 5, 6], bytes(4))
    assert notes.said == ["touched"]
    assert registry.running == 1


def test_a_cancel_of_what_is_not_open_yet_is_meant_for_its_epoch_alone() -> None:
    registry = Registry()
    registry.fence(KEY, 5, NOW_MS)
    registry.cancel_unopened(KEY)
    registry.fence(KEY, 5, NOW_MS)
    assert registry.is_cancelled_unopened(KEY)
    registry.fence(KEY, 6, NOW_MS)
    assert not registry.is_cancelled_unopened(KEY)


def test_cancels_of_what_is_never_opened_are_forgotten_with_their_epochs() -> None:
    registry = Registry()
    for number in range(70_000):
        key = KEY._replace(session=str(number))
        registry.fence(key, 5, NOW_MS)
        registry.cancel_unopened(key)
    assert not registry.is_cancelled_unopened(KEY._replace(session="0"))
    assert len(registry._cancelled_unopened) == len(registry._epochs)


def test_what_ends_counts_no_longer_and_stays_readable_for_a_while() -> None:
    registry = Registry()
    mirror = added(registry)
    registry.absorb(update(mirror, 5, finish=FINISH), now=1.0)
    assert (registry.running, mirror.finish) == (0, FINISH)
    registry.forget_kept(now=5.0, lease_s=5.0)
    assert registry.find(KEY) is mirror
    registry.forget_kept(now=6.5, lease_s=5.0)
    assert registry.find(KEY) is None
    assert registry.absorb(update(mirror, 6), now=7.0) is None


def test_a_session_without_a_reader_becomes_an_orphan() -> None:
    registry, notes = Registry(), Notes()
    mirror = added(registry)
    assert registry.orphans(now=5.0, grace_s=5.0) == []
    assert registry.orphans(now=5.1, grace_s=5.0) == [mirror]
    mirror.subscribe(notes)
    assert registry.orphans(now=100.0, grace_s=5.0) == []
    mirror.unsubscribe(notes, now=100.0)
    assert registry.orphans(now=104.0, grace_s=5.0) == []
    assert registry.orphans(now=105.1, grace_s=5.0) == [mirror]


def parked(registry: Registry, mirror: Mirror, now: float) -> None:
    usage = UsageCount(2, completion_tokens=len(mirror.ids) - 2)
    registry.absorb(update(mirror)._replace(parked=usage), now)


def test_a_parked_session_runs_no_longer_and_is_kept_until_its_lease_ends() -> None:
    registry = Registry()
    mirror = added(registry)
    parked(registry, mirror, now=1.0)
    assert (registry.running, registry.parked, registry.orphans(99.0, 1.0)) == (0, 1, [])
    assert registry.absorb(update(mirror, 5), now=2.0) is None
    registry.forget_kept(now=6.0, lease_s=5.0)
    assert registry.find(KEY) is mirror
    registry.forget_kept(now=6.1, lease_s=5.0)
    assert registry.find(KEY) is None
    assert (registry.running, registry.parked) == (0, 0)


def test_a_parked_session_that_goes_on_is_kept_for_good() -> None:
    registry = Registry()
    mirror = added(registry)
    parked(registry, mirror, now=1.0)
    registry.resumed(mirror)
    registry.forget_kept(now=100.0, lease_s=5.0)
    assert registry.absorb(update(mirror, 5), now=100.0) is mirror
    assert (registry.running, registry.parked, mirror.ids) == (1, 0, [1, 2, 5])


@pytest.mark.parametrize("bounds", [{"most_kept": 2}, {"most_kept_ids": 6}])
def test_the_oldest_are_forgotten_where_too_many_are_kept(bounds: dict[str, int]) -> None:
    registry = Registry(**bounds)
    mirrors = [added(registry, key=KEY._replace(choice=choice)) for choice in range(4)]
    parked(registry, mirrors[0], now=1.0)
    registry.absorb(update(mirrors[1], 5, finish=FINISH), now=2.0)
    parked(registry, mirrors[2], now=3.0)
    registry.forget_kept(now=3.0, lease_s=100.0)
    known = [choice for choice in range(4) if registry.find(KEY._replace(choice=choice))]
    assert known == [1, 2, 3]


def test_how_many_are_parked_can_be_asked_from_another_thread() -> None:
    registry, failures, ended = Registry(most_kept=50), [], threading.Event()

    def ask() -> None:
        while not ended.is_set():
            try:
                assert 0 <= registry.parked <= 51
            except Exception as error:
                failures.append(error)
                return

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    asking = threading.Thread(target=ask)
    asking.start()
    try:
        for number in range(2000):
            parked(registry, added(registry, key=KEY._replace(session=f"s{number}")), now=float(number))
            registry.forget_kept(now=float(number), lease_s=1e9)
    finally:
        ended.set()
        asking.join()
        sys.setswitchinterval(before)
    assert not failures
    assert registry.parked == 50


def test_log_probabilities_count_for_what_they_take() -> None:
    registry = Registry(most_kept_ids=40)
    mirrors = [added(registry, key=KEY._replace(choice=choice)) for choice in range(3)]
    plain, wordy, last = mirrors
    registry.absorb(update(plain, *range(30), finish=FINISH), now=1.0)
    registry.forget_kept(now=1.0, lease_s=100.0)
    assert registry.find(plain.key) is plain
    told = tuple(TokenLogprob.of(-1.0, [5] * 20, [-1.0] * 20) for _ in range(3))
    registry.absorb(update(wordy, 5, 6, 7, finish=FINISH)._replace(logprobs=told), now=2.0)
    registry.forget_kept(now=2.0, lease_s=100.0)
    assert registry.find(plain.key) is None, "three ids' log-probabilities take as much as 24 more"
    registry.absorb(update(last, 5, finish=FINISH), now=3.0)
    registry.forget_kept(now=3.0, lease_s=100.0)
    assert registry.find(wordy.key) is wordy
    registry.forget_kept(now=200.0, lease_s=1.0)
    registry.absorb(update(added(registry, epoch=2), *range(30), finish=FINISH), now=201.0)
    registry.forget_kept(now=201.0, lease_s=100.0)
    assert registry.find(KEY) is not None, "what is forgotten weighs nothing any more"


def test_the_highest_epoch_is_a_fence_even_after_the_session_is_gone() -> None:
    registry = Registry()
    registry.fence(KEY, 7, NOW_MS)
    registry.fence(KEY, 7, NOW_MS)
    with pytest.raises(StaleEpoch) as stale:
        registry.fence(KEY, 6, NOW_MS)
    assert stale.value.highest == 7
    registry.fence(KEY._replace(choice=1), 1, NOW_MS)
    registry.fence(KEY._replace(tenant="other"), 1, NOW_MS)


def test_an_epoch_from_the_future_is_refused_and_fences_nobody_off() -> None:
    registry = Registry()
    with pytest.raises(InvalidRequest, match="days ahead"):
        registry.fence(KEY, 2**64 - 1, NOW_MS)
    registry.fence(KEY, NOW_MS << 20, NOW_MS)


def test_a_session_that_is_taken_over_is_forgotten_and_its_readers_told() -> None:
    registry, notes = Registry(), Notes()
    old = added(registry)
    old.subscribe(notes)
    registry.supersede(old)
    new = added(registry, epoch=2)
    assert notes.said == ["superseded"]
    assert registry.find(KEY) is new
    assert registry.running == 1
    assert registry.absorb(update(old, 9), now=1.0) is None
    assert new.ids == [1, 2]
