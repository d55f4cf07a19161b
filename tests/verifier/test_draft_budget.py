"""Drafted nodes against their rows: by themselves, and beside prompts that have to be computed anyway."""

import pytest

from outrider.lm.step_profile import PROFILED, StepProfile
from verifier_service.engine.draft_budget import DecodingCost, DraftBudget, DraftRests
from verifier_service.engine.step_cost import StepCostModel, StepCurve

STEADY = {rows: 5.0 + 0.25 * rows for rows in PROFILED}
"""A step's milliseconds by its rows: mostly its own until there are many."""
SURE = [0.9, 0.8, 0.7, 0.6]


def budget(adaptive: bool = True, row_ms: float = 0.25) -> DraftBudget:
    return DraftBudget(StepCostModel({rows: 5.0 + row_ms * rows for rows in STEADY}), adaptive)


def test_a_session_alone_is_given_what_shares_the_steps_own_time() -> None:
    assert budget().admit([SURE], [(1, 1)]) == [4]
    assert budget().asks_for_drafts([(1, 1)], [16])


@pytest.mark.parametrize("adaptive", [True, False])
def test_a_step_has_no_more_rows_than_the_most_and_keeps_the_likeliest_nodes(adaptive: bool) -> None:
    costs = StepCostModel({rows: 5.0 + 0.01 * rows for rows in STEADY})
    rankings, taking = [[0.9, 0.8, 0.7], [0.95, 0.75], []], [(1, 1)] * 3

    def admitted(most_rows: int | None) -> list[int]:
        return DraftBudget(costs, adaptive, most_rows).admit(rankings, taking)

    assert admitted(None) == admitted(8) == [3, 2, 0]
    assert admitted(7) == [2, 2, 0]
    assert admitted(6) == [2, 1, 0]
    assert admitted(4) == [0, 1, 0]
    assert admitted(3) == admitted(1) == [0, 0, 0]


def test_beside_prompts_decoding_costs_what_it_adds_to_them() -> None:
    cost = DecodingCost(StepCostModel(STEADY), bare=62, prefilled=60, sessions=3)
    assert cost(62) == pytest.approx(0.5)
    assert cost(66) == pytest.approx(1.5)


def test_beside_prompts_nodes_that_save_no_step_are_left_out() -> None:
    decoding, prompt = (1, 1), (400, 60)
    assert budget().admit([SURE, SURE, []], [decoding, decoding, prompt]) == [0, 0, 0]
    assert not budget().asks_for_drafts([decoding, decoding, prompt], [16, 16, 16])


def test_nodes_that_promise_hardly_more_than_drafting_costs_are_left_out() -> None:
    assert budget(row_ms=12.0).admit([[0.9]], [(1, 1)]) == [1]
    assert budget(row_ms=24.0).admit([[0.9]], [(1, 1)]) == [0], "1.9 tokens in 53 ms, or 1 in 29"


def test_a_step_in_which_nobody_commits_has_no_use_for_drafts() -> None:
    assert not budget().asks_for_drafts([(400, 60), (300, 4)], [16, 16])


def test_sources_are_sent_what_nodes_need_and_more_of_it_where_many_share_a_step() -> None:
    def after(sessions: int) -> float:
        shared = budget()
        for _ in range(60):
            shared.admit([SURE] * sessions, [(1, 1)] * sessions)
        return shared.least_survival

    assert budget().least_survival == 0.0
    alone, some, many = after(1), after(8), after(40)
    assert 0.0 < alone < some < many < 0.3 + 1e-9


def test_plain_decoding_teaches_what_nodes_need_too() -> None:
    shared = budget()
    shared.admit([[], []], [(1, 1), (1, 1)])
    before = shared.least_survival
    shared.admit([[], []], [(400, 64), (300, 16)])
    assert shared.least_survival == before > 0.0, "a step that commits nothing says nothing"


class CountingCosts(StepCostModel):
    """Counts how often it was asked for a step's curve."""

    asked = 0

    def step_curve(self, sessions: int = 1, depth: float = 0.0) -> StepCurve:
        self.asked += 1
        return super().step_curve(sessions, depth)


def test_a_step_without_a_node_teaches_what_the_question_about_drafts_has_worked_out() -> None:
    costs = CountingCosts(STEADY)
    shared, apart = DraftBudget(costs, adaptive=True), budget()
    for _ in range(60):
        shared.asks_for_drafts([(1, 1)], [16])
        before = costs.asked
        shared.admit([[]], [(1, 1)])
        assert costs.asked == before
        apart.admit([[]], [(1, 1)])
        assert shared.node_cost == apart.node_cost > 0.0
    for sessions in (8, 9):
        shared.admit([[]] * sessions, [(1, 1)] * sessions)
        apart.admit([[]] * sessions, [(1, 1)] * sessions)
        assert shared.node_cost == apart.node_cost, "steps of other sessions need something else"


