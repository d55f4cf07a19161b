"""Rounds of chain drafting over places at which a drafter is right or wrong, and what they cost. Pure.

A chain's d-th token is accepted if the drafter is right at d places in a row. So along the target's own text
one list of right and wrong places decides the rounds of every draft length.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

DRAFT_COST = 0.15
"""Time of a drafter's pass over that of a target's pass of one row: the embedded pair's (docs/tune.md)."""
ROW_COSTS = ((1, 1.0), (4, 1.34), (8, 1.46), (16, 1.66), (50, 2.62))
"""Time of a target's pass by its rows, over that of one row: the embedded target's.

Up to 16 rows as `outrider bench packed_step` measured them (docs/tune.md), 50 as `outrider bench lookahead`
did (docs/figures/lookahead.md).
"""

Rounds = list[tuple[int, int]]
"""Drafted and accepted tokens of each round."""


def run_length(right: Sequence[bool], place: int, most: int) -> int:
    """Right places in a row from `place` on, at most `most`."""
    count = 0
    while count < most and place + count < len(right) and right[place + count]:
        count += 1
    return count


def rounds_of(right: Sequence[bool], length: int) -> Rounds:
    """The rounds of drafts of `length` tokens; each commits its accepted tokens and one more."""
    place, rounds = 0, []
    while place < len(right):
        drafted = min(length, len(right) - 1 - place)
        accepted = run_length(right, place, drafted)
        rounds.append((drafted, accepted))
        place += accepted + 1
    return rounds


def acceptance_length(rounds: Rounds) -> float:
    """Tokens per round."""
    return sum(accepted + 1 for _, accepted in rounds) / len(rounds)


def all_rounds(texts: Iterable[Sequence[bool]], length: int) -> Rounds:
    """The rounds of several texts."""
    return [each for right in texts for each in rounds_of(right, length)]


def acceptance_by_depth(texts: Sequence[Sequence[bool]], depth: int) -> list[tuple[int, int]]:
    """For each depth: how many drafts were right there, and how many were right up to there."""
    tried, held = [0] * depth, [0] * depth
    for right in texts:
        for drafted, accepted in rounds_of(right, depth):
            for at in range(min(drafted, accepted + 1)):
                tried[at] += 1
                held[at] += at < accepted
    return list(zip(held, tried, strict=True))


def independent_length(alpha: float, length: int) -> float:
    """Tokens per round if every drafted token is right with probability alpha, whatever came before."""
    return length + 1.0 if alpha >= 1 else (1 - alpha ** (length + 1)) / (1 - alpha)


def pass_cost(rows: int, *, is_free: bool = False) -> float:
    """Time of a target's pass over that of a pass of one row, between and beyond the places of ROW_COSTS.

    Args:
        is_free: whether further rows cost nothing, as in a target that is bound by reading its weights.
    """
    if is_free:
        return 1.0
    for (low, cost), (high, above) in pairwise(ROW_COSTS):
        if rows <= high:
            return cost + (above - cost) * (rows - low) / (high - low)
    (low, cost), (high, above) = ROW_COSTS[-2:]
    return above + (above - cost) * (rows - high) / (high - low)


def speed(rounds: Rounds, draft_cost: float = DRAFT_COST, *, is_free: bool = False) -> float:
    """Speed over plain decoding: tokens over the time of all rounds, drafts before passes."""
    cost = sum(pass_cost(drafted + 1, is_free=is_free) + draft_cost * drafted for drafted, _ in rounds)
    return sum(accepted + 1 for _, accepted in rounds) / cost
