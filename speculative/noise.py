"""The noise of position t: counter-based, so it depends on (seed, t, id) alone and on no draft.

The generator is Philox4x64-10 (Salmon et al., SC 2011), which is `numpy.random.Philox`, with the key (seed,
DOMAIN). An id's 52 bits come in two parts. The *lead* is the upper 16 bits: one block, counter
(id // 16, t, 0, 0), holds the leads of 16 ids. The *tail* is the lower 36 bits: the upper 36 bits of word
id % 4 of the block with counter (id // 4, t, 1, 0). The uniform is `(lead << 36 | tail) + 0.5` over 2**52, a
float64 strictly inside (0, 1). The noise is `-log(-log(uniform))`, so that the argmax of logprob plus noise
is a sample (Gumbel).

A lead bounds the noise to within a small interval, which mostly suffices to know the winner. So tails are
drawn for the few ids that could win, and a row costs a quarter of the bits. docs/exactness.md publishes
vectors.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speculative.sampling_kernel import current_kernel

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]

DOMAIN = 0x746F6B656E730002
"""Second key word of token noise ("tokens", version 2)."""
CHOICE_DOMAIN = 0x63686F6963650001
"""Second key word of `derive` ("choice", version 1)."""
ACCEPT_DOMAIN = 0x6163636570740001
"""Second key word of `accept_uniform` ("accept", version 1)."""
DRAFT_DOMAIN = 0x6472616674000001
"""Second key word of `draft_word` ("draft", version 1)."""
LEADS = 1 << 16
"""Number of values that a lead can have."""
LEAST_STRONG = LEADS - LEADS // 32
"""Least lead of strong noise in rows whose tokens are chosen together, however small the vocabulary."""

_TAIL_BITS = 36
_TAILS = 1 << 128
_MASK = (1 << 64) - 1
_STRONG = 512
_FEW = 40


def leads(seed: int, position: int, vocabulary_size: int) -> NDArray[np.uint16]:
    """The leading 16 bits of each id at `position`: uint16[vocabulary_size]; a wider vocabulary adds ids."""
    kernel = current_kernel()
    if kernel is not None:
        return kernel.leads(seed, position, vocabulary_size)
    words = _words(seed, DOMAIN, position << 64, -(-vocabulary_size // 16) * 4)
    return words.astype("<u8", copy=False).view("<u2")[:vocabulary_size]


def uniform(seed: int, position: int, vocabulary_size: int) -> Floats:
    """The uniform number of each id at `position`, from 2**-53 to 1 - 2**-53: float64[vocabulary_size]."""
    tails = _words(seed, DOMAIN, _TAILS | position << 64, vocabulary_size)
    return _uniform_of(leads(seed, position, vocabulary_size), tails)


def gumbel(seed: int, position: int, vocabulary_size: int) -> Floats:
    """The Gumbel noise of each id at `position`: float64[vocabulary_size], from -3.7 to 36.8."""
    return _gumbel_of(uniform(seed, position, vocabulary_size))


def gumbel_at(seed: int, positions: Sequence[int], tokens: Sequence[int]) -> Floats:
    """The noise of single ids, `tokens[i]` at `positions[i]`: float64[n], bit for bit as `gumbel` draws it.

    Made for few ids of a wide vocabulary: up to a hundred take about half a millisecond.
    """
    ids, at = np.asarray(tokens, dtype=np.uint64), np.asarray(positions, dtype=np.uint64)
    sixteen, four = np.uint64(16), np.uint64(4)
    words = _blocks(seed, ids // sixteen, at, 0, (ids % sixteen) // four)
    drawn = (words >> (np.uint64(16) * (ids % four))).astype(np.uint16)
    return _gumbel_of(_uniform_of(drawn, _blocks(seed, ids // four, at, 1, ids % four)))


def derive(seed: int, choice: int) -> int:
    """The seed of choice number `choice` of a request; choice 0 has the request's own seed."""
    return seed if choice == 0 else int(_words(seed, CHOICE_DOMAIN, choice, 1)[0])


