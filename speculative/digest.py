"""What of one row of logits suffices to choose its token, wherever the row lies.

A model's pass leaves one row of float32 logits per wanted place. `choice` needs little of a row: its maximum,
the few ids that could win, now and then how much probability is ranked before an id. `RowDigest` is that
interface. `HostDigest` answers from a row in memory, and computes only what is asked for. A device computes
what a `RowAsk` names ahead, sends that down, and answers None to every other question; then `full` fetches
the row.

Order in this module: ids are *ranked* by (logit descending, id ascending).
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from speculative.noise import Floats, Ids, PositionNoise

Row = NDArray[np.float32]


class Candidates(NamedTuple):
    """Some ids of a row with their logits, and a bound on all ids that are left out."""

    ids: Ids
    """Distinct ids in any order: int64[n]."""
    logits: Row
    """The logit of each of `ids`: float32[n]."""
    bound: float
    """Every id that is left out has a logit, or a score, *below* this number; -inf: no id is left out."""


class Mass(NamedTuple):
    """A sum of exp((logit - highest logit) / temperature), and the most by which it can be wrong."""

    total: float
    error: float


@dataclass(frozen=True, slots=True)
class RowAsk:
    """What a device needs to know of a wanted row before its pass, to compute that row's digest."""

    seed: int = 0
    """Seed of the noise; not read when greedy."""
    position: int = 0
    """Absolute position of the token to choose, which is that of its noise."""
    temperature: float = 0.0
    """Temperature of the request; 0: greedy."""
    named: tuple[int, ...] = ()
    """Ids whose logits the host will want: biased, penalised, held back, a prompt's next token."""
    nucleus: bool = False
    """Whether top-p will ask how much probability is ranked before the candidates."""
    top: int = 0
    """Number of highest-ranked ids that the host will want: for top-k and for log-probabilities."""


class RowDigest(Protocol):
    """What of one row of logits suffices to choose its token; None wherever only the whole row could tell."""

    @property
    def vocabulary_size(self) -> int:
        """Number of ids of the row."""

    def highest(self) -> tuple[int, float]:
        """The id ranked first, and its logit; NaN where the row holds NaN, whatever else it holds."""

    def at(self, ids: Ids) -> Row | None:
        """The logits of `ids`: float32[n]."""

    def likeliest(self, count: int) -> Candidates | None:
        """At least the `count` ids ranked first, or all ids; `bound` is a logit."""

    def candidates(
        self, temperature: float, noise: PositionNoise, least: float | None = None, count: int = 1
    ) -> Candidates | None:
        """All ids whose score could reach `bound`, which is a score.

        A score is `np.divide(logit, temperature, dtype=float64) + noise`. The caller checks `bound`: where a
        digest knows a fixed number of ids, `bound` may be above `least`.

        Args:
            temperature: the request's, above 0.
            noise: noise of the row's position.
            least: the score that `bound` should not exceed; None: such a score that the `count` ids of
                greatest score are among the candidates.
            count: number of ids of greatest score that are wanted; read where `least` is None.
        """

    def mass(self, temperature: float) -> Mass | None:
        """The sum over all ids, relative to the highest logit."""

    def log_sum(self) -> float | None:
        """The logarithm of the sum of exp(logit - highest logit) over all ids, summed in float64."""

    def mass_before(self, temperature: float, token: int, logit: float) -> Mass | None:
        """The sum over the ids ranked before an id `token` with the logit `logit`, on the scale of `mass`.

        `logit` is a float32 number. It need not be the logit of `token`, which a penalty may have changed.
        """

    def ranked_before(self, token: int, logit: float) -> int | None:
        """The number of ids ranked before an id `token` with the logit `logit`, as in `mass_before`."""

    def full(self) -> Row:
        """The whole row, float32[V], read-only for the caller; a device fetches the row and counts it."""


