"""The check that every digest has to pass: the token chosen from it is that of the rule on the whole row.

`check` is for any implementation of `RowDigest`: give it a function from a row and what is asked of it to a
digest.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from speculative.choice import ChoiceCounts, choose_token, row_ask
from speculative.digest import Candidates, HostDigest, Mass, Row, RowAsk, RowDigest
from speculative.errors import EmptySupport
from speculative.history import History
from speculative.noise import Ids, PositionNoise
from speculative.params import SamplingParams
from speculative.sampling import Mask, sample_token

MakeDigest = Callable[[Row, RowAsk], RowDigest]
SIZES = (1, 2, 3, 5, 15, 16, 17, 33, 100, 511, 512, 513, 700, 1000, 2049, 5000)


@dataclass(frozen=True)
class Case:
    """One choice: a row, and everything else that the rule reads."""

    row: Row
    params: SamplingParams
    history: History
    seed: int
    position: int
    allowed: Mask | None

    def by_the_rule(self) -> int | str:
        """The token, or the text of the error."""
        noise = None if self.params.greedy else self.noise.full()
        # The rule takes differences of infinities where a row holds them, and then refuses the row.
        with np.errstate(over="ignore", invalid="ignore"):
            return outcome(lambda: sample_token(self.row, self.params, self.history, noise, self.allowed))

    @property
    def noise(self) -> PositionNoise:
        """Noise of the position."""
        return PositionNoise(self.seed, self.position, len(self.row))


def check(make: MakeDigest, case: Case) -> ChoiceCounts:
    """Asserts that the digest's token is the rule's; returns what was counted."""
    counts = ChoiceCounts()
    ask = row_ask(case.params, case.history, case.seed, case.position)
    row = case.row.copy()
    noise = None if case.params.greedy else case.noise
    with np.errstate(over="ignore", invalid="ignore"):
        digest = make(row, ask)
        found = outcome(lambda: choose_token(digest, case.params, case.history, noise, case.allowed, counts))
    assert found == case.by_the_rule(), counts
    assert counts.tokens == 1
    assert row.tobytes() == case.row.tobytes(), "the row stays as it is"
    return counts


def outcome(choose: Callable[[], int]) -> int | str:
    """The token that `choose` returns, or the text of its error."""
    try:
        return choose()
    except EmptySupport as error:
        return str(error)


@st.composite
def rows(draw: st.DrawFn) -> Row:
    """Rows of all sizes and shapes: flat, peaked, on a grid as of bfloat16, with -inf, NaN and extremes."""
    size = draw(st.sampled_from(SIZES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    row: NDArray[Any] = rng.normal(size=size) * draw(st.sampled_from([0.0, 0.1, 1.0, 3.0, 10.0, 40.0]))
    if draw(st.booleans()):  # a head above a flat rest
        row[rng.integers(0, size, max(1, size // 50))] += rng.exponential(4.0) + 4
    row = row.astype(np.float32)
    if draw(st.booleans()):  # the grid of bfloat16, so that ties are common
        row = (row.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    if draw(st.integers(0, 4)) == 0:
        row[rng.random(size) < draw(st.sampled_from([0.01, 0.5, 0.99, 1.0]))] = -np.inf
    if draw(st.integers(0, 9)) == 0:
        row[rng.integers(0, size)] = draw(st.sampled_from([np.nan, np.inf, -np.inf, 3.4e38, -3.4e38]))
    return row


@st.composite
def params(draw: st.DrawFn, size: int) -> SamplingParams:
    """Parameters with every field at its default or not."""
    fields: dict[str, Any] = {
        "temperature": draw(st.sampled_from([0.0, 1e-5, 0.01, 0.3, 0.8, 1.0, 1.7, 30.0, 100.0]))
    }
    values: dict[str, list[Any]] = {
        "top_k": [1, 2, 5, 40, 300, size],
        "top_p": [1e-6, 0.1, 0.5, 0.9, 0.99, 0.999999],
        "min_p": [1e-6, 0.02, 0.1, 0.5, 1.0],
        "repetition_penalty": [0.01, 0.8, 1.2, 100.0],
        "presence_penalty": [-100.0, -1.0, 1.0, 100.0],
        "frequency_penalty": [-1.0, 0.3, 1.0],
    }
    for name, possible in values.items():
        if draw(st.integers(0, 3)) == 0:
            fields[name] = draw(st.sampled_from(possible))
    ids = st.integers(0, size - 1)
    if draw(st.integers(0, 3)) == 0:
        bias = st.sampled_from([-100.0, -1.0, 0.0, 2.0, 100.0])
        fields["logit_bias"] = tuple(draw(st.dictionaries(ids, bias, min_size=1, max_size=20)).items())
    if draw(st.integers(0, 3)) == 0:
        fields["min_tokens"] = 5
        fields["stop_ids"] = tuple(draw(st.sets(ids, min_size=1, max_size=8)))
    return SamplingParams(**fields)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any choice."""
    row = draw(rows())
    size = len(row)
    ids = draw(st.lists(st.integers(0, size - 1), max_size=30))
    allowed = None
    if draw(st.integers(0, 2)) == 0:
        share = draw(st.sampled_from([0.0, 0.001, 0.05, 0.5, 0.9, 0.999, 1.0]))
        allowed = np.random.default_rng(draw(st.integers(0, 2**32))).random(size) < share
    return Case(
        row,
        draw(params(size)),
        History.of(ids, draw(st.integers(0, len(ids)))),
        draw(st.integers(0, 2**64 - 1)),
        draw(st.integers(0, 2**40)),
        allowed,
    )


