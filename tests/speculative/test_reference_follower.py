"""Where an output stands in the texts that it may copy from, and what is drafted from there."""

import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculative.draft import Draft
from speculative.lookup.reference import ReferenceFollower

TEXT = tuple(range(1, 41))
LONG = tuple(random.Random(5).choices(range(2000), k=600))
PERIODIC = (*range(50, 90), *range(7)) * 12


def after(output: Sequence[int], *texts: Sequence[int]) -> ReferenceFollower:
    follower = ReferenceFollower(texts or (TEXT,))
    for token in output:
        follower.extend((token,))
    return follower


def branches(draft: Draft | None) -> Iterator[tuple[int, ...]]:
    """The path to each leaf, the likeliest leaf's first node first."""
    assert draft is not None
    leaves = [node for node in range(len(draft)) if node not in draft.parents]
    for leaf in leaves:
        path, node = [], leaf
        while node >= 0:
            path.append(draft.tokens[node])
            node = draft.parents[node]
        yield tuple(reversed(path))


def starts(draft: Draft | None) -> set[tuple[int, ...]]:
    """The first two tokens of each branch."""
    return {path[:2] for path in branches(draft)}


def acceptance_length(output: Sequence[int], *texts: Sequence[int], node_limit: int = 64) -> float:
    """Tokens per round where each round takes the drafted tokens that are the output's, and one more."""
    follower = ReferenceFollower(texts)
    at = rounds = 0
    while at < len(output):
        nodes = {} if (draft := follower.draft(node_limit)) is None else children(draft)
        node, end = -1, at
        while end < len(output) and (node, output[end]) in nodes:
            node, end = nodes[node, output[end]], end + 1
        for token in output[at : end + 1]:
            follower.extend((token,))
        at, rounds = end + 1, rounds + 1
    return len(output) / rounds


def children(draft: Draft) -> dict[tuple[int, int], int]:
    return {(draft.parents[node], draft.tokens[node]): node for node in range(len(draft))}


def corrupted(output: Sequence[int], share: float) -> list[int]:
    chance = random.Random(11)
    return [chance.randrange(2000) if chance.random() < share else token for token in output]


def test_the_output_is_taken_to_begin_as_the_text_does() -> None:
    assert next(branches(after(()).draft(3))) == TEXT[:3]


def test_the_output_may_begin_as_any_of_several_texts() -> None:
    assert starts(after((), (1, 2, 3), (4, 5, 6), (7, 8, 9)).draft(9)) == {(1, 2), (4, 5), (7, 8)}


def test_a_copy_that_runs_well_offers_the_whole_window() -> None:
    draft = after(LONG[:20], LONG).draft(64)
    assert draft is not None
    assert draft.tokens == LONG[20:84]
    assert draft.parents == tuple(range(-1, 63))
    assert draft.survival[63] > 0.6


