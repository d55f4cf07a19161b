"""How often a source is sent progress: a source that brings nothing rests for longer and longer."""

import pytest

from verifier_service.remote_sources.source_rests import LEAST_PRICE, SourceActivity, SourceThrottle


def sent(throttle: SourceThrottle, rounds: int, accepted: int = 0) -> int:
    """Number of the next `rounds` rounds that the source is sent."""
    count = 0
    for _ in range(rounds):
        throttle.committed(accepted)
        count += not throttle.resting
    return count


def test_a_source_that_is_accepted_is_sent_every_round() -> None:
    throttle = SourceThrottle(SourceActivity())
    assert sent(throttle, 500, accepted=1) == 500


def test_a_source_that_brings_nothing_is_sent_ever_fewer_rounds() -> None:
    throttle = SourceThrottle(SourceActivity())
    sent_rounds = [sent(throttle, 500) for _ in range(6)]
    assert sent_rounds[0] < 150
    assert sent_rounds[-1] < 25
    assert sum(sent_rounds) > sent_rounds[0], "it is still probed"


def test_a_source_that_gets_better_is_found_out() -> None:
    throttle = SourceThrottle(SourceActivity())
    sent(throttle, 100)
    while throttle.resting:
        throttle.committed(0)
    throttle.committed(1)
    assert sent(throttle, 10, accepted=1) == 10


def test_a_source_that_gains_half_of_what_it_has_to_comes_to_rest() -> None:
    throttle = SourceThrottle(SourceActivity())
    for _ in range(70):
        throttle.committed(0.5 * LEAST_PRICE)
    assert throttle.resting


def test_the_next_session_begins_with_what_the_last_one_found() -> None:
    activity = SourceActivity()
    sent(SourceThrottle(activity), 40)
    assert activity.rest > 0
    later = SourceThrottle(activity)
    assert later.resting
    while later.resting:
        later.committed(0)
    later.committed(2)
    assert not SourceThrottle(activity).resting


def test_a_source_that_is_silent_is_sent_four_times_as_many_rounds_before_it_rests() -> None:
    silent, wrong = SourceThrottle(SourceActivity()), SourceThrottle(SourceActivity())
    while not wrong.resting:
        wrong.committed(0)
        for _ in range(4):
            assert not silent.resting
            silent.committed(0, heard=False)
    assert silent.resting


def test_a_source_that_stays_silent_is_sent_ever_fewer_rounds() -> None:
    throttle, followed = SourceThrottle(SourceActivity()), list[bool]()
    for _ in range(3000):
        throttle.committed(0, heard=False)
        followed.append(not throttle.resting)
    assert sum(followed[:500]) < 200
    assert sum(followed[-500:]) < 25


def test_the_rest_of_a_silent_source_ends_as_soon_as_it_drafts() -> None:
    throttle = SourceThrottle(SourceActivity())
    while not throttle.resting:
        throttle.committed(0, heard=False)
    throttle.committed(0, heard=True)
    assert not throttle.resting, "it has read the prompt now"


def test_the_rest_of_a_source_that_was_wrong_does_not_end_because_it_drafts() -> None:
    throttle = SourceThrottle(SourceActivity())
    while not throttle.resting:
        throttle.committed(0)
    throttle.committed(0, heard=True)
    assert throttle.resting


def test_sessions_too_short_to_find_out_alone_find_out_together() -> None:
    activity = SourceActivity()
    counts = []
    for _ in range(12):
        throttle = SourceThrottle(activity)
        counts.append(sent(throttle, 20))
    assert counts[0] == 20
    assert sum(counts[2:]) < 40


