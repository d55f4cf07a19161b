"""Delays between attempts grow, stop growing, and start over after a success."""

import pytest

from outrider.runtime.backoff import Backoff


def test_delays_double_up_to_the_longest_and_start_over_after_a_success() -> None:
    backoff = Backoff(1.0, 5.0)
    assert [backoff.next_s() for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    backoff.reset()
    assert [backoff.next_s() for _ in range(2)] == [1.0, 2.0]


def test_a_factor_of_one_repeats_the_first_delay() -> None:
    backoff = Backoff(0.3, 5.0, factor=1.0)
    assert [backoff.next_s() for _ in range(3)] == [0.3, 0.3, 0.3]


def test_a_first_delay_above_the_longest_is_the_longest() -> None:
    assert Backoff(9.0, 5.0).next_s() == 5.0


@pytest.mark.parametrize(("chance", "delays"), [(0.0, [0.5, 1.0, 1.5]), (1.0, [1.0, 2.0, 3.0])])
def test_jitter_shortens_a_delay_by_up_to_its_share_and_leaves_the_growth_alone(
    chance: float, delays: list[float]
) -> None:
    backoff = Backoff(1.0, 3.0, jitter=0.5, chance=lambda: chance)
    assert [backoff.next_s() for _ in range(3)] == pytest.approx(delays)


def test_the_default_randomness_spreads_delays_of_one_length() -> None:
    backoff = Backoff(1.0, 1.0, jitter=0.5)
    delays = [backoff.next_s() for _ in range(50)]
    assert len(set(delays)) > 1
    assert all(0.5 <= delay < 1.0 for delay in delays)


def test_many_failures_do_not_overflow() -> None:
    backoff = Backoff(1.0, 8.0, factor=1e300)
    assert [backoff.next_s() for _ in range(4)][1:] == [8.0, 8.0, 8.0]