@pytest.mark.parametrize("piece", [2, 7, 65])
def test_ids_that_come_in_pieces_are_followed_like_single_ones(piece: int) -> None:
    pieces = ReferenceFollower((LONG,))
    for begin in range(0, 200, piece):
        pieces.extend(LONG[begin : begin + piece])
    end = -(-200 // piece) * piece
    assert pieces.draft(16) == after(LONG[:end], LONG).draft(16)


@pytest.mark.parametrize("piece", [3, 8, 33])
def test_an_edit_amid_a_piece_is_passed(piece: int) -> None:
    edited = (*LONG[:100], 2001, 2002, *LONG[103:200])
    follower = ReferenceFollower((LONG,))
    for begin in range(0, 132, piece):
        follower.extend(edited[begin : min(begin + piece, 132)])
    draft = follower.draft(16)
    assert draft is not None
    assert draft.tokens == edited[132:148]


def test_behind_a_piece_the_place_of_its_last_ids_is_found() -> None:
    follower = ReferenceFollower((LONG,))
    follower.extend((*LONG[:20], *[2001] * 40, *LONG[300:312]))
    draft = follower.draft(8)
    assert draft is not None
    assert draft.tokens == LONG[312:320]


def test_survival_grows_with_the_copy() -> None:
    survival = [draft.survival[0] for n in range(12) if (draft := after(TEXT[:n]).draft(4)) is not None]
    assert survival == sorted(survival)
    assert survival[-1] > survival[0]


@pytest.mark.parametrize(
    ("output", "then"),
    [
        ((*TEXT[:10], 99), TEXT[11:13]),
        ((*TEXT[:10], 99, 98), TEXT[12:14]),
        ((*TEXT[:10], 99), TEXT[10:12]),
        ((*TEXT[:10], TEXT[14]), TEXT[15:17]),
    ],
    ids=["an id was replaced", "two ids were replaced", "an id was inserted", "ids were left out"],
)
def test_right_after_an_edit_each_way_to_go_on_is_a_branch(
    output: Sequence[int], then: tuple[int, ...]
) -> None:
    assert then in starts(after(output).draft(32))


@pytest.mark.parametrize(
    "edited",
    [
        (*LONG[:100], 2001, *LONG[101:]),
        (*LONG[:100], 2001, 2002, 2003, *LONG[100:]),
        (*LONG[:100], *LONG[110:]),
        (*LONG[:100], 2001, 2002, *LONG[105:]),
    ],
    ids=["replaced", "inserted", "left out", "replaced by fewer"],
)
def test_after_an_edit_the_copy_goes_on_in_long_windows(edited: Sequence[int]) -> None:
    assert acceptance_length(edited, LONG) > 40
    behind = after(edited[:120], LONG).draft(32)
    assert behind is not None
    assert behind.tokens == tuple(edited[120:152])


def test_a_jump_is_followed_where_the_last_ids_stand_in_one_place_alone() -> None:
    assert next(branches(after((*LONG[:50], *LONG[300:303]), LONG).draft(64)))[:20] == LONG[303:323]


def test_a_single_id_that_stands_in_one_place_alone_is_enough() -> None:
    assert next(branches(after((77, 78, 20)).draft(4))) == TEXT[20:24]


def test_where_the_last_ids_stand_in_several_places_each_is_a_branch() -> None:
    text = (1, 2, 3, 40, 50, 2, 3, 60, 61, 2, 3, 70)
    assert starts(after((9, 9, 9, 1, 2, 3), text).draft(8)) >= {(40, 50)}
    twice = (1, 2, 3, 40, 50, 51, 52, 1, 2, 3, 60, 61)
    assert starts(after((9, 9, 9, 1, 2, 3), twice).draft(16)) == {(40, 50), (60, 61)}


@pytest.mark.parametrize("name", [(3001,), (3001, 3002, 3003)], ids=["one id", "three ids"])
def test_a_name_that_was_replaced_once_is_replaced_from_then_on(name: tuple[int, ...]) -> None:
    text, output = [], []
    for at in range(0, 400, 20):
        part = LONG[at : at + 20]
        text += [*part, 4001, 4002]
        output += [*part, *name]
    assert acceptance_length(output, text) > 30
    behind = after(output[: 50 + 3 * len(name)], text).draft(40)
    assert behind is not None
    assert behind.tokens == tuple(output[50 + 3 * len(name) :][:40])


def test_a_name_that_is_kept_in_the_end_is_kept_from_then_on() -> None:
    text = [*LONG[:40], 4001, *LONG[40:80], 4001, *LONG[80:120], 4001, *LONG[120:160]]
    output = [*LONG[:40], 3001, *LONG[40:80], 4001, *LONG[80:120], 4001, *LONG[120:160]]
    behind = after(output[:100], text).draft(40)
    assert behind is not None
    assert behind.tokens == tuple(output[100:140])


def test_an_edit_of_what_was_copied_before_is_not_repeated() -> None:
    text = [*LONG[:20], 4001, *LONG[20:40], 4001, *LONG[40:60], 4001, *LONG[60:80]]
    output = [*LONG[:20], 4001, *LONG[20:40], 3001, *LONG[40:60], 4001, *LONG[60:80]]
    behind = after(output[:55], text).draft(24)
    assert behind is not None
    assert behind.tokens == tuple(output[55:79])


def test_texts_are_not_copied_from_beyond_their_ends() -> None:
    assert next(branches(after((1, 2), (1, 2, 3), (4, 5, 6)).draft(16))) == (3,)
    assert after((1, 2, 3), (1, 2, 3), (4, 5, 6)).draft(16) is None


def test_a_second_text_is_followed_when_the_output_goes_over_to_it() -> None:
    output = (*LONG[:100], *LONG[400:500])
    assert acceptance_length(output, LONG[:200], LONG[350:]) > 20


@pytest.mark.parametrize(("share", "least"), [(0.0, 50), (0.02, 25), (0.1, 7)])
@pytest.mark.parametrize("text", [LONG, PERIODIC, (5,) * 600], ids=["any text", "periods", "one id"])
def test_acceptance_length_where_ids_of_the_text_were_replaced(
    text: tuple[int, ...], share: float, least: float
) -> None:
    assert acceptance_length(text, corrupted(text, share)) > least


def test_nothing_is_copied_from_nothing() -> None:
    for texts in ((), ((),), ((), ())):
        assert ReferenceFollower(texts).draft(4) is None
        follower = ReferenceFollower(texts)
        follower.extend((5,))
        assert follower.draft(4) is None
    assert after(()).draft(0) is None
    assert after((77, 78)).draft(4) is None


def test_ids_beyond_the_bits_of_the_index_are_followed_too() -> None:
    text = tuple(2**22 + id_ for id_ in LONG)
    assert acceptance_length(text, text) > 50


@given(st.lists(st.integers(0, 4), max_size=80), st.lists(st.integers(0, 6), max_size=120))
def test_any_output_beside_any_text_gives_drafts_within_the_limit(text: list[int], output: list[int]) -> None:
    follower = ReferenceFollower([text])
    for token in output:
        draft = follower.draft(12)
        assert draft is None or len(draft) <= 12
        follower.extend((token,))


@given(
    st.lists(st.lists(st.integers(0, 4), max_size=30), max_size=4),
    st.lists(st.integers(0, 5), max_size=60),
    st.integers(1, 20),
)
def test_a_draft_has_ids_of_the_texts_and_of_the_output_alone(
    texts: list[list[int]], output: list[int], count: int
) -> None:
    draft = after(output, *texts).draft(count) if texts else None
    if draft is None:
        return
    assert len(draft) <= count
    assert set(draft.tokens) <= {token for text in [*texts, output] for token in text}
    for node, parent in enumerate(draft.parents):
        assert 0.0 < draft.survival[node] <= (1.0 if parent == -1 else draft.survival[parent])
