"""The plan of faults and the arithmetic over what streams went through: pure, so without any process."""

from collections import Counter
from pathlib import Path

import pytest

from benchmarks.chaos import fault_plan as plan
from benchmarks.chaos import stream_figures as figures
from benchmarks.chaos.fleet_processes import Checkouts

FLEET = {"verifier": 2, "orchestrator": 2, "drafter": 2, "retrieval": 1, "redis": 1}
VERIFIERS = [plan.FleetProcess("verifier", number) for number in range(2)]
DRAFTER = plan.FleetProcess("drafter", 0)


def fault(at_s: float, process: plan.FleetProcess, harm: str = "kill") -> plan.ProcessFault:
    return plan.ProcessFault(at_s, process, plan.Harm(harm), 1.0)


def test_a_seed_is_a_plan() -> None:
    assert plan.draw_faults(5, 600, 5, FLEET) == plan.draw_faults(5, 600, 5, FLEET)
    assert plan.draw_faults(5, 600, 5, FLEET) != plan.draw_faults(6, 600, 5, FLEET)


def test_ten_minutes_bring_every_harm_to_every_role() -> None:
    faults = plan.draw_faults(1, 600, 5, FLEET)
    assert len(faults) >= 100
    assert {(it.process.role, it.harm) for it in faults} == {(role, it) for role in FLEET for it in plan.Harm}
    assert {it.process for it in faults} == {
        plan.FleetProcess(role, number) for role, count in FLEET.items() for number in range(count)
    }
    roles = Counter(it.process.role for it in faults)
    assert min(roles["verifier"], roles["orchestrator"]) > 1.5 * max(roles["drafter"], roles["redis"])


def test_faults_come_in_order_and_end_before_the_run_does() -> None:
    times = [it.at_s for it in plan.draw_faults(3, 120, 5, FLEET)]
    assert times == sorted(times)
    assert times[0] > 0
    assert times[-1] < 110


def test_a_verifier_is_harmed_only_while_another_is_ready() -> None:
    assert plan.is_allowed(fault(0, VERIFIERS[0]), set(VERIFIERS))
    assert not plan.is_allowed(fault(0, VERIFIERS[0]), {VERIFIERS[0], DRAFTER})
    assert not plan.is_allowed(fault(0, VERIFIERS[0]), {VERIFIERS[1]}), "it is being harmed already"
    assert plan.is_allowed(fault(0, DRAFTER), {DRAFTER}), "requests go on without"


def test_what_is_not_allowed_yet_waits_and_others_go_first() -> None:
    schedule = plan.Schedule([fault(1, VERIFIERS[0]), fault(2, DRAFTER), fault(3, VERIFIERS[1])])
    ready = {VERIFIERS[0], DRAFTER}
    assert schedule.due(0.5, {*VERIFIERS, DRAFTER}) is None
    assert schedule.due(1.5, ready) is None
    assert schedule.due(2.5, ready) == fault(2, DRAFTER)
    assert schedule.due(9, ready) is None
    assert schedule.due(9, set(VERIFIERS)) == fault(1, VERIFIERS[0])
    assert schedule.due(9, set(VERIFIERS)) == fault(3, VERIFIERS[1])
    assert schedule.due(9, {*VERIFIERS, DRAFTER}) is None, "none is left"


def record(*messages: tuple[float, int, int, int], asked_s: float = 0.0) -> figures.StreamRecord:
    """The record of a stream with a prompt of 10 tokens; a message is (time, position, tokens, epoch)."""
    one = figures.StreamRecord("0.0/0", 10, asked_s, asked=1)
    one.record_epoch(1)
    for now_s, position, count, epoch in messages:
        one.record_tokens(now_s, 0, position, count, epoch)
    return one


def test_ids_that_come_twice_and_places_passed_over_are_counted() -> None:
    assert (record((1, 10, 3, 0), (2, 13, 2, 0)).duplicates, record((1, 10, 3, 0), (2, 13, 2, 0)).gaps) == (
        0,
        0,
    )
    assert record((1, 10, 3, 0), (2, 12, 3, 0)).duplicates == 1
    assert record((1, 10, 3, 0), (2, 10, 2, 0), (3, 13, 1, 0)).duplicates == 2
    gap = record((1, 10, 3, 0), (2, 15, 1, 0), (3, 16, 1, 0))
    assert (gap.gaps, gap.duplicates) == (2, 0)


def test_choices_are_counted_apart() -> None:
    one = figures.StreamRecord("0.0/0", 10, 0.0)
    for choice in (0, 1):
        one.record_tokens(1.0, choice, 10, 3, 0)
    assert (one.duplicates, one.gaps) == (0, 0)


def test_the_longest_silence_around_a_fault_counts() -> None:
    one = record((1.0, 10, 1, 0), (1.5, 11, 1, 0), (4.0, 12, 1, 0), (4.5, 13, 1, 0), asked_s=0.5)
    assert one.silence(2.0, 3.0) == 2.5, "a silence that has begun before and ends after"
    assert one.silence(1.1, 1.2) == 0.5
    assert one.silence(0.6, 0.7) == 0.5, "to the first ids too"
    assert one.silence(5.0, 6.0) is None, "it had ended"


def test_silences_are_grouped_by_role_and_harm() -> None:
    done = [
        figures.CompletedFault(fault(0, VERIFIERS[0]), 1.0, 2.0),
        figures.CompletedFault(fault(0, DRAFTER, "slow"), 7.0, 7.5),
    ]
    by = figures.pauses(
        [record((0.9, 10, 1, 0), (2.0, 11, 1, 0)), record((8.0, 10, 1, 0), asked_s=7.7)], done
    )
    assert by["verifier"]["kill"] == [pytest.approx(1.1)]
    assert by["drafter"]["slow"] == [pytest.approx(0.3)]


