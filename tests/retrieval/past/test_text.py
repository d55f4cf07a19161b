"""One tenant's past outputs against a plain search of the same sequences."""

import random
from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieval_service.past.python_index import CONTEXT, READ
from retrieval_service.past.text import ID_END, LEAST_COST, Added, PastText
from retrieval_service.trie import CountedTrie, counted

AMPLE = 1_000_000
ids_of_few = st.lists(st.integers(0, 2), max_size=60)
# A session and the ids to add to it; no ids finish it.
feeds = st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 2), max_size=12)), max_size=40)


def occurrences(sequences: Sequence[Sequence[int]], suffix: Sequence[int]) -> list[tuple[int, int]]:
    return [
        (number, end)
        for number, text in enumerate(sequences)
        for end in range(len(suffix), len(text))
        if list(text[end - len(suffix) : end]) == list(suffix)
    ]


def longest(sequences: Sequence[Sequence[int]], ids: Sequence[int]) -> tuple[int, list[tuple[int, int]]]:
    for length in range(min(CONTEXT, len(ids)), 0, -1):
        if found := occurrences(sequences, ids[-length:]):
            return length, found
    return 0, []


def tidied(text: PastText) -> PastText:
    while text.tidy(7):
        pass
    return text


def fed(
    text: PastText, pieces: list[tuple[str, list[int]]], written: dict[int, Added] | None = None
) -> PastText:
    """Feed the pieces to a text; `written` collects every sequence, evicted ones too."""
    for session, ids in pieces:
        added = text.extend(session, ids)
        if added is None:
            text.finish(session)
        elif written is not None:
            written.setdefault(added.serial, added)
            if added.start:
                written[added.serial].ids.extend(added.ids)
        tidied(text)
    return text


def cost(ids: Sequence[int]) -> int:
    return max(len(ids), LEAST_COST)


def held(text: PastText) -> list[list[int]]:
    return [list(ids) for _, _, ids in text.sequences()]


def look_up(text: PastText, ids: Sequence[int], *, node_limit: int, depth: int) -> CountedTrie | None:
    length, found = text.read(ids, depth)
    return counted(found, length, node_limit) if found else None


def agrees_with_a_plain_search(text: PastText, ids: list[int], depth: int) -> None:
    sequences = held(text)
    length, ends = longest(sequences, ids)
    after = sorted(tuple(sequences[number][end : end + depth]) for number, end in ends)
    found_length, found = text.read(ids, depth)
    assert found_length == length
    assert len(found) == min(len(after), READ)
    if len(after) <= READ:
        assert sorted(found) == after
        assert look_up(text, ids, node_limit=10, depth=depth) == counted(after, length, 10)
    else:
        assert set(found) <= set(after)


@given(feeds, ids_of_few, st.integers(1, 6))
@settings(deadline=None)
def test_the_longest_suffix_and_all_that_followed_it_are_found(
    pieces: list[tuple[str, list[int]]], ids: list[int], depth: int
) -> None:
    agrees_with_a_plain_search(fed(PastText(AMPLE), pieces), ids, depth)


@given(feeds, ids_of_few)
@settings(deadline=None)
def test_the_oldest_sequences_are_given_up_whole_and_no_more_of_them_than_must_be(
    pieces: list[tuple[str, list[int]]], ids: list[int]
) -> None:
    limit = 3 * LEAST_COST
    written: dict[int, Added] = {}
    text = fed(PastText(limit), pieces, written)
    kept = text.sequences()
    assert sum(cost(one) for _, _, one in kept) == text.cost <= limit
    assert text.tokens + text.evicted == sum(len(ids) for _, ids in pieces)
    # Adding all pieces at once keeps the same sequences: so does a log that is read again.
    again = PastText(limit)
    again.restore(((one.serial, one.session, one.ids) for one in written.values()), text.next_serial)
    assert again.sequences() == kept
    agrees_with_a_plain_search(text, ids, 4)


