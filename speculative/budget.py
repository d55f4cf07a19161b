"""How many drafted nodes a step admits, over all sessions of the batch together.

Survival is the probability that a node's whole path is accepted, so the expected tokens of a step are one per
session that commits and the survivals of all admitted nodes. The nodes of all sessions are taken in falling
order of survival, and as many as make expected tokens per millisecond the most (TETRIS; the scheduler of
DSpark). None at all is a legal answer. Every number of nodes is looked at, so a dip in the steps per second
(kernels have stairs) hides nothing behind it: which nodes are admitted never changes the output, as the
target chooses each token by its own noise, whatever was drafted. Pure; knows nothing of time or of trees.
"""

from collections.abc import Callable, Sequence

StepCost = Callable[[int], float]
"""Milliseconds of a step of so many rows."""

_RISE = 1.0 + 1e-9
"""What one more node must gain at least: rounding is no gain."""


def allot(
    survivals: Sequence[Sequence[float]], committing: int, rows: int, cost: StepCost, least_gain: float = 0.0
) -> list[int]:
    """How many nodes of each session are admitted.

    Args:
        survivals: of each session's nodes, descending.
        committing: sessions that commit at least one token in this step.
        rows: of the step without any node, at least 1.
        cost: above 0, for `rows` and up to the number of nodes more.
        least_gain: the share by which nodes have to make it more than none would.
    """
    counts = [0] * len(survivals)
    order = sorted(
        (-survival, session) for session, nodes in enumerate(survivals) for survival in nodes if survival > 0
    )
    expected = float(committing)
    bare = best = expected / cost(rows)
    admitted = 0
    for count, (negative, _) in enumerate(order, start=1):
        expected -= negative
        rate = expected / cost(rows + count)
        if rate > best * _RISE:
            best, admitted = rate, count
    if best < bare * (1.0 + least_gain):
        return counts
    for _, session in order[:admitted]:
        counts[session] += 1
    return counts


def least_survival(expected: float, rows: int, cost: StepCost, more: int) -> float:
    """Survival that further nodes need to pay for their rows in a step of so many rows and expected tokens.

    Where steps get longer by stairs, what `more` (at least 1) nodes cost together says more than one's cost.
    """
    before = cost(rows)
    return max(0.0, expected / before * (cost(rows + more) - before) / more)


def may_pay(most: int, committing: int, rows: int, cost: StepCost) -> bool:
    """Whether up to `most` nodes could be worth their rows in the best case: all of them are accepted."""
    bare = committing / cost(rows)
    counts = {1 << bit for bit in range(most.bit_length())} | {most} - {0}
    return any((committing + count) / cost(rows + count) > bare * _RISE for count in counts)