class HostDigest:
    """The digest of a row in memory; nothing is computed before it is asked for, and the row is not copied.

    Args:
        row: logits, float32[V]; they must not change as long as the digest is in use.
        address: where the logits lie in memory, one behind the other; 0: not known.
    """

    __slots__ = ("_highest", "_row", "_weights", "address")

    def __init__(self, row: Row, address: int = 0) -> None:
        self._row = row
        self.address = address
        self._highest: tuple[int, float] | None = None
        self._weights: tuple[float, Row, float, Mass] | None = None

    @property
    def vocabulary_size(self) -> int:
        """Number of ids of the row."""
        return len(self._row)

    def highest(self) -> tuple[int, float]:
        """The id ranked first, and its logit; NaN where the row holds NaN."""
        if self._highest is None:
            # NumPy's argmax returns the first NaN where there is one, and the first of equals.
            token = int(self._row.argmax())
            self._highest = token, float(self._row[token])
        return self._highest

    def at(self, ids: Ids) -> Row:
        """The logits of `ids`: float32[n]."""
        return self._row[ids]

    def full(self) -> Row:
        """The row itself: float32[V]."""
        return self._row

    def likeliest(self, count: int) -> Candidates:
        """At least the `count` ids ranked first, or all ids; costs two reads of the row."""
        row, size = self._row, len(self._row)
        if count >= size:
            return Candidates(np.arange(size), row, -math.inf)
        groups = size // _GROUP
        if count <= groups // 2:
            # The maxima of `count` groups reach the level, so at least that number of ids does.
            level = _level(row[: groups * _GROUP].reshape(_GROUP, groups).max(axis=0), count)
        else:
            level = _level(row, count)
        ids = np.flatnonzero(row >= level)
        return Candidates(ids, row[ids], level)

    def candidates(
        self, temperature: float, noise: PositionNoise, least: float | None = None, count: int = 1
    ) -> Candidates:
        """All ids whose score could reach `least`, which is the bound.

        Only two kinds of ids can: those with strong noise, and those whose logit lies within a band below the
        maximum. A flat row needs no band, and a peaked one has few ids in it.
        """
        highest = self.highest()[1]
        strong = noise.strong
        logits = self._row[strong]
        scores = np.divide(logits, temperature, dtype=np.float64)
        if least is None:
            least = self._least(scores + noise.strong_low, temperature, noise, count)
        scores += noise.strong_high
        listed = np.flatnonzero(scores >= least)
        ids, logits = strong[listed], logits[listed]
        floor = _floor(least, temperature, noise.weak_high)
        if floor <= highest:
            band = np.flatnonzero(self._row >= floor)
            band = band[noise.leads[band] < noise.strong_lead]
            found = self._row[band]
            reach = np.divide(found, temperature, dtype=np.float64) + noise.high(band) >= least
            ids, logits = np.concatenate((ids, band[reach])), np.concatenate((logits, found[reach]))
        return Candidates(ids, logits, least)

    def _least(self, low: Floats, temperature: float, noise: PositionNoise, count: int) -> float:
        """A score that at least `count` ids reach; `low` are the lowest scores of the ids of strong noise."""
        if count > len(low):
            return -math.inf
        if count > 1:
            return float(np.partition(low, len(low) - count)[len(low) - count])
        top, highest = self.highest()
        return max(highest / temperature + noise.low_of(top), float(low.max()))

    def mass(self, temperature: float) -> Mass:
        """The sum over all ids, relative to the highest logit, in float32."""
        return self._relative(temperature)[2]

    def log_sum(self) -> float:
        """The logarithm of the sum of exp(logit - highest logit) over all ids; bits as `token_logprob`'s."""
        exponents = self._row.astype(np.float64)
        exponents -= self.highest()[1]
        return math.log(float(np.exp(exponents, out=exponents).sum()))

    def mass_before(self, temperature: float, token: int, logit: float) -> Mass:
        """The sum over the ids ranked before `token`."""
        weights, scale, mass = self._relative(temperature)
        ranked = self._row > logit
        if np.count_nonzero(ranked) < len(weights) // _SPARSE:
            before = float(weights[np.flatnonzero(ranked)].sum())
        else:
            above = ranked.astype(np.float32)
            above *= weights
            before = _sum(above)
        before += float(weights[:token][self._row[:token] == logit].sum())
        return Mass(before * scale, mass.error)

    def ranked_before(self, token: int, logit: float) -> int:
        """The number of ids ranked before `token`."""
        above = int(np.count_nonzero(self._row > logit))
        return above + int(np.count_nonzero(self._row[:token] == logit))

    def _relative(self, temperature: float) -> tuple[Row, float, Mass]:
        """Weights of all ids, float32[V], a factor that makes them relative, and the sum over all ids.

        An id's weight by the factor is exp((logit - highest) / temperature).
        """
        if self._weights is None or self._weights[0] != temperature:
            highest, inverse = self.highest()[1], float(np.float32(1 / temperature))
            shift = 0.0 if -_MOST_EXPONENT / 2 <= highest * inverse <= _MOST_EXPONENT else highest
            with np.errstate(over="ignore", under="ignore"):
                # Subtracting the highest costs a pass over the row, and is left out where nothing overflows.
                weights = self._row - np.float32(shift) if shift else self._row * np.float32(inverse)
                if shift:
                    weights *= np.float32(inverse)
                np.exp(weights, out=weights)
            scale = math.exp((shift - highest) * inverse)
            total = _sum(weights) * scale
            mass = Mass(total, total * relative_error(len(weights)))
            self._weights = temperature, weights, scale, mass
        return self._weights[1:]


