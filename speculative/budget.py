"""How many drafted nodes a step admits, over all sessions of the batch together.

Survival is the probability that a node's whole path is accepted. So the expected tokens of a step are one per
session that commits, and the survivals of all admitted nodes. The nodes of all sessions are taken in falling
order of survival, as many as maximise expected tokens per millisecond (TETRIS; the scheduler of DSpark).
None at all is a legal answer. Every number of nodes is tried, so a dip in the steps per second (kernels have
stairs) hides nothing behind it. The choice never changes the output: the target chooses each token by its own
noise, whatever was drafted. Pure: knows nothing of time or of trees.
"""

from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

StepCost = Callable[[int], float]
"""Milliseconds of a step, as a function of its rows."""

FEW = 64
"""Number of nodes up to which lists take less time than arrays."""

_RISE = 1.0 + 1e-9
"""Factor that more nodes must gain at least: rounding is no gain."""


def allot(
    survivals: Sequence[Sequence[float]],
    committing: int,
    costs: Sequence[float] | NDArray[np.float64],
    least_gain: float = 0.0,
) -> list[int]:
    """Number of nodes of each session that are admitted.

    Args:
        survivals: survivals of each session's nodes, descending.
        committing: sessions that commit at least one token in this step.
        costs: the step's cost in ms, above 0, by how many nodes the step has: of none, of one, up to all.
        least_gain: share by which nodes have to raise the tokens per millisecond above those without nodes.
    """
    count = sum(map(len, survivals))
    if count <= FEW:
        return _allot_few(survivals, committing, costs, least_gain)
    pooled = np.fromiter(chain.from_iterable(survivals), np.float64, count)
    # A stable sort: of equal survivals, those of the first session come first.
    order = np.argsort(-pooled, kind="stable")[: np.count_nonzero(pooled > 0)]
    expected = np.cumsum(np.concatenate(([float(committing)], pooled[order])))
    rates = expected / np.asarray(costs)[: len(expected)]
    # Of nearly equal rates the one of the fewest nodes is taken.
    admitted = int((rates * _RISE >= rates.max()).argmax())
    if admitted and rates[admitted] < rates[0] * (1.0 + least_gain):
        admitted = 0
    if not admitted:
        return [0] * len(survivals)
    owners = np.repeat(np.arange(len(survivals)), [len(nodes) for nodes in survivals])
    counted: list[int] = np.bincount(owners[order[:admitted]], minlength=len(survivals)).tolist()
    return counted


def _allot_few(
    survivals: Sequence[Sequence[float]],
    committing: int,
    costs: Sequence[float] | NDArray[np.float64],
    least_gain: float,
) -> list[int]:
    """The same as `allot`, without arrays."""
    nodes = [(-each, owner) for owner, own in enumerate(survivals) for each in own if each > 0]
    nodes.sort()  # of equal survivals, those of the first session come first
    expected = float(committing)
    rates = [expected / costs[0]]
    for (survival, _), cost in zip(nodes, costs[1:], strict=False):
        expected -= survival
        rates.append(expected / cost)
    best, counted = max(rates), [0] * len(survivals)
    admitted = next(at for at, rate in enumerate(rates) if rate * _RISE >= best)
    if rates[admitted] >= rates[0] * (1.0 + least_gain):
        for _, owner in nodes[:admitted]:
            counted[owner] += 1
    return counted


def least_survival(expected: float, rows: int, cost: StepCost, more: int) -> float:
    """Survival that further nodes need to pay for their rows, in a step of these rows and expected tokens.

    Step times rise by stairs, so the cost of `more` (at least 1) nodes together says more than that of one.
    """
    before = cost(rows)
    return max(0.0, expected / before * (cost(rows + more) - before) / more)


def may_pay(most: int, committing: int, rows: int, cost: StepCost) -> bool:
    """Whether up to `most` nodes could be worth their rows in the best case: all of them are accepted."""
    bare = committing / cost(rows)
    counts = {1 << bit for bit in range(most.bit_length())} | {most} - {0}
    return any((committing + count) / cost(rows + count) > bare * _RISE for count in counts)
