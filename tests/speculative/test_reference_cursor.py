"""Where a text stands in another one that it may copy from."""

from hypothesis import given
from hypothesis import strategies as st

from speculative.lookup.reference import SURE, ReferenceCursor

GIVEN = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)


def after(*text: int, given: tuple[int, ...] = GIVEN) -> ReferenceCursor:
    copying = ReferenceCursor(given)
    for token in text:
        copying.push(token)
    return copying


def test_a_text_is_taken_to_begin_as_the_given_one_does() -> None:
    copied = after().draft(3)
    assert (copied.tokens, copied.match_length) == ((1, 2, 3), SURE)


def test_it_goes_on_while_they_agree_and_ever_surer() -> None:
    copied = after(1, 2, 3).draft(99)
    assert (copied.tokens, copied.match_length) == (GIVEN[3:], SURE + 3)


def test_nothing_is_copied_right_after_a_difference() -> None:
    assert after(1, 2, 99).draft(4).tokens == ()


def test_a_replaced_id_is_passed_over() -> None:
    copied = after(1, 2, 99, 4).draft(4)
    assert (copied.tokens, copied.match_length) == ((5, 6, 7, 8), 1)


def test_an_inserted_id_is_passed_over() -> None:
    assert after(1, 2, 99, 3).draft(4).tokens == (4, 5, 6, 7)


def test_a_passage_that_was_left_out_is_passed_over() -> None:
    copied = after(1, 2, 9, 10).draft(4)
    assert (copied.tokens, copied.match_length) == ((11, 12), 2)


def test_a_place_behind_is_found_by_three_ids() -> None:
    copied = after(*GIVEN, 2, 3, 4).draft(2)
    assert (copied.tokens, copied.match_length) == ((5, 6), 3)


def test_of_several_places_the_next_one_is_taken() -> None:
    given = (1, 2, 3, 4, 50, 2, 3, 4, 60, 2, 3, 4, 70)
    assert after(1, 2, 3, 4, 50, 99, 2, 3, 4, given=given).draft(1).tokens == (60,)


def test_nothing_is_copied_from_nothing() -> None:
    assert after(given=()).draft(4).tokens == ()
    assert after(5, 6, given=()).draft(4).tokens == ()
    assert after().draft(0).tokens == ()


@given(
    st.lists(st.integers(0, 4), max_size=40),
    st.lists(st.integers(0, 5), max_size=60),
    st.integers(0, 20),
)
def test_what_is_copied_stands_in_the_given_text_behind_the_last_id(
    given_ids: list[int], text: list[int], count: int
) -> None:
    copied = after(*text, given=tuple(given_ids)).draft(count)
    assert len(copied.tokens) <= count
    if text and copied.tokens:
        run = (text[-1], *copied.tokens)
        places = range(len(given_ids) - len(run) + 1)
        assert any(tuple(given_ids[place : place + len(run)]) == run for place in places)
