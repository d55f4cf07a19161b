"""Ranks a node's possible children as the target will: the request's own parameters, the session's own noise.

The target takes argmax of processed log-probability + noise, and the noise at a position is the same on both
sides. So the best guesses from any logits are the tokens with the largest processed log-probability +
noise under those logits (Gumbel-coupled drafting, arXiv 2408.07978), greedy decoding being the case without
noise.

How likely is each? Target and drafter differ by some error in their logits, whatever the temperature. In
units of logits a score is `logit + temperature * noise`, so one constant, `scale`, serves every temperature:
survival is the softmax of these scores divided by it. The order of the children is exact. The softmax's sum
is an estimate: it takes the median noise of a lead for all but the children, and the mean of that where noise
is weak. A rough ranking takes the median for the children, too.

Knows nothing of trees, models or sessions.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from speculative.digest import HostDigest, RowDigest
from speculative.draft_law import params_within
from speculative.errors import EmptySupport
from speculative.history import History
from speculative.level_ranking import WIDEST, Children, level_children
from speculative.noise import Floats, Ids, NoiseRows, PositionNoise, lead_medians
from speculative.params import SamplingParams
from speculative.processed_digest import ProcessedDigest, Scored
from speculative.sampling import process_logits, trim

_HEADS = (64, 1024)
_SPARE = 4
_ROUGHLY = 1e-3
"""Probability below which a rough ranking looks for no child."""


class ChildRanker:
    """Ranks children by one session's parameters, noise and committed history.

    Args:
        width: number of logits in use: ids that both the target and the drafter have.
        bound: ids from here on are never drafted; at most `width`.
        children: most children of one node.
        scale: how far the target's logits stray from the drafter's, in logits.
        noise: shared noise of the session over `width` ids; None: the ranker draws its own noise.
        rough: whether small differences of noise may change the order. Where nothing but temperature shapes
            the logits and `width` is small, this takes a fraction of the time.
    """

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        ids: Sequence[int],
        prompt_length: int,
        *,
        width: int,
        bound: int,
        children: int,
        scale: float,
        noise: NoiseRows | None = None,
        rough: bool = False,
    ) -> None:
        self._params = params = params_within(params, width)
        self._history = History.of(ids, prompt_length)
        own = NoiseRows(seed, width) if noise is None else noise
        self._noise = None if params.greedy else own
        self._bound = bound
        self._most = children
        self._scale = scale
        self._rough = rough and params.plain_logits and not params.has_cuts and width <= WIDEST
        self.reads_path = params.reads_history

    def push(self, token: int) -> None:
        """Appends a committed id to the history."""
        self._history.extend([token])

    def forget_before(self, position: int) -> None:
        """Frees the noise of positions before `position`."""
        if self._noise is not None:
            self._noise.forget_before(position)

    def children(self, digest: RowDigest, position: int, path: Sequence[int]) -> list[tuple[int, float]]:
        """The likeliest tokens at a position, best first, each with its probability of being the target's.

        Args:
            digest: the model's output at position - 1: logits of the `width` ids in use.
            path: drafted tokens between the last committed one and this position, where `reads_path`.

        Raises:
            EmptySupport: NaN among the logits, or no token left.
        """
        highest = digest.highest()[1]
        if not math.isfinite(highest):
            raise EmptySupport(f"the largest of the drafter's {digest.vocabulary_size} logits is {highest}")
        if self._rough and isinstance(digest, HostDigest) and (rough := self._roughly(digest, position)):
            return rough
        history = self._history.with_path(path) if self.reads_path else self._history
        if self._noise is None:
            found = self._greedily(digest, history)
        else:
            noise = self._noise.at(position)
            found = self._sampled(digest, history, noise)
        return self._of_whole_row(digest, history, position) if found is None else found

    def _roughly(self, digest: HostDigest, position: int) -> Children:
        """Children by logits and the median noise of each lead; none where all tokens are about as likely."""
        noise = None if self._noise is None else self._noise.at(position)
        rows, temperature = digest.full()[None], self._params.temperature
        return level_children(rows, noise, temperature, self._scale, [_ROUGHLY], self._most, self._bound)[0]

    def _greedily(self, digest: RowDigest, history: History) -> Children | None:
        """Children by score alone; None where the digest does not suffice."""
        row = self._processed(digest, history, self._scale)
        listed = None if row is None else row.likeliest(self._most)
        if row is None or listed is None:
            return None
        drafted = listed.ids < self._bound
        ids, scores = listed.ids[drafted], listed.scores[drafted]
        reached = int(np.count_nonzero(scores >= listed.bound))
        mass = row.mass()
        if mass is None or (listed.bound > -math.inf and reached < self._most) or not len(ids):
            return None
        order = np.lexsort((ids, -scores))[: self._most]
        return _shares(ids[order], np.exp(scores[order] - row.reference), mass.total)

    def _sampled(self, digest: RowDigest, history: History, noise: PositionNoise) -> Children | None:
        """Children by score + noise; None where the digest does not suffice."""
        row = self._processed(digest, history, self._params.temperature)
        if row is None:
            return None
        if self._params.has_cuts:
            listed = _kept(row, self._params)
        else:
            listed = row.candidates(noise, None, _SPARE * self._most)
        if listed is None or not len(listed.ids):
            return None
        drafted = listed.ids < self._bound
        ids, scores = _by_noise(listed.ids[drafted], listed.scores[drafted], noise, self._most)
        if not len(ids) or (
            listed.bound > -math.inf and (len(ids) < self._most or scores[-1] < listed.bound)
        ):
            return None
        sharpness, best = self._params.temperature / self._scale, float(scores[0])
        weights = np.exp((scores - best) * sharpness)
        others = ~np.isin(listed.ids, ids)
        total = float(weights.sum()) + _sum_of(
            listed.ids[others], listed.scores[others], noise, best, sharpness
        )
        if listed.bound > -math.inf:
            spread = self._processed(digest, history, self._scale)
            rest = None if spread is None else _rest(row, spread, listed, noise, best, sharpness)
            if rest is None:
                return None
            total += rest
        return _shares(ids, weights, total)

    def _processed(self, digest: RowDigest, history: History, divisor: float) -> ProcessedDigest | None:
        if self._params.plain_logits:
            return ProcessedDigest(digest, divisor)
        return ProcessedDigest.of(digest, self._params, history, None, divisor)

    def _of_whole_row(self, digest: RowDigest, history: History, position: int) -> Children:
        """Children from the scores and the noise of all ids."""
        scores = process_logits(digest.full(), self._params, history)
        sharpness = 1 / self._scale
        if self._noise is not None:
            scores += self._noise.at(position).full()
            sharpness *= self._params.temperature
        weights = np.exp((scores - scores.max()) * sharpness)
        drafted = scores[: self._bound]
        least = np.partition(drafted, -self._most)[-self._most] if len(drafted) > self._most else -np.inf
        ids = np.flatnonzero((drafted >= least) & (drafted > -np.inf))
        ids = ids[np.lexsort((ids, -drafted[ids]))[: self._most]]
        return _shares(ids, weights[ids], float(weights.sum()))


def _shares(ids: Ids, weights: Floats, total: float) -> Children:
    return [(token, weight / total) for token, weight in zip(ids.tolist(), weights.tolist(), strict=True)]


def _kept(row: ProcessedDigest, params: SamplingParams) -> Scored | None:
    """All ids that the cuts keep, with the bound of none; None where they are not among the likeliest."""
    mass = row.mass() if params.top_p < 1 and not params.top_k else None
    for count in _HEADS:
        listed = row.likeliest(max(count, params.top_k))
        if listed is None:
            return None
        sure = listed.scores >= listed.bound
        ids, scores = listed.ids[sure], listed.scores[sure]
        order = np.lexsort((ids, -scores))
        ids, scores = ids[order], scores[order]
        whole = listed.bound == -math.inf
        if params.top_k:
            scores = trim(scores[: params.top_k], float(scores[0]), params)
            return Scored(ids[: len(scores)], scores, -math.inf)
        left = len(scores)
        if mass is not None:
            sums = np.cumsum(np.exp(scores - row.reference))
            left = min(left, int(sums.searchsorted(params.top_p * mass.total)) + 1)
            whole |= float(sums[-1]) >= params.top_p * mass.total
        if params.min_p > 0:
            likely = int(np.count_nonzero(np.exp(scores - scores[0]) >= params.min_p))
            whole |= likely < len(scores)
            left = min(left, likely)
        if whole:
            return Scored(ids[:left], scores[:left], -math.inf)
    return None


def _by_noise(ids: Ids, scores: Floats, noise: PositionNoise, most: int) -> tuple[Ids, Floats]:
    """The `most` ids of greatest score + noise, greatest first, with these sums."""
    low = scores + noise.low(ids)
    if len(ids) > most:
        level = np.partition(low, len(low) - most)[len(low) - most]
        close = np.flatnonzero(scores + noise.high(ids) >= level)
        ids, scores = ids[close], scores[close]
    sums = scores + noise.exact(ids)
    order = np.lexsort((ids, -sums))[:most]
    return ids[order], sums[order]


def _sum_of(ids: Ids, scores: Floats, noise: PositionNoise, best: float, sharpness: float) -> float:
    """The sum over `ids` of exp((score + noise - best) * sharpness), with the median noise of each lead."""
    return float(np.exp((scores + lead_medians()[noise.leads[ids]] - best) * sharpness).sum())


def _rest(
    row: ProcessedDigest,
    spread: ProcessedDigest,
    listed: Scored,
    noise: PositionNoise,
    best: float,
    sharpness: float,
) -> float | None:
    """About the same sum over all ids that are not listed; `spread` has scores over `scale`."""
    strong, mass = row.others(noise.strong), spread.mass()
    if strong is None or mass is None:
        return None
    unlisted = strong.scores + noise.high(strong.ids) < listed.bound
    found = _sum_of(strong.ids[unlisted], strong.scores[unlisted], noise, best, sharpness)
    weak = listed.scores[noise.leads[listed.ids] < noise.strong_lead]
    known = np.concatenate((strong.scores, weak)) * sharpness - spread.reference
    left = max(0.0, mass.total - float(np.exp(known).sum()))
    shift = math.exp(min(spread.reference - best * sharpness, 50.0))
    return found + left * shift * _weak_mean(sharpness, noise.strong_lead)


@lru_cache(maxsize=256)
def _weak_mean(sharpness: float, strong_lead: int) -> float:
    """The mean of exp(noise * sharpness) over weak noise; 0 where no noise is weak."""
    return float(np.exp(lead_medians()[:strong_lead] * sharpness).mean()) if strong_lead else 0.0
