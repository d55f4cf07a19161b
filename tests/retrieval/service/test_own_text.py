"""A session's own text: what followed its last tokens earlier."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from retrieval_service.own_text import look_back
from retrieval_service.trie import CountedTrie


def looked_back(*ids: int, node_limit: int = 16, depth: int = 4) -> CountedTrie | None:
    return look_back(array("Q", ids), node_limit=node_limit, depth=depth)


def test_the_longest_suffix_that_occurred_before_counts() -> None:
    found = looked_back(1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3)
    assert found is not None
    assert (found.match_length, found.tokens) == (3, (7, 9, 2, 3))


def test_a_last_token_that_is_new_finds_nothing() -> None:
    assert looked_back(1, 2, 3) is None
    assert looked_back(1) is None
    assert looked_back() is None


def test_the_text_may_grow_while_what_was_found_is_held() -> None:
    ids = array("Q", [1, 2, 1])
    found = look_back(ids, node_limit=4, depth=4)
    ids.append(2)
    assert found is not None
    assert found.tokens == (2, 1)


@given(st.lists(st.integers(0, 2), min_size=2, max_size=40))
def test_the_match_is_as_long_as_trying_every_place_finds(ids: list[int]) -> None:
    lengths = [
        length
        for length in range(1, min(len(ids), 33))
        for at in range(len(ids) - length)
        if ids[at : at + length] == ids[-length:]
    ]
    found = looked_back(*ids)
    assert (0 if found is None else found.match_length) == max(lengths, default=0)
