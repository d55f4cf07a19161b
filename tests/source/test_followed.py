"""Followed ids: appended only where their hash is right, and compared without being read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.source.events import NotFollowed
from outrider.source.followed import FollowedIds, SourceProfile
from speculative.hashing import prefix_hash

PROFILE = SourceProfile("source", "a model", readable_ids=100, max_length=8)
IDS = st.lists(st.integers(0, 3), max_size=8)


def followed(*ids: int) -> FollowedIds:
    return FollowedIds(ids, 90, PROFILE)


@given(start=IDS, more=IDS, known=st.integers(0, 8))
def test_ids_are_appended_with_their_hashes_and_known_ones_are_skipped(
    start: list[int], more: list[int], known: int
) -> None:
    whole = (start + more)[:8]
    start, fresh = whole[: len(start)], whole[len(start) :]
    ids = followed(*start)
    position = max(0, len(start) - known)
    assert list(ids.extend(position, whole[position:], prefix_hash(whole))) == fresh
    assert ids.array.tolist() == whole
    assert [ids.hash_at(length) for length in range(len(whole) + 1)] == [
        prefix_hash(whole[:length]) for length in range(len(whole) + 1)
    ]
    assert ids.prefix_hash == prefix_hash(whole)


@pytest.mark.parametrize(
    ("position", "ids", "hashed", "why"),
    [
        (5, [1], [4, 5, 6, 0, 0, 1], "ids 3 to 4 are missing; follow the session again"),
        (3, [7], [4, 5, 6, 8], "the hash over 4 ids is .*; follow the session again"),
        (0, [4, 5], [4, 6], "the hash over 2 ids is"),
        (3, [7, 95], [4, 5, 6, 7, 95], "id 95 is outside the target's vocabulary of 90"),
        (3, [100], [4, 5, 6, 100], "id 100 is outside this source's vocabulary of 100"),
        (3, [1] * 6, [4, 5, 6, *[1] * 6], "the session has 9 ids; this source can follow 8"),
    ],
)
def test_ids_that_do_not_continue_the_session_change_nothing(
    position: int, ids: list[int], hashed: list[int], why: str
) -> None:
    known = followed(4, 5, 6)
    with pytest.raises(NotFollowed, match=why):
        known.extend(position, ids, prefix_hash(hashed))
    assert known.array.tolist() == [4, 5, 6]
    assert list(known.extend(3, [7], prefix_hash([4, 5, 6, 7]))) == [7]


@pytest.mark.parametrize(
    ("ids", "why"),
    [
        ([4, 95], "id 95 is outside the target's vocabulary of 90"),
        ([4, 100], "id 100 is outside this source's"),
        ([1] * 9, "the session has 9 ids"),
    ],
)
def test_ids_that_cannot_be_read_are_refused_from_the_start(ids: list[int], why: str) -> None:
    with pytest.raises(NotFollowed, match=why):
        followed(*ids)


@given(one=IDS, other=IDS)
def test_two_sessions_agree_up_to_their_first_difference(one: list[int], other: list[int]) -> None:
    same = 0
    while same < min(len(one), len(other)) and one[same] == other[same]:
        same += 1
    assert followed(*one).agreed_length(followed(*other)) == same
