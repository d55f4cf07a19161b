"""The generator is pinned: an independent Philox4x64-10 in integers, Random123's vectors, and statistics."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from speculative.noise import CHOICE_DOMAIN, DOMAIN, NoiseRows, derive, gumbel, gumbel_at, raw_bits, uniform

MASK = (1 << 64) - 1


def philox4x64_10(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """The block function as Random123 defines it (philox.h), in plain integers."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = 0xD2E7470EE14C6C93 * x0, 0xCA5A826395121157 * x2
        x0, x1, x2, x3 = (b >> 64) ^ x1 ^ k0, b & MASK, (a >> 64) ^ x3 ^ k1, a & MASK
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & MASK, (k1 + 0xBB67AE8584CAA73B) & MASK
    return x0, x1, x2, x3


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        (
            (0, 0, 0, 0),
            (0, 0),
            (0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B),
        ),
        (
            (MASK, MASK, MASK, MASK),
            (MASK, MASK),
            (0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0),
        ),
        (
            (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89),
            (0x452821E638D01377, 0xBE5466CF34E90C6C),
            (0xA528F45403E61D95, 0x38C72DBD566E9788, 0xA5A1610E72FD18B5, 0x57BD43B5E52B7FE6),
        ),
    ],
)
def test_the_reference_here_gives_random123s_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, int, int, int]
) -> None:
    assert philox4x64_10(counter, key) == words


@pytest.mark.parametrize("seed", [0, 1, 20261120, (1 << 63) - 1, 1 << 63, MASK])
@pytest.mark.parametrize("position", [0, 1, 255, 70_000, 1 << 32, (1 << 32) + 5, 1 << 63, MASK])
def test_block_b_at_position_t_gives_ids_4b_to_4b_plus_3(seed: int, position: int) -> None:
    expected = [word for block in range(3) for word in philox4x64_10((block, position, 0, 0), (seed, DOMAIN))]
    assert raw_bits(seed, position, 12).tolist() == expected


def test_the_published_vectors_hold() -> None:
    """docs/exactness.md prints these."""
    first = [0x837B784071AE0EC3, 0x8B4351671A973C89, 0x809A8E077D4B3B9A, 0xD4F5A8F7B07A5CD4]
    later = [0xF4C48FD9059FDA3D, 0xC5E9E49CDC153D96, 0xBF0E085EB92C1E34, 0x98D45D6F26C17F6C]
    assert raw_bits(0, 0, 4).tolist() == first
    assert raw_bits(42, 1000, 4).tolist() == later
    assert uniform(42, 1000, 1)[0].hex() == "0x1.e9891fb20b3fbp-1"
    assert gumbel(42, 1000, 2).tolist() == pytest.approx([3.104044764982792, 1.3573312808006601], rel=1e-12)
    assert derive(42, 1) == 0x4713374708819A34


@pytest.mark.parametrize("narrow", [1, 2, 3, 4, 5, 95, 96])
def test_a_wider_vocabulary_only_adds_ids(narrow: int) -> None:
    assert raw_bits(7, 3, narrow).tolist() == raw_bits(7, 3, 128)[:narrow].tolist()


def test_the_uniform_is_strictly_inside_the_unit_interval() -> None:
    lowest, highest = 0.5 * 2.0**-52, (MASK >> 12) * 2.0**-52 + 0.5 * 2.0**-52
    assert lowest > 0
    assert highest < 1
    assert math.isfinite(-math.log(-math.log(highest)))
    assert math.isfinite(-math.log(-math.log(lowest)))
    numbers = uniform(1, 2, 4096)
    bits = raw_bits(1, 2, 4096).tolist()
    assert numbers.tolist() == [((word >> 12) + 0.5) * 2.0**-52 for word in bits]


def test_the_noise_is_minus_log_minus_log_of_the_uniform() -> None:
    expected = [-math.log(-math.log(u)) for u in uniform(3, 9, 500).tolist()]
    np.testing.assert_allclose(gumbel(3, 9, 500), expected, rtol=1e-13, atol=1e-15)


def test_choice_0_has_the_requests_own_seed_and_others_have_theirs() -> None:
    seeds = [derive(99, choice) for choice in range(64)]
    assert seeds[0] == 99
    assert len(set(seeds)) == 64
    assert seeds[5] == philox4x64_10((5, 0, 0, 0), (99, CHOICE_DOMAIN))[0]
    assert not set(seeds[1:]) & {derive(100, choice) for choice in range(1, 64)}


def test_rows_are_drawn_once_kept_in_bounds_and_forgotten() -> None:
    rows = NoiseRows(5, 96, keep=4)
    first = rows.row(10)
    assert rows.row(10) is first
    assert np.array_equal(first, gumbel(5, 10, 96))
    assert not first.flags.writeable
    for position in range(11, 20):
        rows.row(position)
    assert len(rows) == 4
    rows.forget_before(18)
    assert len(rows) == 2
    assert np.array_equal(rows.row(10), first)


ALONG: dict[str, Callable[[], NDArray[np.uint64]]] = {
    "ids": lambda: raw_bits(11, 4, 1 << 17),
    "positions": lambda: np.concatenate([raw_bits(11, t, 64) for t in range(1 << 11)]),
    "seeds": lambda: np.concatenate([raw_bits(s, 4, 64) for s in range(1 << 11)]),
}


@pytest.mark.parametrize("axis", ALONG)
@pytest.mark.parametrize("shift", [0, 24, 56])
def test_bits_are_uniform_along_every_axis(
    axis: str, shift: int, chi_square_limit: Callable[[int], float]
) -> None:
    words = ALONG[axis]()
    counts = np.bincount(((words >> np.uint64(shift)) & np.uint64(255)).view(np.int64), minlength=256)
    expected = len(words) / 256
    assert float(((counts - expected) ** 2 / expected).sum()) < chi_square_limit(255)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: raw_bits(11, 4, 1 << 16), lambda: raw_bits(11, 5, 1 << 16)),
        (lambda: raw_bits(11, 4, 1 << 16), lambda: raw_bits(12, 4, 1 << 16)),
        (lambda: raw_bits(11, 4, 1 << 16), lambda: np.roll(raw_bits(11, 4, 1 << 16), 1)),
    ],
    ids=["neighbouring positions", "neighbouring seeds", "neighbouring ids"],
)
def test_neighbours_are_independent(
    one: Callable[[], NDArray[np.uint64]],
    other: Callable[[], NDArray[np.uint64]],
    chi_square_limit: Callable[[int], float],
) -> None:
    a, b = (words() >> np.uint64(60) for words in (one, other))
    counts = np.bincount((a * np.uint64(16) + b).view(np.int64), minlength=256)
    expected = len(a) / 256
    assert float(((counts - expected) ** 2 / expected).sum()) < chi_square_limit(255)
    # Each of the 64 bits differs half of the time; five sigma over 64 of them.
    differing = one() ^ other()
    for bit in range(64):
        share = float(((differing >> np.uint64(bit)) & np.uint64(1)).mean())
        assert abs(share - 0.5) < 5 * 0.5 / len(differing) ** 0.5, bit


@given(
    seed=st.integers(0, 2**64 - 1),
    places=st.lists(st.tuples(st.integers(0, 2**32), st.integers(0, 300)), min_size=1, max_size=20),
)
def test_noise_of_single_ids_is_that_of_their_rows(seed: int, places: list[tuple[int, int]]) -> None:
    positions, tokens = zip(*places, strict=True)
    drawn = gumbel_at(seed, positions, tokens)
    assert drawn.tolist() == [gumbel(seed, position, 301)[token] for position, token in places]
