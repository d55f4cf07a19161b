"""A Cancel once ended another request than its own, or not all of its own: scenarios by their seed."""

import pytest

from benchmarks.simulation.world import simulate


@pytest.mark.parametrize("seed", [5189, 14946, 32747, 45571])
def test_a_cancel_is_not_taken_for_one_of_the_session_s_next_request(seed: int) -> None:
    """A slower clock placed that one where nobody had heard of the epoch that the Cancel names."""
    assert simulate(seed).violations == []


def test_a_cancel_that_overtakes_a_choice_s_open_ends_that_choice_too() -> None:
    assert simulate(56708).violations == []