def test_short_sessions_try_it_again_when_its_rest_is_over() -> None:
    activity = SourceActivity()
    for _ in range(60):
        sent(SourceThrottle(activity), 20)
    assert activity.rest > 20, "longer than any of them lasts"
    tried = False
    for _ in range(activity.rest // 20 + 2):
        throttle = SourceThrottle(activity)
        for _ in range(20):
            tried |= not throttle.resting
            throttle.committed(0 if throttle.resting else 1)
    assert tried
    assert not SourceThrottle(activity).resting


def test_one_of_many_sessions_tries_it_and_all_go_by_what_it_finds() -> None:
    activity = SourceActivity()
    sent(SourceThrottle(activity), 40)
    together = [SourceThrottle(activity) for _ in range(8)]
    assert all(throttle.resting for throttle in together)
    while all(throttle.resting for throttle in together):
        for throttle in together:
            throttle.committed(0)
    assert sum(not throttle.resting for throttle in together) == 1
    for throttle in together:
        throttle.committed(not throttle.resting)
    for throttle in together:
        throttle.committed(0)
    assert not any(throttle.resting for throttle in together)


def test_a_session_that_it_does_not_suit_leaves_the_others_alone() -> None:
    activity = SourceActivity()
    suited, unsuited = SourceThrottle(activity), SourceThrottle(activity)
    asked = 0
    for _ in range(400):
        suited.committed(1)
        unsuited.committed(0)
        asked += not unsuited.resting
    assert not suited.resting
    assert asked < 200


@pytest.mark.parametrize(("batch", "expected"), [(2, [16, 64, 64, 64]), (1, [16, 64, 256, 256])])
def test_drafts_that_a_batch_had_no_room_for_are_tried_again_soon_and_those_of_a_session_alone_are_not(
    batch: int, expected: list[int]
) -> None:
    throttle = SourceThrottle(SourceActivity())
    rests = []
    for _ in expected:
        rest = 0
        while not throttle.resting:
            throttle.committed(0, spared=True, batch=batch)
        while throttle.resting:
            throttle.committed(0, batch=batch)
            rest += 1
        rests.append(rest)
    assert rests == expected


def test_what_a_full_batch_had_no_room_for_is_tried_as_soon_as_the_batch_is_half_as_large() -> None:
    activity = SourceActivity()
    together = [SourceThrottle(activity) for _ in range(4)]
    while not all(throttle.resting for throttle in together):
        for throttle in together:
            throttle.committed(0, spared=True, batch=16)
    for throttle in together:
        throttle.committed(0, batch=9)
    assert all(throttle.resting for throttle in together)
    for throttle in together:
        throttle.committed(0, batch=8)
    assert sum(not throttle.resting for throttle in together) == 1, "one of them tries it"


def test_what_brought_nothing_is_not_tried_because_the_batch_is_smaller() -> None:
    throttle = SourceThrottle(SourceActivity())
    while not throttle.resting:
        throttle.committed(0, batch=16)
    throttle.committed(0, batch=1)
    assert throttle.resting


def test_one_that_is_too_late_for_any_session_rests_all_the_same() -> None:
    activity = SourceActivity()
    asked = []
    for _ in range(12):
        throttle = SourceThrottle(activity)
        asked.append(not throttle.resting)
        for _ in range(10):
            throttle.committed(0, heard=False)
            activity.late = True
    assert asked[:4] == [True] * 4
    assert sum(asked[4:]) < 4


def test_drafts_that_came_late_count_once() -> None:
    throttle = SourceThrottle(SourceActivity(late=True))
    for _ in range(120):
        throttle.committed(0, heard=False)
    assert not throttle.resting


def test_its_rest_is_counted_in_steps_however_many_sessions_each_is_of() -> None:
    activity = SourceActivity()
    together = [SourceThrottle(activity) for _ in range(8)]
    steps = 0
    while not all(throttle.resting for throttle in together):
        steps += 1
        for throttle in together:
            throttle.committed(0, batch=32, step=steps)
    began = steps
    while all(throttle.resting for throttle in together):
        steps += 1
        for throttle in together:
            throttle.committed(0, batch=32, step=steps)
    assert steps - began == activity.rest


def rounds_sent(rounds: int, *, late: bool = False) -> list[int]:
    """Rounds that a useless source is sent, over 100 sessions of `rounds` rounds at a time."""
    activity = SourceActivity()
    counts = []
    for _ in range(800):
        throttle, count = SourceThrottle(activity), 0
        for _ in range(rounds):
            count += not throttle.resting
            throttle.committed(0, heard=not late)
        activity.late |= late and count > 0
        counts.append(count)
    return [sum(counts[at : at + 100]) for at in range(0, 800, 100)]


def test_sessions_of_a_few_rounds_find_out_together_too() -> None:
    sent_rounds = rounds_sent(5)
    assert sent_rounds[0] < 150
    assert sent_rounds[-1] <= 20


def test_sessions_that_hear_of_it_once_after_their_end_find_out_together_too() -> None:
    sent_rounds = rounds_sent(20, late=True)
    assert sent_rounds[0] <= 2000
    assert sent_rounds[-1] < 250


def test_a_session_that_begins_tries_it_sooner_than_one_that_may_be_about_to_end() -> None:
    activity = SourceActivity()
    older = SourceThrottle(activity)
    sent(older, 32)
    assert activity.rest == 16
    sent(older, 8)
    assert sent(SourceThrottle(activity), 1) == 1
    assert older.resting


def test_short_sessions_in_a_full_batch_find_out_when_it_gets_better() -> None:
    activity = SourceActivity()
    running: list[SourceThrottle] = []
    accepted = 0
    for step in range(1, 2001):
        ended = 4 if len(running) == 16 else 0
        running = [*running[ended:], *(SourceThrottle(activity) for _ in range(4))]
        for throttle in running:
            good = not throttle.resting and step > 1000
            accepted += good
            throttle.committed(int(good), batch=16, step=step)
        if step == 1000:
            assert activity.rest > 16
    assert accepted > 0.8 * 16 * 1000


def test_one_that_is_silent_does_not_rest_for_drafts_of_others_that_were_spared() -> None:
    throttle = SourceThrottle(SourceActivity())
    for _ in range(100):
        throttle.committed(0, heard=False, spared=True)
    assert not throttle.resting


@pytest.mark.parametrize(("pass_ms", "steps"), [(0.0, 256), (100.0, 256), (10.0, 500), (1.0, 5000)])
def test_a_rest_lasts_five_seconds_but_at_least_256_steps(pass_ms: float, steps: int) -> None:
    activity = SourceActivity()
    throttle = SourceThrottle(activity)
    for _ in range(16000):
        throttle.committed(0, pass_ms=pass_ms)
    assert activity.rest == steps


@pytest.mark.parametrize("own_rest", [False, True])
@pytest.mark.parametrize("before", [16, 64, 256])
def test_a_rest_ends_when_the_source_comes_back_and_the_next_is_no_longer(
    own_rest: bool, before: int
) -> None:
    activity = SourceActivity()
    throttle = SourceThrottle(activity)
    while not (throttle.resting and activity.rest == before):
        throttle.committed(0)
    activity.comebacks += 1
    later = throttle if own_rest else SourceThrottle(activity)
    assert [sent(later, 1), sent(later, 7)] == [1, 7]
    sent(later, 1)
    assert later.resting
    assert activity.rest <= before


def test_every_session_notices_that_a_source_is_back() -> None:
    activity = SourceActivity()
    alone, others = SourceThrottle(activity), [SourceThrottle(activity) for _ in range(2)]
    sent(alone, 32)
    assert alone.resting
    activity.rest = 0  # another session gained
    activity.comebacks += 1
    assert [sent(throttle, 31) for throttle in others] == [31, 31]
    assert sent(alone, 1) == 1, "it rests by its own count"


def test_a_source_that_comes_back_amid_a_trial_is_tried_as_a_new_one() -> None:
    activity = SourceActivity()
    throttle = SourceThrottle(activity)
    sent(throttle, 2000)
    while throttle.resting:
        throttle.committed(0)
    activity.comebacks += 1
    assert sent(throttle, 31) == 31
    sent(throttle, 1)
    assert throttle.resting
    assert activity.rest <= 64, "a quarter of the rest before"


def test_a_stream_that_breaks_again_and_again_wakes_a_useless_source_seldom() -> None:
    quiet = sent(SourceThrottle(SourceActivity()), 3000)
    activity, rounds = SourceActivity(), 0
    throttle = SourceThrottle(activity)
    for _ in range(30):
        activity.comebacks += 1
        rounds += sent(throttle, 100)
    assert quiet < rounds < 2.5 * quiet
