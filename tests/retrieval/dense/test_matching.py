"""The matcher against a search that tries every place and every length."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieval_service.dense.matching import LONGEST, READ, DocumentText
from retrieval_service.trie import CountedTrie, counted
from tests.in_time import in_time

IDS = st.lists(st.integers(0, 3), max_size=40)


def array(ids: list[int]) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


def by_trying(texts: list[list[int]], ids: list[int], node_limit: int, depth: int) -> CountedTrie | None:
    for length in range(min(len(ids), LONGEST), 0, -1):
        suffix = ids[-length:]
        following = [
            text[at + length : at + length + depth]
            for text in texts
            for at in range(len(text) - length)
            if text[at : at + length] == suffix
        ]
        if following:
            return counted(following[:READ], length, node_limit)
    return None


@settings(deadline=None)
@given(texts=st.lists(IDS, max_size=4), ids=IDS, node_limit=st.integers(1, 30), depth=st.integers(1, 8))
def test_the_longest_match_is_found(
    texts: list[list[int]], ids: list[int], node_limit: int, depth: int
) -> None:
    document = DocumentText([array(text) for text in texts])
    found = document.lookup(ids, node_limit=node_limit, depth=depth)
    assert found == by_trying(texts, ids, node_limit, depth)


def test_long_matches_in_long_texts_are_found() -> None:
    drawn = np.random.default_rng(5)
    texts = [drawn.integers(0, 6, 900).tolist() for _ in range(3)]
    document = DocumentText([array(text) for text in texts])
    for length in (1, 5, 33, LONGEST, 300):
        ids = [9, *texts[1][400 - length : 400]]
        found = document.lookup(ids, node_limit=20, depth=6)
        assert found == by_trying(texts, ids, 20, 6)
        assert found is not None
        assert found.match_length >= min(length, LONGEST)


def test_nothing_is_copied_across_the_end_of_a_text() -> None:
    document = DocumentText([array([1, 2, 3]), array([4, 5, 6])])
    assert document.lookup([1, 2], node_limit=9, depth=9) == counted([[3]], 2, 9)
    assert document.lookup([2, 3], node_limit=9, depth=9) is None
    assert document.lookup([3, 4], node_limit=9, depth=9) == counted([[5, 6]], 1, 9)


def test_a_match_shorter_than_asked_for_is_none() -> None:
    document = DocumentText([array([1, 2, 3, 4])])
    assert document.lookup([2, 3], node_limit=9, depth=9, shortest=2) is not None
    assert document.lookup([2, 3], node_limit=9, depth=9, shortest=3) is None


@pytest.mark.parametrize("ids", [[], [-1], [-1, -1], [-2, 1], [2**31], [2**32 + 1, 2], [2**40], [1, -1]])
def test_no_ids_make_it_raise(ids: list[int]) -> None:
    document = DocumentText([array([1, 2, 1, 2]), array([])])
    found = document.lookup(ids, node_limit=9, depth=9)
    assert found is None or found.match_length == 1
    assert DocumentText([]).lookup(ids, node_limit=9, depth=9) is None


def test_a_text_of_one_id_repeated_takes_no_longer_than_a_few_lookups() -> None:
    """Every place matches at every length there."""
    drawn = np.random.default_rng(0).integers(0, 2000, 16_000)
    ordinary = DocumentText([drawn.astype(np.int32)])
    repeated = DocumentText([np.full(16_000, 7, dtype=np.int32)])

    def seconds(document: DocumentText, ids: list[int]) -> float:
        taken = []
        for _ in range(20):
            started = time.perf_counter()
            document.lookup(ids, node_limit=32, depth=10)
            taken.append(time.perf_counter() - started)
        return min(taken)

    found = repeated.lookup([7] * 200, node_limit=32, depth=10)
    assert found is not None
    assert found.match_length == LONGEST
    assert found.tokens == (7,) * 10
    in_time(seconds(repeated, [7] * 200) < 60 * seconds(ordinary, drawn[:200].tolist()))
