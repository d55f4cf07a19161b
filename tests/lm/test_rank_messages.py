"""What rank 0 sends the other ranks arrives unchanged."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.lm.parallel.messages import (
    CopySlots,
    GrowPool,
    RankBeat,
    RankedRows,
    RankEnd,
    RankHello,
    RankMessage,
    RankPass,
    from_words,
    to_words,
)

NUMBERS = st.lists(st.integers(-1, 2**40), max_size=6).map(tuple)
RUNS = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=3).map(tuple)
PARTS = st.builds(RankedRows, RUNS, st.integers(0, 2**20), NUMBERS, NUMBERS, NUMBERS, NUMBERS)
ORDERS = st.one_of(
    st.builds(RankHello, NUMBERS),
    st.just(RankBeat()),
    st.just(RankEnd()),
    st.builds(GrowPool, st.integers(0, 2**20)),
    st.builds(CopySlots, NUMBERS, NUMBERS),
    st.builds(RankPass, st.lists(PARTS, max_size=3).map(tuple)),
)


@given(st.lists(ORDERS, max_size=5))
def test_orders_one_after_another_are_read_as_they_were_written(orders: list[RankMessage]) -> None:
    words = [word for order in orders for word in to_words(order)]
    assert list(from_words(words)) == orders


@pytest.mark.parametrize("words", [[9], [-1], [3], [4, 2, 5], [5, 1, 7, 5, 0]])
def test_words_that_are_no_order_are_an_error(words: list[int]) -> None:
    with pytest.raises(ValueError, match=r"no kind of order|are missing of an order"):
        list(from_words(words))
