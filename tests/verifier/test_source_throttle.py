"""How often a source is told: a source that brings nothing rests for longer and longer."""

from verifier_service.engine.source_policy import SourceActivity, SourceThrottle


def told(asking: SourceThrottle, rounds: int, accepted: int = 0) -> int:
    """Of so many rounds, those that the source is told of."""
    count = 0
    for _ in range(rounds):
        asking.committed(accepted)
        count += asking.asked
    return count


def test_a_source_that_is_accepted_is_told_of_every_round() -> None:
    asking = SourceThrottle(SourceActivity())
    assert told(asking, 500, accepted=1) == 500


def test_a_source_that_brings_nothing_is_told_of_ever_fewer_rounds() -> None:
    asking = SourceThrottle(SourceActivity())
    shares = [told(asking, 500) for _ in range(6)]
    assert shares[0] < 150
    assert shares[-1] < 25
    assert sum(shares) > shares[0], "it is still probed"


def test_a_source_that_gets_better_is_found_out() -> None:
    asking = SourceThrottle(SourceActivity())
    told(asking, 100)
    while not asking.asked:
        asking.committed(0)
    asking.committed(1)
    assert told(asking, 10, accepted=1) == 10


def test_the_next_session_begins_with_what_the_last_one_found() -> None:
    record = SourceActivity()
    told(SourceThrottle(record), 40)
    assert record.rest > 0
    later = SourceThrottle(record)
    assert not later.asked
    while not later.asked:
        later.committed(0)
    later.committed(2)
    assert SourceThrottle(record).asked


def test_a_source_that_is_silent_is_told_all_the_time() -> None:
    asking = SourceThrottle(SourceActivity())
    for _ in range(500):
        asking.committed(0, heard=False)
    assert asking.asked


def test_sessions_too_short_to_find_out_alone_find_out_together() -> None:
    record = SourceActivity()
    told_of = []
    for _ in range(12):
        asking = SourceThrottle(record)
        told_of.append(told(asking, 20))
    assert told_of[0] == 20
    assert sum(told_of[2:]) < 40