def test_a_stream_that_goes_on_under_another_epoch_has_switched() -> None:
    one = record((1.0, 10, 1, 0), (1.75, 11, 1, 7))
    assert [it.silence_s for it in one.switches] == [0.75]
    one.record_epoch(9)
    one.record_tokens(2.0, 0, 12, 1, 0)
    assert one.switches == [figures.EpochSwitch(0.75, 1.75, 0, 7), figures.EpochSwitch(0.25, 2.0, 0, 9)]


def test_the_reading_time_of_a_switch_is_counted_apart() -> None:
    one = record((1.0, 10, 1, 0), (1.75, 11, 1, 7), (1.8, 12, 1, 0), (4.8, 13, 1, 9))
    assert one.beyond_prefill([]) == ([], []), "no verifier answered"
    one.computed_s = {(0, 7): 0.5, (1, 9): 1.0, (0, 8): 2.0}
    assert one.beyond_prefill([]) == ([pytest.approx(0.25)], [])
    one.computed_s[0, 9] = 3.5
    assert one.beyond_prefill([]) == ([pytest.approx(0.25), 0.0], []), "clocks of two processes"


ORCHESTRATOR = plan.FleetProcess("orchestrator", 0)


def harmed(process: plan.FleetProcess, began_s: float, ended_s: float) -> figures.CompletedFault:
    return figures.CompletedFault(fault(0, process), began_s, ended_s)


RECORDED = [
    harmed(VERIFIERS[0], 28.006, 33.171),
    harmed(ORCHESTRATOR, 36.792, 49.633),
    harmed(VERIFIERS[0], 45.149, 49.845),
    harmed(VERIFIERS[0], 77.590, 193.676),
    harmed(plan.FleetProcess("retrieval", 0), 85.521, 89.550),
    harmed(DRAFTER, 97.718, 191.248),
]
"""Some faults of a real run on a busy machine."""


def recorded(silence_from_s: float, until_s: float, read_s: float) -> figures.StreamRecord:
    """A stream of that run, with one silence and the reading time that the last verifier reported."""
    one = record((silence_from_s, 10, 1, 0), (until_s, 11, 1, 7))
    one.computed_s = {(0, 7): read_s}
    return one


def test_a_silence_in_which_a_second_process_was_harmed_is_counted_apart() -> None:
    whole, interrupted = recorded(27.138, 64.290, 7.268).beyond_prefill(RECORDED)
    assert (whole, interrupted) == ([], [pytest.approx(29.884)]), "nobody knows what the lost ones had read"
    whole, interrupted = recorded(136.524, 152.799, 9.193).beyond_prefill(RECORDED)
    assert (whole, interrupted) == ([pytest.approx(7.082)], []), "a source's harm costs no reading"


def test_a_harm_that_comes_once_the_last_verifier_reads_costs_no_reading() -> None:
    assert recorded(27.138, 47.0, 18.9).beyond_prefill(RECORDED) == ([pytest.approx(0.962)], [])


def test_interrupted_silences_are_in_a_figure_of_their_own() -> None:
    tracks = [recorded(27.138, 64.290, 7.268), recorded(136.524, 152.799, 9.193)]
    result = figures.summary(tracks, {}, RECORDED)
    assert result["beyond_prefill_s"] == {"p50": 7.082, "p99": 7.082, "count": 1}
    assert result["interrupted_prefill_s"] == {"p50": 29.884, "p99": 29.884, "count": 1}


def test_quantiles_are_nearest_ranks() -> None:
    assert figures.quantiles([]) == {"p50": None, "p99": None}
    assert figures.quantiles([float(n) for n in range(1, 101)]) == {"p50": 50.0, "p99": 99.0}
    assert figures.quantiles([3.0]) == {"p50": 3.0, "p99": 3.0}


def test_the_first_difference_is_found() -> None:
    assert figures.first_difference([1, 2, 3], [1, 2, 3]) is None
    assert figures.first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert figures.first_difference([1, 2, 3], [1, 2]) == 2


def test_what_differs_fails_or_never_ends_is_not_identical() -> None:
    records = [record((1.0, 10, 3, 0)) for _ in range(4)]
    records[0].completion = [(1, 2, 3)]
    records[1].completion = [(1, 9, 3)]
    records[2].error = "Unavailable: nobody"
    result = figures.summary(
        records, {"0.0": ((1, 2, 3),)}, [figures.CompletedFault(fault(0, DRAFTER), 0.5, 1.5)]
    )
    assert (result["streams"], result["identical"], result["failed"], result["faults"]) == (4, 1, 2, 1)
    assert result["differences"][0]["at"] == 1
    assert result["errors"] == ["0.0/0: Unavailable: nobody", "0.0/0: did not end"]
    assert result["by_fault"]["drafter"]["kill"]["faults"] == 1


def test_each_restart_moves_a_service_to_the_other_release_or_back() -> None:
    present, previous = Path("present"), Path("previous")
    verifier, redis = plan.FleetProcess("verifier", 0), plan.FleetProcess("redis", 0)
    checkouts = Checkouts(present, previous)
    seen = []
    for _ in range(3):
        seen.append(checkouts.of(verifier))
        checkouts.change(verifier)
        checkouts.change(redis)
    assert seen == [present, previous, present]
    assert checkouts.of(redis) == checkouts.of(plan.FleetProcess("verifier", 1)) == present
    assert checkouts.changed == 3


def test_without_another_release_restarts_stay_with_this_one() -> None:
    checkouts = Checkouts(Path("present"))
    checkouts.change(plan.FleetProcess("verifier", 0))
    assert checkouts.of(plan.FleetProcess("verifier", 0)) == Path("present")
    assert checkouts.changed == 0
