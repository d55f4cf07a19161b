"""The generator is pinned: an independent Philox4x64-10 in integers, Random123's vectors, and statistics."""

import math
import threading
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from speculative.noise import (
    CHOICE_DOMAIN,
    DOMAIN,
    NoiseRows,
    PositionNoise,
    derive,
    gumbel,
    gumbel_at,
    lead_bounds,
    leads,
    uniform,
)

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


def reference_bits(seed: int, position: int, token: int) -> int:
    """The 52 bits of one id as docs/exactness.md says it, from the integers above."""
    words = philox4x64_10((token // 16, position, 0, 0), (seed, DOMAIN))
    lead = words[token % 16 // 4] >> 16 * (token % 4) & 0xFFFF
    return lead << 36 | philox4x64_10((token // 4, position, 1, 0), (seed, DOMAIN))[token % 4] >> 28


@pytest.mark.parametrize("seed", [0, 1, 20261120, (1 << 63) - 1, 1 << 63, MASK])
@pytest.mark.parametrize("position", [0, 1, 255, 70_000, 1 << 32, (1 << 32) + 5, 1 << 63, MASK])
def test_an_id_has_its_own_lead_and_tail(seed: int, position: int) -> None:
    expected = [reference_bits(seed, position, token) for token in range(37)]
    assert leads(seed, position, 37).tolist() == [bits >> 36 for bits in expected]
    numbers = [(bits + 0.5) * 2.0**-52 for bits in expected]
    assert uniform(seed, position, 37).tolist() == numbers
    noise = PositionNoise(seed, position, 37)
    assert noise.full().tolist() == gumbel(seed, position, 37).tolist()
    assert noise.exact(np.arange(37)).tolist() == noise.full().tolist()


def test_the_published_vectors_hold() -> None:
    """docs/exactness.md prints these."""
    assert leads(0, 0, 6).tolist() == [0x184E, 0x9AA8, 0x38EC, 0xD8A0, 0x4DE0, 0xCAB2]
    assert leads(42, 1000, 6).tolist() == [0x6B7A, 0x208D, 0x17D2, 0x27C2, 0xC54B, 0x7ABF]
    assert leads(42, 1000, 17)[16] == 0x41F3
    assert tails(0, 0, 4) == [0x0B955F52F, 0xEA8B62E08, 0xCB2254A82, 0x394C00221]
    assert tails(42, 1000, 4) == [0x115BFE121, 0x171CD6A42, 0xAE2E26CB8, 0x6DD739BBD]
    assert uniform(42, 1000, 1)[0].hex() == "0x1.ade8456ff8486p-2"
    assert gumbel(42, 1000, 2).tolist() == pytest.approx(
        [0.14167626723960036, -0.7238534989817522], rel=1e-12
    )
    assert derive(42, 1) == 0x4713374708819A34


def tails(seed: int, position: int, count: int) -> list[int]:
    """The tails in production's numbers."""
    return [int(number * 2**52) & (1 << 36) - 1 for number in uniform(seed, position, count).tolist()]


@pytest.mark.parametrize("narrow", [1, 2, 3, 4, 5, 95, 96])
def test_a_wider_vocabulary_only_adds_ids(narrow: int) -> None:
    assert leads(7, 3, narrow).tolist() == leads(7, 3, 128)[:narrow].tolist()
    assert gumbel(7, 3, narrow).tolist() == gumbel(7, 3, 128)[:narrow].tolist()


def test_the_uniform_is_strictly_inside_the_unit_interval() -> None:
    lowest, highest = 0.5 * 2.0**-52, (MASK >> 12) * 2.0**-52 + 0.5 * 2.0**-52
    assert lowest > 0
    assert highest < 1
    assert math.isfinite(-math.log(-math.log(highest)))
    assert math.isfinite(-math.log(-math.log(lowest)))
    numbers = uniform(1, 2, 4096)
    assert numbers.min() > 0
    assert numbers.max() < 1


def test_the_noise_is_minus_log_minus_log_of_the_uniform() -> None:
    expected = [-math.log(-math.log(u)) for u in uniform(3, 9, 500).tolist()]
    np.testing.assert_allclose(gumbel(3, 9, 500), expected, rtol=1e-13, atol=1e-15)


def test_choice_0_has_the_requests_own_seed_and_others_have_theirs() -> None:
    seeds = [derive(99, choice) for choice in range(64)]
    assert seeds[0] == 99
    assert len(set(seeds)) == 64
    assert seeds[5] == philox4x64_10((5, 0, 0, 0), (99, CHOICE_DOMAIN))[0]
    assert not set(seeds[1:]) & {derive(100, choice) for choice in range(1, 64)}


@pytest.mark.parametrize("lead", [0, 1, 2, 0x7FFF, 0x8000, 0xFFFD, 0xFFFE, 0xFFFF])
@pytest.mark.parametrize("tail", [0, 1, (1 << 35) - 1, 1 << 35, (1 << 36) - 2, (1 << 36) - 1])
def test_a_lead_bounds_the_noise_of_every_tail(lead: int, tail: int) -> None:
    low, high = lead_bounds()
    noise = -np.log(-np.log(np.array([((lead << 36 | tail) + 0.5) * 2.0**-52])))[0]
    assert low[lead] <= noise <= high[lead]
    assert noise - low[lead] < 1e-12 or high[lead] - noise < 1e-12 or 0 < tail < (1 << 36) - 1


@pytest.mark.parametrize("width", [1, 15, 300, 512, 513, 4096, 50_000])
def test_noise_is_within_its_bounds_and_what_is_not_strong_is_below_them(width: int) -> None:
    noise = PositionNoise(9, 6, width)
    every, drawn = np.arange(width), noise.full()
    assert np.all((noise.low(every) <= drawn) & (drawn <= noise.high(every)))
    assert noise.low_of(width - 1) == noise.low(every)[-1]
    assert np.array_equal(noise.strong_low, noise.low(noise.strong))
    assert np.array_equal(noise.strong_high, noise.high(noise.strong))
    weak = np.setdiff1d(every, noise.strong)
    assert np.all(noise.high(weak) <= noise.weak_high)
    assert len(noise.strong) == width if width <= 512 else 400 < len(noise.strong) < 640


@pytest.mark.parametrize("count", [0, 1, 40, 41, 3000])
def test_few_ids_and_many_have_the_noise_of_the_whole_row(count: int) -> None:
    noise = PositionNoise(1 << 63, MASK, 5001)
    ids = np.random.default_rng(count).integers(0, 5001, count)
    assert noise.exact(ids).tolist() == noise.full()[ids].tolist()


def test_noise_is_drawn_once_kept_in_bounds_and_forgotten() -> None:
    rows = NoiseRows(5, 96, keep=4)
    first = rows.at(10)
    assert rows.at(10) is first
    assert first.full().tolist() == gumbel(5, 10, 96).tolist()
    assert not first.leads.flags.writeable
    for position in range(11, 20):
        rows.at(position)
    assert len(rows) == 4
    rows.forget_before(18)
    assert len(rows) == 2
    assert np.array_equal(rows.at(10).leads, first.leads)


def test_another_thread_draws_ahead_while_rows_are_read_and_forgotten() -> None:
    rows, last = NoiseRows(5, 4096, keep=8), 400
    reached = threading.Event()

    def ahead() -> None:
        for position in range(last):
            rows.draw_ahead(position)
            reached.set()

    thread = threading.Thread(target=ahead)
    thread.start()
    reached.wait()
    for position in range(last):
        noise = rows.at(position)
        assert noise.position == position
        if position % 5 == 0:
            rows.forget_before(position)
        assert len(rows) <= 8 + 1, "at most the one that the other thread is putting in"
    thread.join()
    assert np.array_equal(rows.at(last - 1).leads, leads(5, last - 1, 4096))


def bits(seed: int, position: int, count: int) -> NDArray[np.uint64]:
    """The 52 bits of each id, lead above tail: uint64[count]."""
    return (uniform(seed, position, count) * 2**52).astype(np.uint64)


ALONG: dict[str, Callable[[], NDArray[np.uint64]]] = {
    "ids": lambda: bits(11, 4, 1 << 17),
    "positions": lambda: np.concatenate([bits(11, t, 64) for t in range(1 << 11)]),
    "seeds": lambda: np.concatenate([bits(s, 4, 64) for s in range(1 << 11)]),
}


@pytest.mark.parametrize("axis", ALONG)
@pytest.mark.parametrize("shift", [0, 20, 28, 32, 36, 44])
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
        (lambda: bits(11, 4, 1 << 16), lambda: bits(11, 5, 1 << 16)),
        (lambda: bits(11, 4, 1 << 16), lambda: bits(12, 4, 1 << 16)),
        (lambda: bits(11, 4, 1 << 16), lambda: np.roll(bits(11, 4, 1 << 16), 1)),
        (lambda: bits(11, 4, 1 << 16), lambda: np.roll(bits(11, 4, 1 << 16), 16)),
        (
            lambda: bits(11, 4, 1 << 16),
            lambda: bits(11, 4, 1 << 16) << np.uint64(16) & np.uint64((1 << 52) - 1),
        ),
    ],
    ids=[
        "neighbouring positions",
        "neighbouring seeds",
        "neighbouring ids",
        "neighbouring blocks",
        "lead and tail",
    ],
)
def test_neighbours_are_independent(
    one: Callable[[], NDArray[np.uint64]],
    other: Callable[[], NDArray[np.uint64]],
    chi_square_limit: Callable[[int], float],
) -> None:
    a, b = (words() >> np.uint64(48) for words in (one, other))
    counts = np.bincount((a * np.uint64(16) + b).view(np.int64), minlength=256)
    expected = len(a) / 256
    assert float(((counts - expected) ** 2 / expected).sum()) < chi_square_limit(255)
    # Each of the 52 bits differs half of the time; five sigma over 52 of them.
    differing = one() ^ other()
    for bit in range(52):
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