@given(feeds, ids_of_few)
@settings(deadline=None)
def test_restored_at_once_or_fed_piece_by_piece_it_answers_alike(
    pieces: list[tuple[str, list[int]]], ids: list[int]
) -> None:
    text = fed(PastText(AMPLE), pieces)
    again = PastText(AMPLE)
    again.restore(text.sequences(), text.next_serial)
    assert again.sequences() == text.sequences()
    assert (again.tokens, again.cost, again.next_serial) == (text.tokens, text.cost, text.next_serial)
    assert look_up(again, ids, node_limit=20, depth=5) == look_up(text, ids, node_limit=20, depth=5)
    agrees_with_a_plain_search(fed(again, [*pieces, ("a", [0, 1, 0])]), ids, 3)


@given(feeds, st.sampled_from("abc"), ids_of_few)
@settings(deadline=None)
def test_what_a_session_was_given_is_found_no_more_once_forgotten(
    pieces: list[tuple[str, list[int]]], session: str, ids: list[int]
) -> None:
    text = fed(PastText(AMPLE), pieces)
    others = [(serial, name, one) for serial, name, one in text.sequences() if name != session]
    text.forget(session)
    assert tidied(text).sequences() == others
    agrees_with_a_plain_search(text, ids, 4)


def test_long_texts_of_many_blocks_and_pages_agree_with_a_plain_search() -> None:
    choose = random.Random(5)
    text = PastText(8_000)
    for number in range(60):
        for _ in range(choose.randrange(40)):
            text.extend(f"s{number % 9}", choose.choices(range(6), k=choose.randrange(1, 40)))
        text.finish(f"s{number % 9}")
        tidied(text)
        if number % 7 == 0:
            text.forget(f"s{choose.randrange(9)}")
            tidied(text)
    assert text.evicted > 5_000
    sequences = held(text)
    for _ in range(20):
        ids = list(choose.choice(sequences)[-60:]) + choose.choices(range(6), k=choose.randrange(3))
        agrees_with_a_plain_search(text, ids, 5)


def test_nothing_is_left_behind_where_all_is_forgotten() -> None:
    text = PastText(AMPLE)
    for number in range(3000):
        text.extend(str(number % 7), [number % 5, number % 11])
    for number in range(7):
        text.forget(str(number))
    tidied(text)
    assert (text.tokens, text.cost, len(text)) == (0, 0, 0)
    assert look_up(text, [1, 2, 3], node_limit=5, depth=5) is None


def test_a_match_is_told_apart_by_no_more_ids_than_the_context() -> None:
    text = PastText(AMPLE)
    text.extend("a", [9, *[1] * CONTEXT, 5])
    text.extend("b", [8, *[1] * CONTEXT, 6])
    found = look_up(text, [8, *[1] * CONTEXT], node_limit=9, depth=1)
    assert found is not None
    assert (found.match_length, found.tokens, found.counts) == (CONTEXT, (5, 6), (1, 1))


def test_nothing_is_found_across_two_sequences() -> None:
    text = PastText(AMPLE)
    text.extend("a", [1, 2])
    text.finish("a")
    text.extend("a", [3, 4])
    assert look_up(text, [1, 2], node_limit=9, depth=9) is None
    assert look_up(text, [2, 3], node_limit=9, depth=9) == counted([(4,)], 1, 9)


def test_ids_that_are_none_are_refused_whole_and_looked_up_without_a_fault() -> None:
    text = PastText(AMPLE)
    text.extend("a", [1, 2, ID_END - 1, 3])
    with pytest.raises(ValueError, match="id -1 at 1"):
        text.extend("a", [5, -1])
    with pytest.raises(ValueError, match=str(ID_END)):
        text.extend("a", [ID_END])
    assert text.tokens == 4
    for odd in (-1, ID_END, 2**32 - 1, 2**40, -(2**70)):
        assert look_up(text, [odd], node_limit=9, depth=9) is None
        found = look_up(text, [odd, 2, ID_END - 1], node_limit=9, depth=9)
        assert found == counted([(3,)], 2, 9)
    assert look_up(text, [], node_limit=9, depth=9) is None
    assert look_up(text, [1], node_limit=0, depth=9) is None
    assert look_up(text, [1], node_limit=9, depth=0) is None


def test_of_very_many_occurrences_an_even_sample_is_read() -> None:
    text = PastText(AMPLE)
    text.restore([(0, "a", array("I", [1, 2] * 50_000))], 1)
    found = look_up(text, [2], node_limit=4, depth=4)
    assert found is not None
    assert found.tokens == (1, 2, 1, 2)
    assert found.occurrences == READ
