"""The batch-wide budget, against the best of all possible allotments and on a replayed load."""

from itertools import product
from random import Random

import pytest

from speculative.budget import allot, least_survival, may_pay


def rate(survivals: list[list[float]], counts: tuple[int, ...], rows: int, cost: list[float]) -> float:
    gained = sum(sum(nodes[:count]) for nodes, count in zip(survivals, counts, strict=True))
    return (len(survivals) + gained) / cost[rows + sum(counts)]


@pytest.mark.parametrize("seed", range(40))
def test_no_other_allotment_makes_more_tokens_per_millisecond(seed: int) -> None:
    random = Random(seed)
    survivals = [
        sorted((random.random() for _ in range(random.randint(0, 4))), reverse=True) for _ in range(3)
    ]
    steps = [random.choice((0.0, 0.1, 0.5, 3.0)) for _ in range(20)]
    cost = [5.0 + sum(steps[:rows]) for rows in range(20)]
    counts = allot(survivals, committing=3, costs=cost[3:])
    best = max(
        rate(survivals, found, 3, cost) for found in product(*(range(len(nodes) + 1) for nodes in survivals))
    )
    assert rate(survivals, tuple(counts), 3, cost) == pytest.approx(best)


def test_rows_that_cost_nothing_are_all_taken() -> None:
    assert allot([[0.9, 0.01], [0.5]], committing=2, costs=[7.0] * 4) == [2, 1]


def test_nodes_that_do_not_pay_for_their_rows_are_left_out_to_the_last_one() -> None:
    assert allot([[0.3, 0.2], [0.4]], committing=2, costs=[2.0, 3.0, 4.0, 5.0]) == [0, 0]


def test_a_session_whose_drafts_are_worth_more_gets_more() -> None:
    cost = [0.0, 5.0, *(5.0 + 0.5 * rows for rows in range(1, 30))]
    many, few = allot([[0.9] * 6, [0.3, 0.2, 0.1, 0.05]], committing=2, costs=cost[2:])
    assert many == 6
    assert few < 4


def test_nodes_of_survival_zero_are_never_admitted() -> None:
    assert allot([[0.0, 0.0]], committing=1, costs=[1.0] * 3) == [0]


def test_a_dip_in_the_steps_per_second_hides_nothing_behind_it() -> None:
    """The second row makes a stair, and only five nodes together are worth climbing it."""
    assert allot([[0.8] * 5], committing=1, costs=[5.0] + [10.0] * 5) == [5]


def test_nodes_may_pay_where_rows_are_cheap_and_not_where_each_costs_as_much_as_a_token() -> None:
    assert may_pay(4, 2, 2, lambda rows: 10.0 + rows)
    assert not may_pay(4, 2, 2, lambda rows: 3.0 * rows)
    assert not may_pay(0, 2, 2, lambda rows: 10.0 + rows)
    assert may_pay(13, 1, 1, lambda rows: 5.0 + 5.0 * (1 < rows < 14)), "only all of them together"


@pytest.mark.parametrize("row_ms", [0.0, 0.1, 0.5, 2.0], ids=str)
def test_the_least_survival_parts_nodes_that_are_admitted_from_those_that_are_not(row_ms: float) -> None:
    def cost(rows: int) -> float:
        return 8.0 + row_ms * rows

    needed = least_survival(4.0, 4, cost, 8)
    for survival in (0.02, 0.1, 0.3, 0.6, 0.9):
        assert (allot([[survival]], 4, [cost(4), cost(5)]) == [1]) == (survival > needed)


def test_of_stairs_the_least_survival_sees_the_slope_and_not_the_tread() -> None:
    stairs = [5.0 + 4.0 * (rows // 8) for rows in range(40)]
    needed = [least_survival(2.0, rows, stairs.__getitem__, 8) for rows in range(1, 9)]
    assert min(needed) > 0.1
    assert max(needed) < 0.25


def test_without_nodes_or_sessions_nothing_is_allotted() -> None:
    assert allot([], committing=0, costs=[1.0]) == []
    assert allot([[], []], committing=2, costs=[1.0]) == [0, 0]


@pytest.mark.parametrize("seed", range(100))
def test_few_nodes_are_allotted_as_many_are(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = Random(seed)
    grid = (0.0, 0.1, 0.25, 0.5, 1.0)  # so that ties come, and nodes that are worth nothing
    survivals = [
        sorted((random.choice(grid) for _ in range(random.randint(0, 6))), reverse=True) for _ in range(4)
    ]
    most = sum(map(len, survivals))
    costs = [5.0 + sum(random.choice((0.0, 0.1, 0.5, 3.0)) for _ in range(n)) for n in range(most + 1)]
    committing, least_gain = random.randint(1, 4), random.choice((0.0, 0.08))
    few = allot(survivals, committing, costs, least_gain)
    monkeypatch.setattr("speculative.budget.FEW", -1)
    assert few == allot(survivals, committing, costs, least_gain)
