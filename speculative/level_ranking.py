"""Ranks the children of all nodes of one level at once, by the rule of `speculative.ranking`, but roughly.

Noise is taken as the median of its lead, and a small vocabulary's rows are read whole: a handful of calls for
all nodes of a level. `ChildRanker` takes some 0.3 ms a node for sampled requests. Its order is exact, and it
reads a part of a wide row. A draft needs no exact order: a wrong one costs speed alone.

Knows nothing of trees, models or sessions.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from speculative.errors import EmptySupport
from speculative.noise import PositionNoise, lead_medians

WIDEST = 16_384
"""The largest vocabulary whose rows are read whole."""

Children = list[tuple[int, float]]


def level_children(
    logits: NDArray[np.float32],
    noise: PositionNoise | None,
    temperature: float,
    scale: float,
    least: Sequence[float],
    most: int,
    bound: int | None = None,
) -> list[Children]:
    """The likeliest tokens behind each of some nodes, best first, each with its probability.

    Args:
        logits: the drafter's, ``[nodes, V]``; -inf for tokens that are never drafted.
        noise: noise of the children's position; None: the request is greedy.
        temperature: the request's temperature.
        scale: how far the target's logits stray from the drafter's, in logits.
        least: for each node, the probability below which a token is no child.
        most: most children of one node.
        bound: ids from here on are never drafted; None: all ids may be.

    Raises:
        EmptySupport: NaN among the logits, or no token left.
    """
    scores = logits
    if noise is not None:
        scores = logits + np.float32(temperature) * _medians()[noise.leads[: logits.shape[1]]]
    best = scores.max(axis=1, keepdims=True)
    if not np.isfinite(best).all():
        raise EmptySupport(f"the largest of the drafter's {logits.shape[1]} logits is {float(best.min())}")
    weights = np.exp((scores - best) * np.float32(1 / scale))
    weights /= weights.sum(axis=1, keepdims=True)
    nodes, tokens = np.nonzero(weights[:, :bound] >= np.asarray(least, np.float32)[:, None])
    children: list[Children] = [[] for _ in range(len(logits))]
    found = sorted(zip(nodes.tolist(), (-weights[nodes, tokens]).tolist(), tokens.tolist(), strict=True))
    for node, share, token in found:
        if len(children[node]) < most:
            children[node].append((token, -share))
    return children


@lru_cache(maxsize=1)
def _medians() -> NDArray[np.float32]:
    """`lead_medians` in single precision."""
    return lead_medians().astype(np.float32)
