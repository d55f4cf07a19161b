"""The distribution that a drafter draws from: rounded first, then drawn from, then sent; knows no models.

The rules that need q stay exact for any q, as long as a token was drawn from the very q that judges it. So a
drafter rounds its distribution before it draws. A quantised law has whole weights that sum to 65536: as
float64 its probabilities are exact, and 16 random bits choose an id with exactly its probability.

Rounding costs acceptance, never the law. Beside the likeliest `MOST_IDS` ids, renormalised, each probability
is off by at most 2**-17, the likeliest id's by at most 2**-11; total variation is below 2**-11.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from speculative.acceptance.drawn import DraftLaw
from speculative.errors import MalformedDraft
from speculative.history import History
from speculative.params import SamplingParams
from speculative.sampling import process_logits

UNIT = 1 << 16
"""Sum of the weights of a quantised law."""
MOST_IDS = 64
"""Ids that a drafter keeps of its distribution; a law from a peer may have up to 255."""
_WORD = 64

Whole = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class QuantisedLaw:
    """A distribution over few ids, in parts of 65536.

    Raises:
        MalformedDraft: ids that do not ascend from 0, or weights that are below 1 or do not sum to 65536.
    """

    ids: Whole
    """Distinct ids, ascending: int64[n], n at least 1."""
    weights: Whole
    """Weight of each id, at least 1; together 65536: int64[n]."""

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.weights) or not len(self.ids):
            raise MalformedDraft(f"q has {len(self.ids)} ids and {len(self.weights)} weights")
        if self.ids[0] < 0 or not bool((np.diff(self.ids) > 0).all()):
            raise MalformedDraft("q's ids do not ascend from 0; send each id once, in order")
        if self.weights.min() < 1 or self.weights.sum() != UNIT:
            raise MalformedDraft(
                f"q's weights sum to {self.weights.sum()} and are at least {self.weights.min()}; "
                f"they sum to {UNIT} and are at least 1"
            )

    @classmethod
    def of(cls, ids: Sequence[int], weights: Sequence[int]) -> "QuantisedLaw":
        """The law of these ids and weights. Raises MalformedDraft as the law itself does."""
        return cls(np.array(ids, dtype=np.int64), np.array(weights, dtype=np.int64))

    @property
    def law(self) -> DraftLaw:
        """The law with probabilities as float64, which hold them exactly."""
        return DraftLaw(self.ids, self.weights / UNIT)

    def has(self, token: int) -> bool:
        """Whether the token can be drawn."""
        place = int(np.searchsorted(self.ids, token))
        return place < len(self.ids) and int(self.ids[place]) == token

    def draw(self, count: int, words: Callable[[], int], *, distinct: bool) -> list[int]:
        """Draws tokens; where they are to be distinct, fewer if the support runs out.

        Args:
            words: gives independent uniform numbers of 64 bits. With replacement a token has exactly its
                probability; without, the probabilities of later draws are right to within 2**-48.
        """
        left, tokens = self.weights.copy(), list[int]()
        while len(tokens) < count and (total := int(left.sum())):
            place = int(np.searchsorted(np.cumsum(left), words() * total >> _WORD, side="right"))
            tokens.append(int(self.ids[place]))
            if distinct:
                left[place] = 0
        return tokens


def quantise(probabilities: NDArray[np.float64]) -> QuantisedLaw:
    """The law of the likeliest ids, ties to the lowest id; id 0 alone where every probability is 0.

    Args:
        probabilities: float64[V], at least 0; they need not sum to 1.
    """
    ids = np.flatnonzero(probabilities > 0)
    if not len(ids):
        # Any law will do. Without a law the window would end here, at an end that the drawn tokens decide.
        return QuantisedLaw(np.array([0]), np.array([UNIT]))
    if len(ids) > MOST_IDS:
        order = np.lexsort((ids, -probabilities[ids]))
        ids = np.sort(ids[order[:MOST_IDS]])
    shares = probabilities[ids]
    weights = np.rint(shares / shares.sum() * UNIT).astype(np.int64)
    likeliest = int(shares.argmax())
    weights[likeliest] += UNIT - weights.sum()
    kept = weights > 0
    return QuantisedLaw(ids[kept], weights[kept])


class DraftLaws:
    """The laws that one session's drafter draws from, by the request's own sampling parameters.

    Args:
        params: sampling parameters of the request.
        ids: committed ids, of which the first `prompt_length` are the prompt.
        width: number of logits in use: ids that both the target and the drafter have.
        bound: ids from here on are never drafted; at most `width`.
    """

    def __init__(
        self, params: SamplingParams, ids: Sequence[int], prompt_length: int, *, width: int, bound: int
    ) -> None:
        self._params = params_within(params, width)
        self._history = History.of(ids, prompt_length)
        self._bound = bound

    def push(self, tokens: Sequence[int]) -> None:
        """Appends committed ids to the history."""
        self._history.extend(tokens)

    def after(self, logits: NDArray[np.float32], path: Sequence[int]) -> QuantisedLaw:
        """The law of the token behind a drafted path.

        Args:
            logits: float32[width], the drafter's after the path.
            path: drafted tokens from below the last committed one.

        Raises:
            EmptySupport: NaN among the logits, or no id left.
        """
        scores = process_logits(logits, self._params, self._history.with_path(path))
        if self._params.greedy:
            token = int(scores.argmax())
            scores[:token] = scores[token + 1 :] = -np.inf
        weights = np.exp(scores - scores.max())
        weights[self._bound :] = 0.0
        return quantise(weights)


def params_within(params: SamplingParams, width: int) -> SamplingParams:
    """The parameters for a model of `width` logits: biases and stops of other ids change nothing there."""
    bias = tuple((token, bias) for token, bias in params.logit_bias if token < width)
    stops = tuple(token for token in params.stop_ids if token < width)
    if (bias, stops) == (params.logit_bias, params.stop_ids):
        return params
    return replace(params, logit_bias=bias, stop_ids=stops)