def accept_uniform(seed: int, base: int, index: int) -> float:
    """The uniform number of decision `index` of the round that begins at `base` committed ids; inside (0,
    1)."""
    word = int(_words(seed, ACCEPT_DOMAIN, base << 64 | index // 4, 4)[index % 4])
    return ((word >> 12) + 0.5) * 2.0**-52


def draft_word(seed: int, base: int, index: int) -> int:
    """The 64 random bits of draw `index` of the window that a drafter draws behind `base` committed ids."""
    return int(_words(seed, DRAFT_DOMAIN, base << 64 | index // 4, 4)[index % 4])


@lru_cache(maxsize=1)
def lead_bounds() -> tuple[Floats, Floats]:
    """The least and the greatest noise that an id can have, by its lead: two float64[65536], read-only.

    The bounds hold for the noise as float64 logarithms compute it: they are widened by more than those err.
    """
    values, none = np.arange(LEADS, dtype=np.uint16), np.zeros(LEADS, dtype=np.uint64)
    low, high = _gumbel_of(_uniform_of(values, none)), _gumbel_of(_uniform_of(values, ~none))
    low -= 2.0**-46 * (1 + np.abs(low))
    high += 2.0**-46 * (1 + np.abs(high))
    low.setflags(write=False)
    high.setflags(write=False)
    return low, high


@lru_cache(maxsize=1)
def lead_medians() -> Floats:
    """The median noise of an id by its lead, for estimates: float64[65536], read-only."""
    values, half = np.arange(LEADS, dtype=np.uint16), np.full(LEADS, 1 << 63, dtype=np.uint64)
    medians = _gumbel_of(_uniform_of(values, half))
    medians.setflags(write=False)
    return medians


@lru_cache(maxsize=64)
def strong_lead(vocabulary_size: int) -> int:
    """The least lead of an id with strong noise; about 512 ids of any vocabulary have such a lead."""
    return max(0, LEADS - _STRONG * LEADS // vocabulary_size)


@lru_cache(maxsize=64)
def _weakness(vocabulary_size: int) -> tuple[int, float]:
    """The least lead of strong noise, and the upper bound of weaker noise, -inf where all is strong."""
    least = strong_lead(vocabulary_size)
    return least, float(lead_bounds()[1][least - 1]) if least else -np.inf


class PositionNoise:
    """The noise of one position: leads of all ids, and tails of those that are asked for.

    Nothing is drawn before it is asked for: a kernel draws the leads that it needs by itself.

    Args:
        seed: seed of the session, unsigned 64 bits.
        position: absolute position of the token that the noise is for.
        vocabulary_size: number of ids.

    Attributes:
        drawn: the leads if they are drawn already, else None.
        strong_lead: least lead of strong noise; 0 for a small vocabulary.
        weak_high: upper bound of the noise of every id that is not strong; -inf where all ids are.
    """

    __slots__ = (
        "_known",
        "_strong",
        "_strong_bounds",
        "drawn",
        "position",
        "seed",
        "strong_lead",
        "vocabulary_size",
        "weak_high",
    )

    def __init__(self, seed: int, position: int, vocabulary_size: int) -> None:
        self.seed = seed
        self.position = position
        self.vocabulary_size = vocabulary_size
        self.drawn: NDArray[np.uint16] | None = None
        self.strong_lead, self.weak_high = _weakness(vocabulary_size)
        self._known: tuple[Ids, NDArray[np.uint16]] | None = None
        """Ids whose leads a device drew, ascending, and these leads."""
        self._strong: Ids | None = None
        self._strong_bounds: tuple[Floats, Floats] | None = None

    @property
    def leads(self) -> NDArray[np.uint16]:
        """Leading bits of each id, uint16[vocabulary_size], read-only; drawn now if they are not yet."""
        return self.draw() if self.drawn is None else self.drawn

    def draw(self) -> NDArray[np.uint16]:
        """Draws the leads and returns them."""
        drawn = leads(self.seed, self.position, self.vocabulary_size)
        drawn.setflags(write=False)
        self.drawn = drawn
        return drawn

    def take_leads(self, ids: Ids, leads: NDArray[np.uint16]) -> None:
        """Takes the leads that a device drew for `ids`, so that these ids alone need no drawing here."""
        order = ids.argsort()
        self._known = ids[order], leads[order]

    def _leads_of(self, ids: Ids) -> NDArray[np.uint16]:
        if self.drawn is None and self._known is not None:
            known, leads = self._known
            places = np.minimum(known.searchsorted(ids), len(known) - 1)
            if np.array_equal(known[places], ids):
                return leads[places]
        return self.leads[ids]

    @property
    def strong(self) -> Ids:
        """Ids whose lead is at least `strong_lead`, ascending: int64[n]."""
        self.prepare()
        assert self._strong is not None
        return self._strong

    @property
    def strong_low(self) -> Floats:
        """Lower bounds of the noise of `strong`: float64[n]."""
        return self._bounds_of_strong()[0]

    @property
    def strong_high(self) -> Floats:
        """Upper bounds of the noise of `strong`: float64[n]."""
        return self._bounds_of_strong()[1]

    def _bounds_of_strong(self) -> tuple[Floats, Floats]:
        if self._strong_bounds is None:
            low, high = lead_bounds()
            drawn = self.leads[self.strong]
            lows, highs = low[drawn], high[drawn]
            # The highest lead bounds its noise from below alone, so its ids would be candidates of every row.
            endless = np.flatnonzero(drawn == LEADS - 1)
            if len(endless):
                lows[endless] = highs[endless] = self.exact(self.strong[endless])
            self._strong_bounds = lows, highs
        return self._strong_bounds

    def prepare(self) -> None:
        """Finds the strong ids now, ahead of the pass that needs them."""
        if self._strong is None:
            self._strong = np.flatnonzero(self.leads >= self.strong_lead)

    def low(self, ids: Ids) -> Floats:
        """Lower bounds of the noise of `ids`: float64[n]."""
        return lead_bounds()[0][self._leads_of(ids)]

    def low_of(self, token: int) -> float:
        """Lower bound of the noise of one id."""
        if self.drawn is not None:
            return float(lead_bounds()[0][self.drawn[token]])
        return float(self.low(np.array([token]))[0])

    def high(self, ids: Ids) -> Floats:
        """Upper bounds of the noise of `ids`: float64[n]."""
        return lead_bounds()[1][self._leads_of(ids)]

    def exact(self, ids: Ids) -> Floats:
        """The noise of `ids`: float64[n], bit for bit as `full` has it."""
        drawn = self._leads_of(ids)
        if len(ids) <= _FEW:
            # NumPy's fixed cost of the block function is that of about forty blocks of plain integers.
            numbers = [
                ((lead << _TAIL_BITS | self._tail(token)) + 0.5) * 2.0**-52
                for lead, token in zip(drawn.tolist(), ids.tolist(), strict=True)
            ]
            return _gumbel_of(np.array(numbers))
        wide = ids.astype(np.uint64)
        at = np.full(len(ids), self.position, dtype=np.uint64)
        four = np.uint64(4)
        return _gumbel_of(_uniform_of(drawn, _blocks(self.seed, wide // four, at, 1, wide % four)))

    def _tail(self, token: int) -> int:
        """The tail of one id, in plain integers."""
        a, b, c, d = token // 4, self.position, 1, 0
        for one, other in _round_keys(self.seed):
            product_a, product_c = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
            a, b = (product_c >> 64) ^ b ^ one, product_c & _MASK
            c, d = (product_a >> 64) ^ d ^ other, product_a & _MASK
        return (a, b, c, d)[token % 4] >> 64 - _TAIL_BITS

    def full(self) -> Floats:
        """The noise of all ids, as `gumbel` draws it: float64[vocabulary_size]; for fallbacks."""
        tails = _words(self.seed, DOMAIN, _TAILS | self.position << 64, len(self.leads))
        return _gumbel_of(_uniform_of(self.leads, tails))


class NoiseRows:
    """The noise of one session, by position, each position drawn at most once.

    Args:
        seed: seed of the session, unsigned 64 bits.
        vocabulary_size: number of ids.
        keep: largest number of positions held, at two bytes an id; the one drawn first is dropped first.
    """

    __slots__ = ("_keep", "_rows", "_seed", "_vocabulary_size")

    def __init__(self, seed: int, vocabulary_size: int, keep: int = 64) -> None:
        self._seed = seed
        self._vocabulary_size = vocabulary_size
        self._keep = max(1, keep)
        self._rows: dict[int, PositionNoise] = {}

    def at(self, position: int) -> PositionNoise:
        """The noise at `position`."""
        found = self._rows.get(position)
        return self._add(position) if found is None else found

    def draw_ahead(self, position: int) -> PositionNoise:
        """Draws the noise at `position` before it is needed; from any thread, beside any other call.

        Drawing releases the interpreter lock for the most part. Where two threads draw one position at the
        same time, both get equal noise.
        """
        noise = self.at(position)
        if noise.drawn is None:
            noise.draw()
        return noise

    def _add(self, position: int) -> PositionNoise:
        noise = PositionNoise(self._seed, position, self._vocabulary_size)
        # Single operations on a dict are atomic, and a copy of its keys is one operation.
        self._rows[position] = noise
        if len(self._rows) > self._keep:
            held = list(self._rows)
            for passed in held[: len(held) - self._keep]:
                self._rows.pop(passed, None)
        return noise

    def forget_before(self, position: int) -> None:
        """Drops the noise of positions below `position`."""
        for passed in list(self._rows):
            if passed < position:
                self._rows.pop(passed, None)

    def __len__(self) -> int:
        return len(self._rows)


def _uniform_of(drawn: NDArray[np.uint16], tails: NDArray[np.uint64]) -> Floats:
    """Uniform numbers of ids from their leads and the words that hold their tails; float64[n]."""
    bits = drawn.astype(np.uint64) << np.uint64(_TAIL_BITS)
    bits |= tails >> np.uint64(64 - _TAIL_BITS)
    # 52 bits fit a signed integer, whose conversion to float64 is exact and much faster.
    numbers = bits.view(np.int64).astype(np.float64)
    numbers += 0.5
    numbers *= 2.0**-52
    return numbers


def _gumbel_of(numbers: Floats) -> Floats:
    """Gumbel noise from uniform numbers, which it overwrites."""
    np.log(numbers, out=numbers)
    np.negative(numbers, out=numbers)
    np.log(numbers, out=numbers)
    np.negative(numbers, out=numbers)
    return numbers


_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_KEY_STEPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


@lru_cache(maxsize=1024)
def _round_keys(seed: int) -> tuple[tuple[int, int], ...]:
    """The key of each round of the block function."""
    steps = range(_ROUNDS)
    return tuple(((seed + n * _KEY_STEPS[0]) & _MASK, (DOMAIN + n * _KEY_STEPS[1]) & _MASK) for n in steps)


def _blocks(
    seed: int,
    first: NDArray[np.uint64],
    positions: NDArray[np.uint64],
    part: int,
    words: NDArray[np.uint64],
) -> NDArray[np.uint64]:
    """Word `words[i]` of the block with counter (first[i], positions[i], part, 0): uint64[n]."""
    a, b, c, d = first, positions, np.full(len(first), part, dtype=np.uint64), np.zeros_like(first)
    for one, other in _round_keys(seed):
        high_a, low_a = _multiply(a, _MULTIPLIERS[0])
        high_c, low_c = _multiply(c, _MULTIPLIERS[1])
        a, b, c, d = high_c ^ b ^ np.uint64(one), low_c, high_a ^ d ^ np.uint64(other), low_a
    return np.stack((a, b, c, d))[words.astype(np.intp), np.arange(len(first))]


def _multiply(words: NDArray[np.uint64], by: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """The upper and the lower 64 bits of each product."""
    low, high = words & _LOW, words >> _HALF
    by_low, by_high = np.uint64(by & 0xFFFFFFFF), np.uint64(by >> 32)
    carried = low * by_high + ((low * by_low) >> _HALF)
    middle = high * by_low + (carried & _LOW)
    return high * by_high + (carried >> _HALF) + (middle >> _HALF), words * np.uint64(by)


_IDLE: list[np.random.Philox] = []
"""Idle generators: making a generator takes longer than drawing a small vocabulary's noise."""


def _words(seed: int, domain: int, counter: int, count: int) -> NDArray[np.uint64]:
    """The first `count` output words from the 256-bit `counter` on; its lowest word counts blocks."""
    # NumPy steps its counter before the first block, so it starts one lower (wrapping below 0).
    before = counter - 1
    state: Any = {
        "bit_generator": "Philox",
        "state": {
            "counter": [(before >> shift) & _MASK for shift in (0, 64, 128, 192)],
            "key": [seed, domain],
        },
        "buffer": [0] * 4,
        "buffer_pos": 4,
        "has_uint32": 0,
        "uinteger": 0,
    }
    try:
        generator = _IDLE.pop()  # of two threads that draw at once, each gets its own
    except IndexError:
        generator = np.random.Philox(key=0)
    generator.state = state
    words = generator.random_raw(count)
    _IDLE.append(generator)
    return words
