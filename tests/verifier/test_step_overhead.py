"""What lies between two forwards is split into what sessions cost and what drafted nodes cost."""

import random

import pytest

from outrider.lm.step_profile import PROFILED
from verifier_service.engine.draft_budget import DecodingCost, DraftBudget
from verifier_service.engine.step_cost import StepCostModel, StepOverhead


def test_sessions_and_nodes_are_told_apart() -> None:
    chance, overhead = random.Random(0), StepOverhead()
    for _ in range(300):
        sessions, nodes = chance.randint(1, 8), chance.randint(0, 12)
        took_ms = 0.3 * sessions + 0.1 * nodes
        overhead.learn(took_ms * chance.uniform(0.9, 1.1), sessions, nodes)
    assert overhead.session_ms == pytest.approx(0.3, rel=0.1)
    assert overhead.node_ms == pytest.approx(0.1, rel=0.1)


def test_without_nodes_everything_is_the_sessions() -> None:
    overhead = StepOverhead()
    assert (overhead.session_ms, overhead.node_ms) == (0.0, 0.0)
    overhead.learn(2.0, 4, 0)
    assert (overhead.session_ms, overhead.node_ms) == (0.5, 0.0)


def test_where_nodes_are_always_as_many_as_sessions_neither_cost_is_negative() -> None:
    overhead = StepOverhead()
    for sessions in (1, 2, 3, 4) * 20:
        overhead.learn(0.4 * sessions, sessions, sessions)
    assert overhead.session_ms + overhead.node_ms == pytest.approx(0.4, rel=0.05)
    assert min(overhead.session_ms, overhead.node_ms) >= 0.0


def test_a_gap_that_was_interrupted_hardly_counts() -> None:
    overhead = StepOverhead()
    for _ in range(50):
        overhead.learn(0.5, 1, 0)
    overhead.learn(500.0, 1, 0)
    assert overhead.session_ms < 0.6


@pytest.mark.parametrize("nodes", [1, 2, 16])
def test_the_first_steps_of_a_process_do_not_make_nodes_dear(nodes: int) -> None:
    """Seen on fresh servers: a first gap of 20 ms counted as its two nodes', and none was admitted again."""
    costs = StepCostModel({rows: 1.0 + 0.01 * rows for rows in PROFILED})
    budget = DraftBudget(costs, adaptive=True)
    for gap_ms, drafted in ((20.0, nodes), (5.0, nodes), *[(2.0, 0)] * 40):
        costs.record_overhead(gap_ms, 1, drafted)
        assert budget.admit([[0.9] * 16], [(1, 1)]) == [16]


def test_half_of_the_first_steps_may_be_held_up() -> None:
    costs = StepCostModel({rows: 1.0 + 0.01 * rows for rows in PROFILED})
    budget = DraftBudget(costs, adaptive=True)
    for step in range(40):
        cold = step in (0, 2, 4, 6)
        costs.record_overhead(20.0 if cold else 2.0, 1, 2 if cold else 0)
        assert budget.admit([[0.9] * 16], [(1, 1)]) == [16]


def test_gaps_without_time_are_corrected_by_those_with_some() -> None:
    overhead = StepOverhead()
    for _ in range(20):
        overhead.learn(0.0, 1, 0)
    assert overhead.session_ms == 0.0
    for _ in range(200):
        overhead.learn(0.5, 1, 0)
    assert overhead.session_ms == pytest.approx(0.5, rel=0.05)


def test_what_nodes_cost_between_forwards_is_charged_to_them_and_not_to_the_prompt_beside_them() -> None:
    costs = StepCostModel({rows: 5.0 + 0.25 * rows for rows in PROFILED})
    for nodes in (0, 4) * 50:
        costs.record_overhead(1.0 + 0.5 * nodes, 1, nodes)
    plain, cost = costs.step_curve(1), DecodingCost(costs, bare=1, prefilled=0, sessions=1)
    assert cost(1) == pytest.approx(plain(1))
    assert cost(5) == pytest.approx(plain(5) + 4 * 0.5, rel=0.02)
    assert list(cost.between(1, 6)) == pytest.approx([cost(rows) for rows in range(1, 6)])
    beside = DecodingCost(costs, bare=61, prefilled=60, sessions=2)
    assert beside(65) - beside(61) == pytest.approx(4 * (0.25 + 0.5), rel=0.02)


def test_nodes_that_pay_for_their_rows_alone_are_left_out() -> None:
    costs = StepCostModel({rows: 1.0 + 0.1 * rows for rows in PROFILED})
    budget = DraftBudget(costs, adaptive=True)
    assert budget.admit([[0.3]], [(1, 1)]) == [1]
    for nodes in (0, 4) * 50:
        costs.record_overhead(0.1 + 0.4 * nodes, 1, nodes)
    assert budget.admit([[0.3]], [(1, 1)]) == [0]


def test_a_step_yields_its_tokens_in_its_time_and_a_row_is_worth_what_it_takes() -> None:
    budget = DraftBudget(StepCostModel({rows: 5.0 + 0.25 * rows for rows in PROFILED}), adaptive=True)
    found = budget.yield_of([(1, 1)], [0.8, 0.7])
    assert found.tokens_per_ms == pytest.approx(2.5 / 5.75)
    assert found.row_worth == pytest.approx(0.25 * 2.5 / 5.75)


def test_beside_a_prompt_a_proposer_pays_for_the_step_and_a_node_for_what_decoding_adds() -> None:
    costs = StepCostModel({rows: 5.0 + 0.25 * rows for rows in PROFILED})
    found = DraftBudget(costs, adaptive=True).yield_of([(1, 1), (400, 59)], [])
    assert found.tokens_per_ms == pytest.approx(1 / 20.0)
    assert found.row_worth == pytest.approx(1.0), "decoding adds one row, and a node adds another"
    assert DraftBudget(costs, adaptive=False).yield_of([(1, 1), (400, 59)], []).row_worth == 0.0


def test_before_a_step_was_measured_a_proposer_may_take_any_time() -> None:
    assert DraftBudget(StepCostModel(), adaptive=False).yield_of([(1, 1)], [0.5]) == (0.0, 0.0)
