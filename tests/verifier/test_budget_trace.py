"""The budget on a virtual clock: a load is replayed with plain decoding, all drafted nodes, and the budget.

Steps cost what a virtual machine says, with noise; sources claim more than they hold. What the engine would
decide is decided by the same pure parts.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random

import pytest

from outrider.lm.step_profile import PROFILED
from speculative.budget import allot
from speculative.calibration import Calibration
from verifier_service.engine.step_cost import StepCostModel

NODES = 8
Cost = Callable[[int], float]
Policy = Callable[[Sequence[Sequence[float]], int], list[int]]


def latency_bound(rows: int) -> float:
    """Rows are nearly free up to 64: a GPU at small batches."""
    return 10.0 + 0.4 * max(0, rows - 64) + 0.002 * rows


def compute_bound(rows: int) -> float:
    """Every row costs: the embedded pair on one core."""
    return 5.0 + 0.9 * rows


def stairs(rows: int) -> float:
    """Kernels work in tiles of eight rows."""
    return 6.0 + 2.0 * -(-rows // 8)


class Machine:
    """Sessions with chains of drafts on a virtual clock.

    Args:
        truth: probability that a drafted token is accepted given the one before; the source claims 0.9.
        noise: each step takes up to this share longer or shorter.
    """

    def __init__(self, cost: Cost, truth: float, seed: int, noise: float = 0.15) -> None:
        self.random = Random(seed)
        self.cost, self.truth, self.noise = cost, truth, noise
        self.costs = StepCostModel({rows: cost(rows) for rows in PROFILED})
        self.calibration = Calibration(strength=12, memory=200)  # as sessions have it

    def budget(self, survivals: Sequence[Sequence[float]], sessions: int) -> list[int]:
        nodes = sum(map(len, survivals))
        costs = self.costs.step_curve().between(sessions, sessions + nodes + 1)
        return allot(survivals, sessions, costs)

    def play(self, sessions: int, steps: int, policy: Policy | None) -> tuple[float, list[int]]:
        """Tokens per millisecond, and the nodes admitted in each step; without a policy, the budget."""
        policy = policy or self.budget
        tokens, spent, admitted = 0.0, 0.0, []
        for _ in range(steps):
            worth = self.calibration.worth(0.9)
            counts = policy([[worth**depth for depth in range(1, NODES + 1)]] * sessions, sessions)
            rows = sessions + sum(counts)
            took = self.cost(rows)
            spent += took
            self.costs.record(rows, took * self.random.uniform(1 - self.noise, 1 + self.noise))
            admitted.append(sum(counts))
            tokens += sum(expected(self.truth, count) for count in counts)
            for _ in range(sessions):
                self.verify()
        return tokens / spent, admitted

    def verify(self) -> None:
        """One session's round: every offered node below an accepted one is evidence, admitted or not."""
        for _ in range(NODES):
            hit = self.random.random() < self.truth
            self.calibration.saw(0.9, hit)
            if not hit:
                return


def expected(truth: float, nodes: int) -> float:
    """Tokens of a round with so many nodes in a chain."""
    return sum(truth**depth for depth in range(nodes + 1))


def plain(survivals: Sequence[Sequence[float]], sessions: int) -> list[int]:
    return [0] * sessions


def fixed(survivals: Sequence[Sequence[float]], sessions: int) -> list[int]:
    return [NODES] * sessions


def best_depth(cost: Cost, truth: float, sessions: int) -> float:
    """Tokens per millisecond of the best number of nodes that all sessions could have, known beforehand."""
    return max(sessions * expected(truth, nodes) / cost(sessions * (1 + nodes)) for nodes in range(NODES + 1))


@pytest.mark.parametrize("cost", [latency_bound, compute_bound, stairs])
@pytest.mark.parametrize("truth", [0.05, 0.5, 0.85])
@pytest.mark.parametrize("sessions", [1, 2, 4, 8, 16, 32])
def test_the_budget_keeps_up_with_the_better_of_plain_and_fixed(
    cost: Cost, truth: float, sessions: int
) -> None:
    steps = 3000 // sessions + 300
    machine = Machine(cost, truth, seed=sessions)
    machine.play(sessions, 100, None)
    rates = {name: machine.play(sessions, steps, how)[0] for name, how in POLICIES.items()}
    assert rates["budget"] >= 0.97 * max(rates["plain"], rates["fixed"])
    assert rates["budget"] >= 0.97 * best_depth(cost, truth, sessions)


POLICIES: dict[str, Policy | None] = {"plain": plain, "fixed": fixed, "budget": None}


def test_a_load_that_comes_and_goes_makes_the_budget_follow_and_not_swing() -> None:
    machine = Machine(latency_bound, truth=0.6, seed=1)
    machine.play(1, 200, None)
    means = []
    for sessions in (1, 8, 32, 64, 128, 64, 8, 1):
        _, admitted = machine.play(sessions, 150, None)
        settled = admitted[30:]
        switches = sum((before == 0) != (after == 0) for before, after in pairwise(settled))
        assert switches <= 6, f"{sessions} sessions: {settled}"
        means.append(sum(settled) / len(settled) / sessions)
    assert means[0] > 5, "alone, nearly all drafted nodes are admitted"
    assert means[4] < 1, "rows are dear at such a load"
    assert means[-1] == pytest.approx(means[0], rel=0.2), "and it comes back"


def test_a_source_that_turns_worthless_is_left_out_and_let_in_again() -> None:
    machine = Machine(compute_bound, truth=0.8, seed=2)
    machine.play(2, 400, None)
    machine.truth = 0.02
    assert sum(machine.play(2, 400, None)[1][-100:]) == 0
    machine.truth = 0.9
    assert sum(machine.play(2, 600, None)[1][-100:]) > 100
