"""What a link sends to its source next."""

import pytest

from verifier_service.remote_sources.update_queue import UpdateQueue


def test_progress_that_was_not_sent_is_extended() -> None:
    queue = UpdateQueue()
    queue.follow(7)
    assert queue.take() is not None
    assert queue.progress(7, 3, (10, 11), 100)
    assert queue.progress(7, 5, (12,), 200)
    update = queue.take()
    assert update is not None
    (progressed,) = update.progress.values()
    assert (progressed.position, progressed.ids, progressed.prefix_hash) == (3, [10, 11, 12], 200)
    assert queue.take() is None


def test_a_follow_that_was_not_sent_carries_the_progress() -> None:
    queue = UpdateQueue()
    queue.follow(7)
    assert not queue.progress(7, 3, (10,), 100)
    update = queue.take()
    assert update is not None
    assert (len(update.follow), update.progress) == (1, {})


def test_a_session_that_ends_before_it_was_followed_is_never_mentioned() -> None:
    queue = UpdateQueue()
    queue.follow(7)
    assert not queue.end(7)
    assert queue.take() is None


def test_an_end_takes_the_progress_with_it() -> None:
    queue = UpdateQueue()
    queue.follow(7)
    first = queue.take()
    queue.progress(7, 3, (10,), 100)
    assert queue.end(7)
    assert not queue.end(7)
    update = queue.take()
    assert first is not None
    assert update is not None
    assert (update.end, update.progress) == (first.follow, {})


def test_what_is_not_followed_has_no_progress() -> None:
    assert not UpdateQueue().progress(7, 3, (10,), 100)


def test_aliases_rest_before_they_are_used_again_and_stay_small() -> None:
    queue = UpdateQueue()
    used = []
    for handle in range(500):
        queue.follow(handle)
        update = queue.take()
        assert update is not None
        used.append(update.follow[0])
        queue.end(handle)
        queue.take()
    assert max(used) < 128
    for at, alias in enumerate(used):
        assert alias not in used[max(0, at - 32) : at]
    assert queue.was_used(used[0])
    assert not queue.was_used(0)
    assert not queue.was_used(max(used) + 1)


def test_an_alias_is_never_ended_and_followed_in_one_update() -> None:
    queue = UpdateQueue()
    for handle in range(40):
        queue.follow(handle)
    queue.take()
    for handle in range(40):
        queue.end(handle)
        queue.follow(100 + handle)
    update = queue.take()
    assert update is not None
    assert not set(update.follow) & set(update.end)


def test_a_flushed_end_comes_with_all_the_progress() -> None:
    queue = UpdateQueue()
    for handle in (7, 8):
        queue.follow(handle)
    first = queue.take()
    queue.progress(7, 3, (10,), 100)
    queue.progress(8, 3, (20,), 200, hold=True)
    for handle in (7, 8):
        assert queue.end(handle, flush=True)
    update = queue.take()
    assert first is not None
    assert update is not None
    assert update.end == first.follow
    assert [progressed.ids for progressed in update.progress.values()] == [[10], [20]]


def test_a_session_that_begins_while_the_source_rests_is_followed_once_it_has_rested() -> None:
    queue = UpdateQueue()
    queue.follow_later(7)
    assert not queue.progress(7, 3, (10,), 100, hold=True)
    assert queue.take() is None
    assert queue.progress(7, 4, (11,), 200)
    update = queue.take()
    assert update is not None
    assert (len(update.follow), update.progress) == (1, {})
    assert queue.progress(7, 5, (12,), 300)


def test_a_session_that_was_over_before_the_source_woke_is_never_mentioned() -> None:
    queue = UpdateQueue()
    queue.follow_later(7)
    assert not queue.end(7)
    assert not queue.progress(7, 3, (10,), 100)
    assert queue.take() is None


@pytest.mark.parametrize("resting", [True, False])
def test_a_source_that_learns_follows_a_session_after_its_end(resting: bool) -> None:
    queue = UpdateQueue()
    (queue.follow_later if resting else queue.follow)(7)
    assert queue.is_unannounced(7)
    assert queue.end(7, flush=True)
    assert not queue.is_unannounced(7)
    first, second = queue.take(), queue.take()
    assert first is not None
    assert second is not None
    assert (len(first.follow), first.end) == (1, ())
    assert (second.follow, second.end) == ((), first.follow)
    assert queue.take() is None
    assert queue.handles == {}


def test_tokens_held_from_a_resting_source_come_with_its_next_update() -> None:
    queue = UpdateQueue()
    queue.follow(7)
    queue.take()
    assert not queue.progress(7, 10, (1, 2), 11, hold=True)
    assert queue.take() is None
    assert not queue.progress(7, 12, (3,), 12, hold=True)
    assert queue.progress(7, 13, (4,), 13)
    update = queue.take()
    assert update is not None
    (progressed,) = update.progress.values()
    assert (progressed.position, progressed.ids, progressed.prefix_hash) == (10, [1, 2, 3, 4], 13)


def test_an_ended_session_leaves_nothing_held() -> None:
    queue = UpdateQueue()
    queue.follow(7)
    queue.take()
    queue.progress(7, 10, (1,), 11, hold=True)
    queue.end(7)
    assert queue.take().progress == {}
    assert queue.take() is None
