from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculative.lookup import survival
from speculative.lookup.session_text import SessionText
from speculative.lookup.suffix_automaton import SuffixAutomaton


def repeated_suffix(text: list[int]) -> int:
    """Length of the longest suffix that also occurs earlier, by looking everywhere."""
    for size in range(len(text) - 1, 0, -1):
        suffix = text[-size:]
        if any(text[i : i + size] == suffix for i in range(len(text) - size)):
            return size
    return 0


def continuations(text: list[int], size: int, count: int) -> set[tuple[int, ...]]:
    """What followed each earlier occurrence of the last `size` ids, periods drafted on."""
    found = set()
    for end in range(size, len(text)):
        if text[end - size : end] == text[-size:]:
            copied = list(text)
            while len(copied) < len(text) + count:
                copied.append(copied[end + len(copied) - len(text)])
            found.add(tuple(copied[len(text) :]))
    return found


def test_nothing_is_drafted_where_nothing_repeats() -> None:
    assert SuffixAutomaton().draft(4).tokens == ()
    assert SuffixAutomaton([1, 2, 3, 4]).draft(4).tokens == ()
    assert SuffixAutomaton([1, 2, 1]).draft(0).tokens == ()


def test_a_repeated_passage_goes_on_as_before() -> None:
    copied = SuffixAutomaton([5, 6, 7, 8, 9, 1, 5, 6, 7]).draft(3)
    assert copied.tokens == (8, 9, 1)
    assert copied.match_length == 3


@pytest.mark.parametrize(
    ("text", "expected"), [("abababab", "ababab"), ("aaa", "aaaaaa"), ("xabcabca", "bcabca")]
)
def test_a_period_is_drafted_on_past_the_end_of_the_text(text: str, expected: str) -> None:
    assert SuffixAutomaton(map(ord, text)).draft(6).tokens == tuple(map(ord, expected))


def test_the_latest_occurrence_is_copied() -> None:
    assert SuffixAutomaton([1, 2, 3, 1, 2, 4, 1, 2]).draft(1).tokens == (4,)


@given(text=st.lists(st.integers(0, 2), max_size=30), count=st.integers(1, 8))
def test_a_draft_is_what_followed_the_longest_repeated_suffix(text: list[int], count: int) -> None:
    lookup = SuffixAutomaton()
    for token in text:
        lookup.append(token)
    copied = lookup.draft(count)
    assert copied.match_length == repeated_suffix(text)
    if copied.match_length:
        assert copied.tokens in continuations(text, copied.match_length, count)
    else:
        assert copied.tokens == ()


def longest_known_suffix(text: list[int], path: list[int]) -> int:
    """Length of the longest suffix of text and path that occurs in the text, by looking everywhere."""
    whole = text + path
    for size in range(len(whole), 0, -1):
        if any(text[at : at + size] == whole[-size:] for at in range(len(text) - size + 1)):
            return size
    return 0


@given(
    text=st.lists(st.integers(0, 2), max_size=30),
    path=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    count=st.integers(1, 8),
)
def test_below_a_path_it_drafts_what_followed_the_longest_suffix_of_both_and_changes_nothing(
    text: list[int], path: list[int], count: int
) -> None:
    lookup = SuffixAutomaton(text)
    before = lookup.draft(8)
    copied = lookup.draft_below(path, count)
    assert copied.match_length == longest_known_suffix(text, path)
    if copied.match_length:
        whole = text + path
        found = {
            ends
            for end in range(copied.match_length, len(text) + 1)
            if text[end - copied.match_length : end] == whole[len(whole) - copied.match_length :]
            for ends in [drafted_on(whole, end, count)]
        }
        assert copied.tokens in found
    else:
        assert copied.tokens == ()
    assert lookup.draft(8) == before
    assert len(lookup) == len(text)


def test_a_text_that_repeats_itself_for_long_takes_no_longer_to_look_up() -> None:
    """A run of one token has as many suffixes as tokens; a lookup of each step may not try them all."""

    class Counted(list[int]):
        reads = 0

        def __getitem__(self, at: Any) -> Any:
            Counted.reads += 1
            return super().__getitem__(at)

    for period in ([1], [1, 2, 3]):
        lookup = SuffixAutomaton([9, 8, *(period * 5_000)])
        lookup._links = Counted(lookup._links)
        assert lookup.draft_below([9, 8], 2).match_length == 2, "sought in the path alone"
    assert Counted.reads < 200


def test_no_token_below_a_path_is_drafted_where_none_is_wanted() -> None:
    assert SuffixAutomaton([1, 2, 1]).draft_below([2], 0).tokens == ()


def drafted_on(whole: list[int], start: int, count: int) -> tuple[int, ...]:
    """`count` ids behind `whole`, copied from this place of it on, periods drafted on."""
    copied = list(whole)
    for at in range(start, start + count):
        copied.append(copied[at])
    return tuple(copied[len(whole) :])


def test_proposers_that_share_a_text_add_each_id_once() -> None:
    text = SessionText()
    assert text.take(0, [1, 2, 3]) == 3
    assert text.take(0, [1, 2]) == 2
    assert text.take(2, [3, 1, 2]) == 5
    assert text.take(3, [1, 2]) == 5
    assert len(text.index) == 5
    assert text.index.draft(1).tokens == (3,)


def test_building_at_once_and_id_by_id_are_the_same() -> None:
    text = [1, 2, 3, 1, 2, 3, 1, 2]
    grown = SuffixAutomaton()
    for count, token in enumerate(text, start=1):
        grown.append(token)
        assert len(grown) == count
        assert grown.draft(5) == SuffixAutomaton(text[:count]).draft(5)


def test_a_longer_match_is_trusted_more() -> None:
    estimates = [survival(length) for length in range(12)]
    assert estimates[0] == 0
    assert estimates == sorted(estimates)
    assert survival(1) == 0.25
    assert survival(1000) == survival(8) == 0.9