def test_short_sessions_try_it_again_when_its_rest_is_over() -> None:
    record = SourceActivity()
    for _ in range(60):
        told(SourceThrottle(record), 20)
    assert record.rest > 20, "longer than any of them lasts"
    tried = False
    for _ in range(record.rest // 20 + 2):
        asking = SourceThrottle(record)
        for _ in range(20):
            tried |= asking.asked
            asking.committed(1 if asking.asked else 0)
    assert tried
    assert SourceThrottle(record).asked


def test_one_of_many_sessions_tries_it_and_all_go_by_what_it_finds() -> None:
    record = SourceActivity()
    told(SourceThrottle(record), 40)
    together = [SourceThrottle(record) for _ in range(8)]
    assert not any(asking.asked for asking in together)
    while not any(asking.asked for asking in together):
        for asking in together:
            asking.committed(0)
    assert sum(asking.asked for asking in together) == 1
    for asking in together:
        asking.committed(asking.asked)
    for asking in together:
        asking.committed(0)
    assert all(asking.asked for asking in together)


def test_a_session_that_it_does_not_suit_leaves_the_others_alone() -> None:
    record = SourceActivity()
    suited, unsuited = SourceThrottle(record), SourceThrottle(record)
    asked = 0
    for _ in range(400):
        suited.committed(1)
        unsuited.committed(0)
        asked += unsuited.asked
    assert suited.asked
    assert asked < 200


def test_drafts_that_a_full_batch_had_no_room_for_are_tried_again_soon() -> None:
    asking = SourceThrottle(SourceActivity())
    rests = []
    for _ in range(6):
        rest = 0
        while asking.asked:
            asking.committed(0, spared=True)
        while not asking.asked:
            asking.committed(0)
            rest += 1
        rests.append(rest)
    assert rests == [16, 32, 64, 64, 64, 64]


def test_what_a_full_batch_had_no_room_for_is_tried_as_soon_as_the_batch_is_half_as_large() -> None:
    record = SourceActivity()
    together = [SourceThrottle(record) for _ in range(4)]
    while any(asking.asked for asking in together):
        for asking in together:
            asking.committed(0, spared=True, batch=16)
    for asking in together:
        asking.committed(0, batch=9)
    assert not any(asking.asked for asking in together)
    for asking in together:
        asking.committed(0, batch=8)
    assert sum(asking.asked for asking in together) == 1, "one of them tries it"


def test_what_brought_nothing_is_not_tried_because_the_batch_is_smaller() -> None:
    asking = SourceThrottle(SourceActivity())
    while asking.asked:
        asking.committed(0, batch=16)
    asking.committed(0, batch=1)
    assert not asking.asked


def test_one_that_is_too_late_for_any_session_rests_all_the_same() -> None:
    record = SourceActivity()
    asked = []
    for _ in range(12):
        asking = SourceThrottle(record)
        asked.append(asking.asked)
        for _ in range(10):
            asking.committed(0, heard=False)
            record.late = True
    assert asked[:4] == [True] * 4
    assert sum(asked[4:]) < 4


def test_drafts_that_came_late_count_once() -> None:
    asking = SourceThrottle(SourceActivity(late=True))
    for _ in range(500):
        asking.committed(0, heard=False)
    assert asking.asked


def test_its_rest_is_counted_in_steps_however_many_sessions_each_is_of() -> None:
    record = SourceActivity()
    together = [SourceThrottle(record) for _ in range(8)]
    steps = 0
    while any(asking.asked for asking in together):
        steps += 1
        for asking in together:
            asking.committed(0, batch=32, step=steps)
    began = steps
    while not any(asking.asked for asking in together):
        steps += 1
        for asking in together:
            asking.committed(0, batch=32, step=steps)
    assert steps - began == record.rest


def shares_of_rounds(rounds: int, *, late: bool = False) -> list[int]:
    """Of sessions of so many rounds, 100 at a time, the rounds that a source is told of that is no use."""
    record = SourceActivity()
    told_of = []
    for _ in range(800):
        asking, count = SourceThrottle(record), 0
        for _ in range(rounds):
            count += asking.asked
            asking.committed(0, heard=not late)
        record.late |= late and count > 0
        told_of.append(count)
    return [sum(told_of[at : at + 100]) for at in range(0, 800, 100)]


def test_sessions_of_a_few_rounds_find_out_together_too() -> None:
    shares = shares_of_rounds(5)
    assert shares[0] < 150
    assert shares[-1] <= 20


def test_sessions_that_hear_of_it_once_after_their_end_find_out_together_too() -> None:
    shares = shares_of_rounds(20, late=True)
    assert shares[0] <= 2000
    assert shares[-1] < 250


def test_a_session_that_begins_tries_it_sooner_than_one_that_may_be_about_to_end() -> None:
    record = SourceActivity()
    older = SourceThrottle(record)
    told(older, 32)
    assert record.rest == 16
    told(older, 8)
    assert told(SourceThrottle(record), 1) == 1
    assert not older.asked


def test_short_sessions_in_a_full_batch_find_out_when_it_gets_better() -> None:
    record = SourceActivity()
    running: list[SourceThrottle] = []
    accepted = 0
    for step in range(1, 2001):
        ended = 4 if len(running) == 16 else 0
        running = [*running[ended:], *(SourceThrottle(record) for _ in range(4))]
        for asking in running:
            good = asking.asked and step > 1000
            accepted += good
            asking.committed(int(good), batch=16, step=step)
        if step == 1000:
            assert record.rest > 16
    assert accepted > 0.8 * 16 * 1000


def test_one_that_is_silent_does_not_rest_for_drafts_of_others_that_were_spared() -> None:
    asking = SourceThrottle(SourceActivity())
    for _ in range(100):
        asking.committed(0, heard=False, spared=True)
    assert asking.asked
