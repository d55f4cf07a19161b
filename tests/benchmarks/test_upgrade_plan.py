"""The plan of a rolling upgrade, and the code of the previous release: without any process."""

from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.chaos.fault_plan import FleetProcess
from benchmarks.upgrade.checkout import code_of
from benchmarks.upgrade.rolling_plan import ORDERS, Release, mixes, pairs_beside, plan_rolls

FLEET = {"verifier": 2, "orchestrator": 2, "drafter": 2, "retrieval": 1, "redis": 1}
ROOT = Path(__file__).parents[2]


def test_one_process_rolls_at_a_time_in_the_order_of_operate_md_and_back() -> None:
    rolls = plan_rolls(["documented"], FLEET)
    there, back = rolls[:7], rolls[7:]
    roles = list(dict.fromkeys(roll.process.role for roll in there))
    assert roles == ["drafter", "retrieval", "verifier", "orchestrator"]
    assert [roll.process for roll in back] == [roll.process for roll in reversed(there)]
    assert {roll.to for roll in there} == {Release.PRESENT}
    assert {roll.to for roll in back} == {Release.PREVIOUS}
    for before, after in pairwise(mixes(rolls)):
        assert sum(before[process] is not after[process] for process in before) == 1


def test_a_plan_ends_where_it_began_after_every_process_ran_the_present_release() -> None:
    for order in ORDERS:
        first, *between, last = mixes(plan_rolls([order], FLEET))
        assert first == last
        assert set(first.values()) == {Release.PREVIOUS}
        assert any(set(mix.values()) == {Release.PRESENT} for mix in between)
        assert FleetProcess("redis", 0) not in first, "the store runs no code of a release"


def test_both_orders_put_every_role_of_one_release_beside_every_role_of_the_other() -> None:
    pairs = pairs_beside(plan_rolls(list(ORDERS), FLEET))
    both = {
        (role, release, other)
        for role, release, other, _ in pairs | {(it[2], it[3], it[0], it[1]) for it in pairs}
    }
    roles = {role for role in FLEET if role != "redis"}
    wanted = {(one, release, other) for one in roles for other in roles for release in Release}
    alone = {("retrieval", release, "retrieval") for release in Release}
    assert both == wanted - alone, "the only retrieval worker has no other beside it"


def test_a_previous_release_is_a_folder_with_all_services() -> None:
    with code_of(str(ROOT)) as folder:
        assert folder == ROOT
    refused = pytest.raises(RuntimeError, match="docs holds no release: verifier_service, drafter_service, ")
    with refused, code_of(str(ROOT / "docs")):
        pass


def test_what_is_neither_folder_nor_revision_is_refused_by_name() -> None:
    refused = pytest.raises(
        RuntimeError, match="previous is 'no-such-revision', neither a folder nor a revis"
    )
    with refused, code_of("no-such-revision"):
        pass
