"""Ranges of slots: disjoint, complete, and given back whole."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.lm.ranges import RangeAllocator


@given(moves=st.lists(st.tuples(st.sampled_from("tge"), st.integers(1, 12), st.integers(0, 9)), max_size=60))
def test_whatever_is_taken_grown_and_given_back_every_slot_has_one_owner(
    moves: list[tuple[str, int, int]],
) -> None:
    allocator = RangeAllocator(64)
    taken: list[tuple[int, int]] = []
    for move, size, pick in moves:
        if move == "t":
            start = allocator.take(size)
            if start is not None:
                taken.append((start, size))
        elif taken and move == "g":
            allocator.give(*taken.pop(pick % len(taken)))
        elif taken:
            start, length = taken.pop(pick % len(taken))
            grown = allocator.extend(start + length, size)
            taken.append((start, length + size if grown else length))
        allocator.check(taken)
        assert allocator.free == 64 - sum(length for _, length in taken)
    for start, length in taken:
        allocator.give(start, length)
    assert allocator.take(64) == 0


def test_a_range_grows_in_place_only_into_the_gap_behind_it() -> None:
    allocator = RangeAllocator(10)
    assert (allocator.take(4), allocator.take(2)) == (0, 4)

    assert not allocator.extend(4, 1)
    assert allocator.extend(6, 4)
    assert not allocator.extend(10, 1)


def test_slots_used_from_the_start_are_not_handed_out() -> None:
    allocator = RangeAllocator(10, used=6)

    assert allocator.take(5) is None
    assert allocator.take(4) == 6


def test_the_check_names_a_slot_owned_twice_and_a_lost_one() -> None:
    allocator = RangeAllocator(4)
    allocator.take(2)

    with pytest.raises(AssertionError, match="slot 0 is lost"):
        allocator.check([])
    with pytest.raises(AssertionError, match="slot 1 is taken twice"):
        allocator.check([(0, 2), (1, 1)])
