"""The noise of position t: counter-based, so it depends on (seed, t, id) alone and on no draft.

The generator is Philox4x64-10 (Salmon et al., SC 2011), which is `numpy.random.Philox`: key (seed, DOMAIN),
counter (b, t, 0, 0), whose four output words in order are the bits of ids 4b to 4b + 3. The uniform is
`(bits >> 12) + 0.5` over 2**52, a float64 strictly inside (0, 1); the noise is `-log(-log(uniform))`, so that
the argmax of logprob plus noise is a sample (Gumbel). docs/exactness.md publishes vectors.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

DOMAIN = 0x746F6B656E730001
"""Second key word of token noise ("tokens", version 1)."""
CHOICE_DOMAIN = 0x63686F6963650001
"""Second key word of `derive` ("choice", version 1)."""

_MASK = (1 << 64) - 1


def raw_bits(seed: int, position: int, vocabulary_size: int) -> NDArray[np.uint64]:
    """The 64 random bits of each id at `position`: uint64[vocabulary_size]; a wider vocabulary adds ids."""
    return _words(seed, DOMAIN, position << 64, vocabulary_size)


def uniform(seed: int, position: int, vocabulary_size: int) -> NDArray[np.float64]:
    """The uniform number of each id at `position`, from 2**-53 to 1 - 2**-53: float64[vocabulary_size]."""
    return _uniform_of(raw_bits(seed, position, vocabulary_size))


def gumbel(seed: int, position: int, vocabulary_size: int) -> NDArray[np.float64]:
    """The Gumbel noise of each id at `position`: float64[vocabulary_size], from -3.7 to 36.8."""
    return _gumbel_of(raw_bits(seed, position, vocabulary_size))


def gumbel_at(seed: int, positions: Sequence[int], tokens: Sequence[int]) -> NDArray[np.float64]:
    """The noise of single ids, `tokens[i]` at `positions[i]`: float64[n], bit for bit as `gumbel` draws it.

    Made for few ids of a wide vocabulary: up to a hundred take about a quarter of a millisecond.
    """
    ids = np.asarray(tokens, dtype=np.uint64)
    counters = np.zeros((4, len(ids)), dtype=np.uint64)
    counters[0] = ids >> np.uint64(2)
    counters[1] = np.asarray(positions, dtype=np.uint64)
    words = _philox(counters, seed)
    bits = words[(ids & np.uint64(3)).astype(np.intp), np.arange(len(ids))]
    return _gumbel_of(bits)


def derive(seed: int, choice: int) -> int:
    """The seed of choice number `choice` of a request; choice 0 has the request's own seed."""
    return seed if choice == 0 else int(_words(seed, CHOICE_DOMAIN, choice, 1)[0])


class NoiseRows:
    """Rows of noise of one session, one per position, each drawn once.

    Args:
        seed: seed of the session, unsigned 64 bits.
        vocabulary_size: width of a row.
        keep: largest number of rows held; the row drawn first is dropped first.
    """

    __slots__ = ("_keep", "_rows", "_seed", "_vocabulary_size")

    def __init__(self, seed: int, vocabulary_size: int, keep: int = 256) -> None:
        self._seed = seed
        self._vocabulary_size = vocabulary_size
        self._keep = keep
        self._rows: dict[int, NDArray[np.float64]] = {}

    def row(self, position: int) -> NDArray[np.float64]:
        """The noise at `position`: float64[vocabulary_size], read-only, as `gumbel` draws it."""
        found = self._rows.get(position)
        if found is not None:
            return found
        drawn = gumbel(self._seed, position, self._vocabulary_size)
        drawn.setflags(write=False)
        while len(self._rows) >= max(1, self._keep):
            del self._rows[next(iter(self._rows))]
        self._rows[position] = drawn
        return drawn

    def forget_before(self, position: int) -> None:
        """Drops the rows of positions below `position`."""
        for passed in [p for p in self._rows if p < position]:
            del self._rows[passed]

    def __len__(self) -> int:
        return len(self._rows)


def _uniform_of(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    # The shifted bits fit a signed integer, whose conversion to float64 is exact and much faster.
    numbers = (bits >> np.uint64(12)).view(np.int64).astype(np.float64)
    numbers += 0.5
    numbers *= 2.0**-52
    return numbers


def _gumbel_of(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    noise = _uniform_of(bits)
    np.log(noise, out=noise)
    np.negative(noise, out=noise)
    np.log(noise, out=noise)
    np.negative(noise, out=noise)
    return noise


_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_KEY_STEPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def _philox(counters: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """Philox4x64-10 of many counters at once: uint64[4, n] to the four output words of each."""
    a, b, c, d = counters
    key = [seed, DOMAIN]
    for _ in range(_ROUNDS):
        high_a, low_a = _multiply(a, _MULTIPLIERS[0])
        high_c, low_c = _multiply(c, _MULTIPLIERS[1])
        a, b, c, d = high_c ^ b ^ np.uint64(key[0]), low_c, high_a ^ d ^ np.uint64(key[1]), low_a
        key = [(word + step) & _MASK for word, step in zip(key, _KEY_STEPS, strict=True)]
    return np.stack((a, b, c, d))


def _multiply(words: NDArray[np.uint64], by: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """The upper and the lower 64 bits of each product."""
    low, high = words & _LOW, words >> _HALF
    by_low, by_high = np.uint64(by & 0xFFFFFFFF), np.uint64(by >> 32)
    carried = low * by_high + ((low * by_low) >> _HALF)
    middle = high * by_low + (carried & _LOW)
    return high * by_high + (carried >> _HALF) + (middle >> _HALF), words * np.uint64(by)


def _words(seed: int, domain: int, counter: int, count: int) -> NDArray[np.uint64]:
    """The first `count` output words from the 256-bit `counter` on; its lowest word counts blocks."""
    # NumPy steps its counter before the first block, so it starts one lower (wrapping below 0).
    before = counter - 1
    counters = np.array(
        [before & _MASK, (before >> 64) & _MASK, *[_MASK * (before < 0)] * 2], dtype=np.uint64
    )
    generator = np.random.Philox(key=np.array([seed, domain], dtype=np.uint64), counter=counters)
    return generator.random_raw(count)
