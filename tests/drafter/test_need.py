"""How many drafters a crowded drafter asks for."""

import pytest

from drafter_service.need import DraftingNeed


def after(*passes: int, times: int = 500) -> DraftingNeed:
    need = DraftingNeed()
    for _ in range(times):
        for count in passes:
            need.committed(count)
    return need


def test_without_sessions_no_drafter_is_needed() -> None:
    assert DraftingNeed().drafters(0) == 0.0


def test_sessions_that_get_enough_passes_need_a_part_of_a_drafter() -> None:
    assert after(8).drafters(3) == pytest.approx(0.25, rel=0.01)


def test_sessions_that_get_half_of_the_passes_need_two_drafters() -> None:
    assert after(1).drafters(20) == pytest.approx(2.0, rel=0.01)
    assert after(0, 2).drafters(20) == pytest.approx(2.0, rel=0.05)


def test_a_session_for_which_nothing_is_left_to_draft_had_passes_enough() -> None:
    need = DraftingNeed()
    for _ in range(500):
        need.committed(0, sated=True)
    assert need.drafters(20) == pytest.approx(0.5, rel=0.01)


def test_there_are_no_more_drafters_than_sessions_or_than_can_be_asked_for() -> None:
    assert after(0).drafters(1) == 1.0
    assert after(0).drafters(100) == 8.0
