"""What a link sends to its source next."""

import pytest

from outrider.wire.incoming.shape import BATCH_BYTES, BATCH_ENTRIES
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


def taken_apart(queue: UpdateQueue) -> list[tuple[list[int], list[int], list[int]]]:
    """What the queue gives until it is empty: aliases of progress, of ends and of follows, by update."""
    updates = []
    while (update := queue.take()) is not None:
        updates.append((list(update.progress), list(update.end), list(update.follow)))
    return updates


def test_many_long_sessions_are_followed_in_several_updates() -> None:
    queue = UpdateQueue(lambda handle: BATCH_BYTES // 2)
    for handle in range(5):
        queue.follow(handle)
    assert [follow for _, _, follow in taken_apart(queue)] == [[1, 2], [3, 4], [5]]


def test_a_session_that_is_larger_than_an_update_goes_alone() -> None:
    queue = UpdateQueue(lambda handle: 3 * BATCH_BYTES if handle == 1 else 10)
    for handle in range(3):
        queue.follow(handle)
    assert [follow for _, _, follow in taken_apart(queue)] == [[1], [2], [3]]


def test_an_update_has_no_more_entries_than_a_source_takes() -> None:
    queue = UpdateQueue()
    for handle in range(BATCH_ENTRIES + 1):
        queue.follow(handle)
    assert [len(follow) for _, _, follow in taken_apart(queue)] == [BATCH_ENTRIES, 1]
    for handle in range(BATCH_ENTRIES + 1):
        queue.end(handle)
    assert [len(end) for _, end, _ in taken_apart(queue)] == [BATCH_ENTRIES, 1]


def test_the_last_tokens_of_a_session_come_before_its_end() -> None:
    queue = UpdateQueue()
    for handle in range(3):
        queue.follow(handle)
    queue.take()
    long = tuple(range(BATCH_BYTES // 8))
    for handle in range(3):
        queue.progress(handle, 3, long, 100)
        assert queue.end(handle, flush=True)
    updates = taken_apart(queue)
    assert [progress for progress, _, _ in updates] == [[1], [2], [3]]
    sent = set[int]()
    for progress, end, _ in updates:
        sent.update(progress)
        assert sent >= set(end)
    assert sorted(alias for _, end, _ in updates for alias in end) == [1, 2, 3]


def test_a_lesson_ends_after_it_was_followed_also_where_follows_are_many() -> None:
    queue = UpdateQueue(lambda handle: BATCH_BYTES)
    for handle in range(3):
        queue.follow(handle)
        queue.end(handle, flush=True)
    one_by_one = [[([], [], [alias]), ([], [alias], [])] for alias in (1, 2, 3)]
    assert taken_apart(queue) == [update for pair in one_by_one for update in pair]


def test_a_follow_that_waits_for_room_carries_the_tokens_that_come_meanwhile() -> None:
    queue = UpdateQueue(lambda handle: BATCH_BYTES)
    queue.follow(0)
    queue.follow(1)
    assert queue.take() is not None
    assert queue.is_unannounced(1)
    assert not queue.progress(1, 3, (10,), 100)
    assert queue.progress(0, 3, (10,), 100)
    assert taken_apart(queue) == [([1], [], []), ([], [], [2])]