def test_alike_steps_that_look_for_no_drafts_work_out_once_in_sixteen_what_nodes_need() -> None:
    costs = CountingCosts(STEADY)
    shared = DraftBudget(costs, adaptive=True)
    for _ in range(160):
        shared.admit([[]], [(1, 1)])
    assert costs.asked == 10
    assert shared.node_cost == pytest.approx(0.25 / 5.25, rel=0.01)


def test_the_first_node_of_a_step_needs_what_its_row_costs_in_that_step() -> None:
    shared = budget()
    for _ in range(60):
        shared.admit([SURE] * 40, [(1, 1)] * 40)
    shared.asks_for_drafts([(1, 1)], [16])
    assert shared.first_needs == pytest.approx(0.25 / 5.25)
    assert shared.node_cost > 4 * shared.first_needs


def test_whether_nodes_could_pay_is_worked_out_anew_for_other_steps_and_every_sixteenth() -> None:
    dear = StepCostModel({rows: 5.0 * rows for rows in STEADY})
    shared = DraftBudget(dear, adaptive=True)
    assert not shared.asks_for_drafts([(1, 1)], [16])
    dear.use(StepProfile(STEADY, 0.0, 0.0, 0.0))
    assert [shared.asks_for_drafts([(1, 1)], [16]) for _ in range(16)] == [False] * 15 + [True]
    dear.use(StepProfile({rows: 5.0 * rows for rows in STEADY}, 0.0, 0.0, 0.0))
    assert shared.asks_for_drafts([(1, 1)], [16])
    assert not shared.asks_for_drafts([(1, 1)], [8]), "of another number of nodes nothing was known"


def test_drafts_that_were_held_back_bring_a_crowd_to_rest_too() -> None:
    shared = budget()
    looked = []
    for _ in range(9):
        looked.append(shared.asks_for_drafts([(1, 1)] * 24, [16] * 24))
        if looked[-1]:
            shared.admit([[]] * 24, [(1, 1)] * 24, held_back=24)
    assert looked == [True] * 4 + [False] * 4 + [True]


def test_a_step_that_everybody_has_left_admits_nothing() -> None:
    assert budget().admit([], []) == []


def test_without_a_budget_everything_is_admitted() -> None:
    fixed = budget(adaptive=False)
    assert fixed.admit([SURE, SURE], [(1, 1), (400, 60)]) == [4, 4]
    assert fixed.asks_for_drafts([(400, 60)], [16])
    assert fixed.least_survival == 0.0


def looks(rests: DraftRests, sessions: int, steps: int, admitted: int = 0) -> list[bool]:
    """Whether each of some steps looks for drafts, which then finds ten nodes and admits `admitted`."""
    looked = []
    for _ in range(steps):
        looked.append(rests.asks(sessions))
        if looked[-1]:
            rests.learn(sessions, 10, admitted)
    return looked


def test_a_crowd_that_admits_none_of_its_drafts_looks_for_them_ever_less_often() -> None:
    looked = looks(DraftRests(), 24, 200)
    assert looked[:4] == [True] * 4
    assert looked[4:9] == [False] * 4 + [True]
    assert sum(looked[:100]) > sum(looked[100:])
    assert 5 <= sum(looked[100:]) <= 7, "every seventeenth step looks again"


def test_a_node_that_is_admitted_ends_the_rests() -> None:
    rests = DraftRests()
    looks(rests, 24, 100)
    while not rests.asks(24):
        pass
    rests.learn(24, 10, 1)
    assert looks(rests, 24, 3) == [True] * 3


def test_steps_that_admit_drafts_or_find_none_always_look() -> None:
    assert all(looks(DraftRests(), 24, 50, admitted=1))
    rests = DraftRests()
    for _ in range(50):
        assert rests.asks(24)
        rests.learn(24, 0, 0)


def test_a_few_sessions_always_look() -> None:
    assert all(looks(DraftRests(), 3, 100))


def test_a_crowd_that_has_halved_looks_at_once() -> None:
    rests = DraftRests()
    looks(rests, 24, 100)
    assert rests.asks(12)


def test_a_fixed_budget_never_goes_without_drafts() -> None:
    fixed = budget(adaptive=False)
    for _ in range(50):
        assert fixed.asks_for_drafts([(1, 1)] * 8, [16] * 8)
        fixed.admit([[0.01]] * 8, [(1, 1)] * 8)
