"""What a link has to say next, and how long it stays away."""

import pytest

from verifier_service.sources.backoff import Backoff
from verifier_service.sources.outgoing import Outgoing


def test_progress_that_was_not_sent_is_extended() -> None:
    outgoing = Outgoing()
    outgoing.follow(7)
    assert outgoing.take() is not None
    assert outgoing.progress(7, 3, (10, 11), 100)
    assert outgoing.progress(7, 5, (12,), 200)
    message = outgoing.take()
    assert message is not None
    (progressed,) = message.progress.values()
    assert (progressed.position, progressed.ids, progressed.prefix_hash) == (3, [10, 11, 12], 200)
    assert outgoing.take() is None


def test_a_follow_that_was_not_sent_carries_the_progress() -> None:
    outgoing = Outgoing()
    outgoing.follow(7)
    assert not outgoing.progress(7, 3, (10,), 100)
    message = outgoing.take()
    assert message is not None
    assert (len(message.follow), message.progress) == (1, {})


def test_a_session_that_ends_before_it_was_followed_is_never_mentioned() -> None:
    outgoing = Outgoing()
    outgoing.follow(7)
    assert not outgoing.end(7)
    assert outgoing.take() is None


def test_an_end_takes_the_progress_with_it() -> None:
    outgoing = Outgoing()
    outgoing.follow(7)
    first = outgoing.take()
    outgoing.progress(7, 3, (10,), 100)
    assert outgoing.end(7)
    assert not outgoing.end(7)
    message = outgoing.take()
    assert first is not None
    assert message is not None
    assert (message.end, message.progress) == (first.follow, {})


def test_what_is_not_followed_has_no_progress() -> None:
    assert not Outgoing().progress(7, 3, (10,), 100)


def test_aliases_rest_before_they_are_used_again_and_stay_small() -> None:
    outgoing = Outgoing()
    used = []
    for handle in range(500):
        outgoing.follow(handle)
        message = outgoing.take()
        assert message is not None
        used.append(message.follow[0])
        outgoing.end(handle)
        outgoing.take()
    assert max(used) < 128
    for at, alias in enumerate(used):
        assert alias not in used[max(0, at - 32) : at]
    assert outgoing.was_used(used[0])
    assert not outgoing.was_used(0)
    assert not outgoing.was_used(max(used) + 1)


def test_an_alias_is_never_ended_and_followed_in_one_message() -> None:
    outgoing = Outgoing()
    for handle in range(40):
        outgoing.follow(handle)
    outgoing.take()
    for handle in range(40):
        outgoing.end(handle)
        outgoing.follow(100 + handle)
    message = outgoing.take()
    assert message is not None
    assert not set(message.follow) & set(message.end)


def test_delays_double_up_to_the_most_and_start_over() -> None:
    backoff = Backoff(first_s=1.0, most_s=5.0)
    assert [backoff.failed(chance=1.0) for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    backoff.succeeded()
    assert backoff.failed(chance=0.0) == pytest.approx(0.5)


def test_where_it_is_to_be_told_an_end_comes_with_all_the_progress() -> None:
    outgoing = Outgoing()
    for handle in (7, 8):
        outgoing.follow(handle)
    first = outgoing.take()
    outgoing.progress(7, 3, (10,), 100)
    outgoing.progress(8, 3, (20,), 200, tell=False)
    for handle in (7, 8):
        assert outgoing.end(handle, told=True)
    message = outgoing.take()
    assert first is not None
    assert message is not None
    assert message.end == first.follow
    assert [progressed.ids for progressed in message.progress.values()] == [[10], [20]]


def test_a_session_that_begins_while_the_source_rests_is_followed_when_there_is_something_to_tell() -> None:
    outgoing = Outgoing()
    outgoing.follow_later(7)
    assert not outgoing.progress(7, 3, (10,), 100, tell=False)
    assert outgoing.take() is None
    assert outgoing.progress(7, 4, (11,), 200)
    message = outgoing.take()
    assert message is not None
    assert (len(message.follow), message.progress) == (1, {})
    assert outgoing.progress(7, 5, (12,), 300)


def test_a_session_that_was_over_before_the_source_woke_is_never_mentioned() -> None:
    outgoing = Outgoing()
    outgoing.follow_later(7)
    assert not outgoing.end(7)
    assert not outgoing.progress(7, 3, (10,), 100)
    assert outgoing.take() is None


@pytest.mark.parametrize("resting", [True, False])
def test_where_it_may_learn_from_it_a_session_is_followed_and_ended_after_its_end(resting: bool) -> None:
    outgoing = Outgoing()
    (outgoing.follow_later if resting else outgoing.follow)(7)
    assert outgoing.is_untold(7)
    assert outgoing.end(7, told=True)
    assert not outgoing.is_untold(7)
    first, second = outgoing.take(), outgoing.take()
    assert first is not None
    assert second is not None
    assert (len(first.follow), first.end) == (1, ())
    assert (second.follow, second.end) == ((), first.follow)
    assert outgoing.take() is None
    assert outgoing.handles == {}
