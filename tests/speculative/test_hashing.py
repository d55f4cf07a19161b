import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculative.hashing import EMPTY, extend, prefix_hash, prefix_hashes

token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([], 0x6F75747269646572),
        ([0], 0x87CADAFFED264709),
        ([1, 2, 3], 0x7FA8E979DF51E556),
        ([3, 2, 1], 0xB729F8757B9EBCF6),
        ([4294967295], 0x195B6E6921F9FB1A),
        (list(range(1000)), 0x331F2629D0FEB1FC),
    ],
)
def test_the_published_vectors_hold(ids: list[int], expected: int) -> None:
    """docs/exactness.md prints these."""
    assert prefix_hash(ids) == expected


@given(token_lists)
def test_extending_id_by_id_gives_every_prefixs_hash(ids: list[int]) -> None:
    rolling = [EMPTY]
    for token in ids:
        rolling.append(extend(rolling[-1], token))
    assert prefix_hashes(ids).tolist() == rolling
    assert prefix_hash(ids) == rolling[-1]


def test_a_plain_reading_of_the_definition_agrees() -> None:
    """SplitMix64 written out once more, from its paper."""

    def mix(seed: int) -> int:
        z = (seed + 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    assert mix(0) == 0xE220A8397B1DCDAF
    expected = EMPTY
    for token in (5, 0, 70_000):
        expected = (expected * 0xD1342543DE82EF95 + mix(token)) % 2**64
    assert prefix_hash([5, 0, 70_000]) == expected


def test_order_length_and_leading_zeros_all_matter() -> None:
    prefixes = [(), (0,), (0, 0), (0, 0, 0), (1,), (0, 1), (1, 0), (1, 1), (2, 0, 1), (2, 1, 0)]
    assert len({prefix_hash(ids) for ids in prefixes}) == len(prefixes)


def test_no_two_of_many_short_prefixes_collide() -> None:
    hashes = {extend(extend(EMPTY, a), b) for a in range(400) for b in range(400)}
    assert len(hashes) == 160_000
