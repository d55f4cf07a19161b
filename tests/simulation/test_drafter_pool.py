"""A pool of drafters in the simulation: sessions spread over the drafters and leave one that dies."""

from dataclasses import replace

from benchmarks.simulation.network import Weather
from benchmarks.simulation.plan import Additions, Fault, Plan, plan_of, with_pool
from benchmarks.simulation.search import batch
from benchmarks.simulation.source import SourceShape
from benchmarks.simulation.verifier import VerifierShape
from benchmarks.simulation.world import simulate

POOL = 3
KIND = SourceShape(right=0.95, think_s=0.002)


def test_nothing_is_violated_where_sessions_share_a_pool_whose_drafters_fail() -> None:
    found = batch(range(40), additions=Additions(drafters=POOL))

    assert found.failing == {}
    assert found.counts["accepted"]
    assert all(found.counts[f"followed by source {number}"] for number in range(POOL))


def calm_plan(seed: int, *faults: Fault) -> Plan:
    """One long request on one verifier, beside two drafters of one name."""
    plan = plan_of(seed)
    turn = replace(
        plan.conversations[0][1][0],
        max_tokens=200,
        n=1,
        timeout_s=None,
        act="nothing",
        resumable=False,
        speculate=True,
        device="",
    )
    return replace(
        plan,
        weather=Weather(delay_s=0.0005, late=0.0, lost=0.0, twice=0.0, stutter=0.0),
        verifiers=(VerifierShape(step_s=0.05, blocks=64, most_running=8),),
        sources=(KIND, KIND),
        conversations=((0.0, (turn,)),),
        faults=faults,
    )


def test_a_session_whose_drafter_dies_goes_to_another_drafter_of_the_pool() -> None:
    # Some requests end early, at a stop.
    seed = next(seed for seed in range(200) if simulate(seed, plan=calm_plan(seed)).counts["ids"] > 80)

    outcomes = [
        simulate(seed, plan=calm_plan(seed, Fault(0.3, "kill source", which, 4.0))) for which in range(2)
    ]

    assert [outcome.violations for outcome in outcomes] == [[], []]
    followed = [
        {number for number in range(2) if outcome.counts[f"followed by source {number}"]}
        for outcome in outcomes
    ]
    assert {0, 1} in followed, "one of the two deaths hit the session's own drafter"


def test_a_pool_adds_a_fault_of_one_of_its_drafters() -> None:
    plan = plan_of(3)

    pool = with_pool(plan, POOL)

    assert pool == with_pool(plan, POOL)
    assert len(pool.sources) == POOL
    assert pool.faults[:-1] == plan.faults
    assert pool.faults[-1].kind in ("kill source", "freeze source")