@dataclass(frozen=True)
class Capacities:
    """How much a device's digest holds."""

    named: int
    likeliest: int
    candidates: int
    sums: bool
    error: float


class NarrowDigest:
    """A digest that holds what a device sends down, and not one number more; it counts fetched rows."""

    def __init__(self, row: Row, ask: RowAsk, capacities: Capacities) -> None:
        self._host = HostDigest(row)
        self._ask = ask
        self._capacities = capacities
        self._listed: set[int] = set()
        self.fetched = 0

    @property
    def vocabulary_size(self) -> int:
        return self._host.vocabulary_size

    def highest(self) -> tuple[int, float]:
        return self._host.highest()

    def at(self, ids: Ids) -> Row | None:
        known = set(self._ask.named[: self._capacities.named])
        return self._host.at(ids) if known.issuperset(ids.tolist()) else None

    def likeliest(self, count: int) -> Candidates | None:
        if count > min(self._capacities.likeliest, self.vocabulary_size):
            return None
        order = np.lexsort((np.arange(self.vocabulary_size), -self._host.full()))
        kept = order[: self._capacities.likeliest]
        row = self._host.full()
        # Ids outside may equal the last one inside.
        bound = math.nextafter(float(row[kept[-1]]), math.inf) if len(kept) < len(row) else -math.inf
        return Candidates(kept, row[kept], bound) if np.sum(row[kept] >= bound) >= count else None

    def candidates(
        self, temperature: float, noise: PositionNoise, least: float | None = None, count: int = 1
    ) -> Candidates | None:
        assert temperature == self._ask.temperature
        assert (noise.seed, noise.position) == (self._ask.seed, self._ask.position)
        row = self._host.full()
        every = np.arange(len(row))
        high = np.divide(row, temperature, dtype=np.float64) + noise.high(every)
        order = np.argsort(-high, kind="stable")
        kept = order[: self._capacities.candidates]
        if not len(kept):
            return None
        self._listed.update(kept.tolist())
        bound = math.nextafter(float(high[order[len(kept)]]), math.inf) if len(kept) < len(row) else -math.inf
        return Candidates(kept, row[kept], bound)

    def mass(self, temperature: float) -> Mass | None:
        if not (self._ask.nucleus and self._capacities.sums):
            return None
        total, error = self._host.mass(temperature)
        return Mass(total * (1 + self._capacities.error), error + total * self._capacities.error)

    def log_sum(self) -> float | None:
        return self._host.log_sum() if self._capacities.sums else None

    def mass_before(self, temperature: float, token: int, logit: float) -> Mass | None:
        if not (self._ask.nucleus and self._known(token, logit)):
            return None
        total, error = self._host.mass_before(temperature, token, logit)
        whole = self._host.mass(temperature).total
        return Mass(total - whole * self._capacities.error, error + whole * self._capacities.error)

    def ranked_before(self, token: int, logit: float) -> int | None:
        return self._host.ranked_before(token, logit) if self._known(token, logit) else None

    def _known(self, token: int, logit: float) -> bool:
        listed = token in self._listed and float(self._host.full()[token]) == logit
        return listed and self._capacities.sums

    def full(self) -> Row:
        self.fetched += 1
        return self._host.full()
