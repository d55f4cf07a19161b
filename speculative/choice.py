"""The target's token from a row's digest: equal to `sample_token` of the whole row, which stays the rule.

Whatever the digest leaves open is decided by the rule on the whole row, and counted with its reason.
"""

import math
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from speculative.digest import Candidates, RowAsk, RowDigest
from speculative.history import History
from speculative.logprobs import Logprobs, TokenLogprob
from speculative.noise import Floats, Ids, PositionNoise
from speculative.params import SamplingParams
from speculative.processed_digest import ProcessedDigest, Scored
from speculative.sampling import Mask, changed_ids, holds_back, id_array, sample_token, trim

_NO_IDS, _NO_LOGITS = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)
_MOST_COUNT, _MORE = 256, 16
_ROUNDING = 1e-9
"""More than what the rule's own sums in float64 err by, as a share."""


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


def row_ask(
    params: SamplingParams, history: History, seed: int, position: int, logprobs: Logprobs | None = None
) -> RowAsk:
    """What `choose_token` will want of the digest of the row at `position`, so that a device computes that.

    Args:
        params, history: as for `sample_token`.
        seed: seed of the noise.
        position: absolute position of the token to choose.
        logprobs: log-probabilities asked for.
    """
    names = changed_ids(params, history)
    if holds_back(params, history):
        names.append(id_array(params.stop_ids))
    named = tuple(np.unique(np.concatenate(names)).tolist()) if names else ()
    top = 0 if logprobs is None else logprobs.listed
    if params.greedy:
        return RowAsk(seed, position, 0.0, named, top=top)
    if params.top_k:
        top = max(top, params.top_k + len(named))
    return RowAsk(seed, position, params.temperature, named, params.top_p < 1, top)


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


def digest_logprob(digest: RowDigest, token: int, top: int) -> TokenLogprob | None:
    """`token_logprob` of the row's logits; None where the digest does not tell it."""
    own = digest.at(np.array([token]))
    listed = digest.likeliest(top) if top else Candidates(_NO_IDS, _NO_LOGITS, math.inf)
    highest = digest.highest()[1]
    if own is None or listed is None or not math.isfinite(highest) or (log_sum := digest.log_sum()) is None:
        return None
    logprobs = listed.logits.astype(np.float64) - highest - log_sum
    order = np.lexsort((listed.ids, -logprobs))
    order = order[np.isfinite(logprobs[order])][:top]
    known = listed.bound == -math.inf or top == 0
    if not known and (len(order) < top or listed.logits[order].min() < listed.bound):
        return None
    own_logprob = float(own[0]) - highest - log_sum
    return TokenLogprob.of(own_logprob, listed.ids[order].tolist(), logprobs[order].tolist())


def _from_digest(
    digest: RowDigest,
    params: SamplingParams,
    history: History,
    noise: PositionNoise | None,
    allowed: Mask | None,
) -> int | Fallback:
    """The token, or why the digest does not tell it."""
    top, highest = digest.highest()
    if not math.isfinite(highest):
        return Fallback.NOT_FINITE
    if allowed is None and params.plain_logits:
        if params.greedy:
            return top
        return _sample(ProcessedDigest(digest, params.temperature), params, noise)
    temperature = 1.0 if params.greedy else params.temperature
    row = ProcessedDigest.of(digest, params, history, allowed, temperature)
    if row is None:
        return Fallback.NAMED
    return _greedily(row) if params.greedy else _sample(row, params, noise)


def _sample(row: ProcessedDigest, params: SamplingParams, noise: PositionNoise | None) -> int | Fallback:
    """The sampled token, or why the digest does not tell it."""
    assert noise is not None, f"temperature {params.temperature} needs the noise of the position"
    if not params.has_cuts:
        return _walk(row, noise, None)
    best = row.highest()
    if best is None:
        return Fallback.CONTENDERS
    if best[1] == -math.inf:
        return Fallback.NOT_FINITE
    if 0 < params.top_k < row.vocabulary_size:
        likeliest = row.likeliest(params.top_k)
        if likeliest is not None:
            return _of_likeliest(likeliest, best[1], params, noise)
    return _walk(row, noise, Cuts(row, params, best))


def _greedily(row: ProcessedDigest) -> int | Fallback:
    best = row.highest()
    if best is None:
        return Fallback.CONTENDERS
    return best[0] if best[1] > -math.inf else Fallback.NOT_FINITE


