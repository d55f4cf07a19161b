"""The bounded wait, on a virtual clock."""

from itertools import pairwise

from verifier_service.engine.source_policy import SourceLatency, StepValue

BARE = StepValue(expected=1.0, step_ms=8.0, leaf=1.0)
MOST = 4.0


def steady(first_ms: float, rounds: int = 20, hit: bool = True) -> tuple[SourceLatency, float]:
    """A source whose first draft comes so long after each commit; returns it just after a commit."""
    latency, now = SourceLatency(), 0.0
    for _ in range(rounds):
        latency.committed(now, bare=True)
        latency.arrived(now + first_ms)
        latency.verified(hit)
        now += 10.0
    latency.committed(now, bare=True)
    return latency, now


def test_a_likely_draft_that_comes_soon_is_waited_for() -> None:
    latency, now = steady(first_ms=1.5)
    patience = latency.patience_ms(now, BARE, MOST)
    assert 1.4 < patience < 1.6
    assert latency.patience_ms(now + 1.0, BARE, MOST) < patience


def test_a_draft_that_comes_later_than_it_is_worth_is_not_waited_for() -> None:
    latency, now = steady(first_ms=9.0)
    assert latency.patience_ms(now, BARE, MOST) == 0.0


def test_a_source_that_is_mostly_wrong_is_not_waited_for() -> None:
    latency, now = steady(first_ms=1.5, rounds=40, hit=False)
    assert latency.patience_ms(now, BARE, MOST) == 0.0


def test_what_a_step_yields_already_makes_waiting_dearer() -> None:
    latency, now = steady(first_ms=3.0)
    assert latency.patience_ms(now, BARE, MOST) > 0.0
    assert latency.patience_ms(now, StepValue(expected=4.0, step_ms=8.0, leaf=0.5), MOST) == 0.0


def test_a_quick_step_is_not_held_up() -> None:
    latency, now = steady(first_ms=1.5)
    assert latency.patience_ms(now, StepValue(expected=1.0, step_ms=1.0, leaf=1.0), MOST) == 0.0
    assert latency.patience_ms(now, StepValue(expected=1.0, step_ms=0.0, leaf=1.0), MOST) == 0.0


def test_a_tree_that_is_full_needs_nothing_more() -> None:
    latency, now = steady(first_ms=1.5)
    assert latency.patience_ms(now, StepValue(expected=3.0, step_ms=8.0, leaf=0.0), MOST) == 0.0


def test_a_source_never_heard_of_is_not_waited_for() -> None:
    latency = SourceLatency()
    latency.committed(0.0, bare=True)
    assert latency.silent
    assert latency.patience_ms(0.1, BARE, MOST) == 0.0


def test_a_source_that_fell_silent_is_not_waited_for() -> None:
    latency, now = steady(first_ms=1.5)
    for _ in range(3):
        now += 8.0
        latency.committed(now, bare=True)
    assert latency.silent
    assert latency.patience_ms(now, BARE, MOST) == 0.0
    latency.arrived(now + 1.0)
    assert not latency.silent


def test_a_late_draft_becomes_less_worth_waiting_for() -> None:
    latency, now = steady(first_ms=1.5)
    due = now + 1.5
    soon = latency.patience_ms(due + 0.1, BARE, MOST)
    later = latency.patience_ms(due + 1.4, BARE, MOST)
    assert 0.0 < soon < later
    assert latency.patience_ms(due + 1.6, BARE, MOST) == 0.0, "as late again as it was expected"


def test_a_draft_that_cannot_come_within_the_bound_is_not_waited_for_at_all() -> None:
    latency, now = steady(first_ms=3.0)
    assert latency.patience_ms(now, BARE, 4.0) > 2.9
    assert latency.patience_ms(now, BARE, 2.5) == 0.0


def test_waits_that_give_nothing_come_at_growing_intervals() -> None:
    latency, now = steady(first_ms=1.5)
    waits = []
    for number in range(40):
        latency.arrived(now + 1.5)  # it drafts, but never when it is waited for
        now += 10.0
        latency.committed(now, bare=True)
        if latency.patience_ms(now, BARE, MOST) > 0.0:
            waits.append(number)
            latency.waited(fruitful=False)
    gaps = [later - earlier for earlier, later in pairwise(waits)]
    assert gaps == sorted(gaps)
    assert gaps[-1] >= 4 * gaps[0]
    latency.waited(fruitful=True)
    assert latency._fruitless == 0


def test_the_gap_between_drafts_decides_once_something_is_there() -> None:
    latency, now = steady(first_ms=1.0)
    for step in range(10):
        latency.arrived(now + 1.0 + 6.0 * step)
    standing = StepValue(expected=1.8, step_ms=8.0, leaf=0.8)
    assert latency.patience_ms(now + 55.1, standing, MOST) == 0.0