def relative_error(count: int) -> float:
    """The most by which a sum of `count` exponentials errs, as a share of the sum, in `HostDigest`.

    In units of float32's rounding: a difference, a factor and their product err by three units of an exponent
    whose weighted mean is at most log(count), or of one up to 60 where the highest is not subtracted; an
    exponential errs by four; `_sum` by 96 for its columns, by 16 for the blocks of NumPy's pairwise sum, and
    by one for each doubling. What the rule itself errs in float64 is far below one unit.
    """
    return 2.0**-24 * (6 * math.log(count + 1) + 3 * _MOST_EXPONENT + 120)


def _sum(values: Row) -> float:
    """The sum of float32 numbers: by columns first, which is much faster than NumPy's sum of a long row."""
    columns = len(values) // _SUM_ROWS
    if columns < _SUM_ROWS:
        return float(values.sum())
    whole = columns * _SUM_ROWS
    sums = np.add.reduce(values[:whole].reshape(_SUM_ROWS, columns), axis=0)
    return float(sums.sum()) + float(values[whole:].sum())


def _level(values: Row, count: int) -> float:
    """The greatest number that `count` of the values reach; NaN is above all others."""
    # NumPy's partition takes a hundred times as long where many numbers are equal, as those of a cut row are.
    left = values[~(values == -np.inf)]
    return float(np.partition(left, -count)[-count]) if count <= len(left) else -math.inf


def weak_floors(least: Floats, temperatures: Floats, weak_high: float) -> NDArray[np.float32]:
    """For each row, float32[n]: no id with a smaller logit, and with noise up to `weak_high`, scores `least`.

    `least` and `temperatures` are float64[n].
    """
    if weak_high == -math.inf:
        return np.full(len(least), np.inf, dtype=np.float32)
    margin = least - weak_high - 2.0**-20 * (np.abs(least) + abs(weak_high))
    floor = (margin - 2.0**-20 * np.abs(margin)) * temperatures
    return np.clip(floor, -_MOST, _MOST).astype(np.float32)


def _floor(least: float, temperature: float, weak_high: float) -> float:
    """`weak_floors` of a single row, with plain numbers, which are many times quicker."""
    if weak_high == -math.inf:
        return math.inf
    margin = least - weak_high - 2.0**-20 * (abs(least) + abs(weak_high))
    floor = (margin - 2.0**-20 * abs(margin)) * temperature
    return float(np.float32(min(max(floor, -_MOST), _MOST)))


_GROUP = 16
_SUM_ROWS = 96
_SPARSE = 64
_MOST_EXPONENT = 60.0
_MOST = float(np.finfo(np.float32).max)