def _of_likeliest(
    found: Scored, highest: float, params: SamplingParams, noise: PositionNoise
) -> int | Fallback:
    """The token under top-k, whose ids are all known: the rule's own cuts on their scores alone."""
    order = np.lexsort((found.ids, -found.scores))[: params.top_k]
    ids, scores = found.ids[order], found.scores[order]
    # The rule sees dropped ids behind them, where fewer than k are left.
    descending = np.full(params.top_k, -np.inf)
    descending[: len(scores)] = scores
    left = len(trim(descending[::-1].copy()[::-1], highest, params))
    ids, scores = ids[:left], scores[:left]
    return int(ids[best_of(ids, scores, noise)[0]])


class Cuts:
    """Which ids top-k, top-p and min-p keep; every cut keeps the ids ranked before some id."""

    def __init__(self, row: ProcessedDigest, params: SamplingParams, best: tuple[int, float]) -> None:
        self._row = row
        self._params = params
        self.best = best
        self._rejected: tuple[int, float] | None = None

    def likely(self, ids: Ids, scores: Floats) -> NDArray[np.bool_]:
        """Which ids may be kept, as far as is known so far without sums: bool[n]."""
        left = np.ones(len(ids), dtype=np.bool_)
        if self._params.min_p > 0:
            left &= np.exp(scores - self.best[1]) >= self._params.min_p * (1 - _ROUNDING)
        if self._rejected is not None:
            token, score = self._rejected
            left &= (scores > score) | ((scores == score) & (ids < token))
        return left

    def keep(self, token: int, score: float) -> bool | None:
        """Whether an id is kept; None: it lies within the error of a sum, or a sum is not known."""
        if token == self.best[0]:
            return True
        verdicts = (self._top_k(token, score), self._min_p(score), self._top_p(token, score))
        if False in verdicts:
            self._rejected = token, score
            return False
        return None if None in verdicts else True

    def _top_k(self, token: int, score: float) -> bool | None:
        if not 0 < self._params.top_k < self._row.vocabulary_size:
            return True
        ranked = self._row.ranked_before(token, score)
        return None if ranked is None else ranked < self._params.top_k

    def _min_p(self, score: float) -> bool | None:
        if self._params.min_p == 0:
            return True
        weight = float(np.exp(score - self.best[1]))
        if abs(weight - self._params.min_p) <= _ROUNDING * weight:
            return None
        return weight >= self._params.min_p

    def _top_p(self, token: int, score: float) -> bool | None:
        """Whether the probability ranked before the id is below p."""
        if self._params.top_p == 1:
            return True
        if 0 < self._params.top_k < self._row.vocabulary_size:
            return None  # p of what top-k leaves
        total, before = self._row.mass(), self._row.mass_before(token, score)
        if total is None or before is None:
            return None
        over = before.total - self._params.top_p * total.total
        if abs(over) <= before.error + total.error + _ROUNDING * total.total:
            return None
        return over < 0


def _walk(row: ProcessedDigest, noise: PositionNoise, cuts: Cuts | None) -> int | Fallback:
    """The first id, by score + noise, that the cuts keep; adds candidates until that id is among them."""
    least: float | None = None
    count = 1
    while True:
        listed = row.candidates(noise, least, count)
        if listed is None:
            return Fallback.CONTENDERS
        found, reached = _first_kept(listed, noise, cuts)
        if found is not None:
            return found
        if listed.bound == -math.inf:
            return Fallback.NOT_FINITE
        if least is not None and listed.bound > least:
            return Fallback.CONTENDERS
        if reached > -math.inf:
            least = reached
        elif least is None and count < _MOST_COUNT:
            count *= _MORE
        else:
            # No cut and no mask drops the id ranked first, so that it, or an id that beats it, wins.
            best = row.highest() if cuts is None else cuts.best
            if best is None or (least is not None and least <= best[1] + noise.low_of(best[0])):
                return Fallback.CONTENDERS
            least = best[1] + noise.low_of(best[0])


def _first_kept(
    listed: Scored, noise: PositionNoise, cuts: Cuts | None
) -> tuple[int | Fallback | None, float]:
    """The first of the candidates, by score + noise, that the cuts keep, if no other id could win.

    Else None, and a score + noise that an id reaches which the cuts may keep.
    """
    ids, scores, bound = listed
    while True:
        if cuts is not None:
            likely = cuts.likely(ids, scores)
            ids, scores = ids[likely], scores[likely]
        if not len(ids):
            return None, -math.inf
        place, reached = best_of(ids, scores, noise)
        if reached < bound or reached == -math.inf:
            return None, reached
        token = int(ids[place])
        if cuts is None:
            return token, reached
        kept = cuts.keep(token, float(scores[place]))
        if kept is not False:
            return Fallback.CUT if kept is None else token, reached


def best_of(ids: Ids, scores: Floats, noise: PositionNoise) -> tuple[int, float]:
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
