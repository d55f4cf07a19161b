"""Ranks a node's possible children as the target will: the request's own parameters, the session's own noise.

The target takes argmax of processed log-probability + noise, and the noise at a position is the same on both
sides. So the drafter's best guesses are the tokens with the largest processed log-probability + noise under
its own logits (Gumbel-coupled drafting, arXiv 2408.07978), greedy decoding being the case without noise.

How likely is each? Target and drafter differ by some error in their logits, whatever the temperature. In
units of logits a score is `logit + temperature * noise`, so one constant, `Growth.scale`, serves every
temperature: survival is the softmax of these scores divided by it.

Knows nothing of trees, models or sessions.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drafter_service.draft_tree import Growth
from speculative.errors import EmptySupport
from speculative.history import History
from speculative.noise import NoiseRows
from speculative.params import SamplingParams
from speculative.sampling import process_logits

Scores = NDArray[np.floating[Any]]


class ChildRanker:
    """Ranks children by one session's parameters, noise and committed history.

    Args:
        width: number of logits in use: ids that both the target and the drafter have.
        bound: ids from here on are never drafted; at most `width`.
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
        growth: Growth,
    ) -> None:
        # Biases and stops of ids that the drafter has no logits for change nothing here.
        bias = tuple((token, bias) for token, bias in params.logit_bias if token < width)
        stops = tuple(token for token in params.stop_ids if token < width)
        if (bias, stops) != (params.logit_bias, params.stop_ids):
            params = replace(params, logit_bias=bias, stop_ids=stops)
        self._params = params
        self._history = History.of(ids, prompt_length)
        self._noise = None if params.greedy else NoiseRows(seed, width)
        self._width = width
        self._bound = bound
        self._most = growth.children
        self._sharpness = (1.0 if params.greedy else params.temperature) / growth.scale
        self.reads_path = params.reads_history

    def push(self, token: int) -> None:
        """Appends a committed id to the history."""
        self._history.extend([token])

    def forget_before(self, position: int) -> None:
        """Frees the noise of positions before `position`."""
        if self._noise is not None:
            self._noise.forget_before(position)

    def children(
        self, logits: NDArray[np.float32], position: int, path: Sequence[int]
    ) -> list[tuple[int, float]]:
        """The likeliest tokens at a position, best first, each with its probability of being the target's.

        Args:
            logits: float32[own vocabulary], the model's output at position - 1.
            path: drafted tokens between the last committed one and this position, where `reads_path`.

        Raises:
            EmptySupport: NaN among the logits, or no token left.
        """
        scores = self._scores(logits[: self._width], position, path)
        top = float(scores.max())
        if not math.isfinite(top):
            raise EmptySupport(f"the largest of the drafter's {len(scores)} scores is {top}")
        weights = np.exp((scores - top) * self._sharpness)
        total = float(weights.sum())
        return [(token, float(weights[token]) / total) for token in self._largest(scores[: self._bound])]

    def _scores(self, logits: NDArray[np.float32], position: int, path: Sequence[int]) -> Scores:
        """Scores of all ids in a new array; float32 if only their order matters."""
        params = self._params
        if not params.plain_logits or (params.has_cuts and self._noise is not None):
            history = self._history.with_path(path) if self.reads_path else self._history
            scores: Scores = process_logits(logits, params, history)
        elif self._noise is None:
            return logits.copy()
        else:
            scores = np.divide(logits, params.temperature, dtype=np.float64)
        if self._noise is not None:
            scores += self._noise.at(position).full()
        return scores

    def _largest(self, scores: Scores) -> list[int]:
        """Ids of the largest scores, ties to the lowest id. Overwrites the scores: passes beat any sort."""
        chosen: list[int] = []
        for _ in range(min(self._most, len(scores))):
            token = int(scores.argmax())
            if scores[token] == -np.inf:
                break
            chosen.append(token)
            scores[token] = -np.inf
        return chosen
