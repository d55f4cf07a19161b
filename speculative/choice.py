"""The target's token from a row's digest: equal to `sample_token` of the whole row, which stays the rule.

Whatever the digest leaves open is decided by the rule on the whole row, and counted with its reason.
"""

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from speculative.digest import RowDigest
from speculative.history import History
from speculative.noise import Floats, Ids, PositionNoise
from speculative.params import SamplingParams
from speculative.sampling import Mask, sample_token


class Fallback(StrEnum):
    """Why a token was chosen from the whole row."""

    NOT_FINITE = "not_finite"
    """The row holds NaN or +inf, or nothing but -inf."""
    NAMED = "named"
    """The logits of ids that a bias, a penalty or a mask names are not known."""
    CONTENDERS = "contenders"
    """An id that is not listed could win."""
    CUT = "cut"
    """Whether top-k, top-p or min-p keeps an id lies within the error of a sum."""


@dataclass(slots=True)
class ChoiceCounts:
    """Number of tokens chosen, and of those that took the whole row, by reason; the engine adds these up."""

    tokens: int = 0
    fallbacks: Counter[Fallback] = field(default_factory=Counter)

    def add(self, other: "ChoiceCounts") -> None:
        """Adds the counts of another object."""
        self.tokens += other.tokens
        self.fallbacks.update(other.fallbacks)


def choose_token(
    digest: RowDigest,
    params: SamplingParams,
    history: History,
    noise: PositionNoise | None,
    allowed: Mask | None = None,
    counts: ChoiceCounts | None = None,
) -> int:
    """The target's token, `sample_token` of the whole row, from the row's digest where that suffices.

    Args:
        digest: the row of logits.
        params, history, allowed: as for `sample_token`.
        noise: noise of the token's position; not read when greedy.
        counts: counts the token, and the reason where the whole row was needed.

    Raises:
        EmptySupport: as for `sample_token`.
    """
    found = _from_digest(digest, params, history, noise, allowed)
    if counts is not None:
        counts.tokens += 1
        if isinstance(found, Fallback):
            counts.fallbacks[found] += 1
    if not isinstance(found, Fallback):
        return found
    row = None if params.greedy or noise is None else noise.full()
    return sample_token(digest.full(), params, history, row, allowed)


def _from_digest(
    digest: RowDigest,
    params: SamplingParams,
    history: History,
    noise: PositionNoise | None,
    allowed: Mask | None,
) -> int | Fallback:
    top, highest = digest.highest()
    if not np.isfinite(highest):
        return Fallback.NOT_FINITE
    if allowed is not None or not params.plain_logits:
        return Fallback.NAMED
    if params.greedy:
        return top
    if params.has_cuts:
        return Fallback.CUT
    assert noise is not None, f"temperature {params.temperature} needs the noise of the position"
    found = digest.candidates(params.temperature, noise)
    if found is None:
        return Fallback.CONTENDERS
    scores = np.divide(found.logits, params.temperature, dtype=np.float64)
    place, least = _best(found.ids, scores, noise)
    return int(found.ids[place]) if least >= found.bound else Fallback.CONTENDERS


def _best(ids: Ids, scores: Floats, noise: PositionNoise) -> tuple[int, float]:
    """The place of the id with the greatest score + noise, ties to the lowest id, and what it reaches."""
    low = scores + noise.low(ids)
    least = float(low.max())
    close = np.flatnonzero(scores + noise.high(ids) >= least)
    if len(close) == 1:
        return int(close[0]), least
    exact = scores[close] + noise.exact(ids[close])
    level = float(exact.max())
    among = close[exact == level]
    return int(among[ids[among].argmin()]), level
