"""The hostile benchmark runs small, end to end, as its schema says; its figures tell stalls from noise."""

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.hostile.figures import (
    Message,
    Window,
    beyond_usual,
    longest_stall,
    longest_waits,
    summed_up,
)

QUIET = [Message("http", "gap", 9.0, 0.5), Message("grpc", "gap", 9.5, 0.2)]
ATTACKED = [Message("http", "gap", 12.0, 2.5), Message("grpc", "first", 11.0, 0.4)]


@pytest.mark.long
@pytest.mark.timeout(630)
def test_the_hostile_benchmark_prints_what_its_schema_says(bench: Callable[..., dict[str, Any]]) -> None:
    small = ["--classes", "http encodings|lying sources", "--repeats", "1", "--quiet-s", "1"]
    result = bench("hostile", *small, timeout_s=600)
    assert set(result["classes"]) == {"http encodings", "lying sources"}
    assert result["wrong"] == result["hung"] == 0
    assert result["classes"]["http encodings"]["statuses"]["400"] > 10
    assert result["classes"]["lying sources"]["statuses"]["told"] > 5


def test_a_wait_counts_where_it_lies_in_part() -> None:
    waits = longest_waits([*QUIET, *ATTACKED], 10.0, 11.5, whole=False)
    assert waits == {"http gap": 2.5, "grpc first": 0.4}
    assert longest_waits([*QUIET, *ATTACKED], 8.0, 10.0, whole=True) == {"http gap": 0.5, "grpc gap": 0.2}


def test_what_was_wrong_is_no_wait() -> None:
    wrong = Message.of_line(["http", "wrong", 5.0, "[1] in place of [2]"])
    assert longest_waits([wrong], 0.0, 9.0, whole=False) == {}
    assert wrong.what == "[1] in place of [2]"


def told(attacked: dict[str, float], quiet: dict[str, float]) -> tuple[float, str]:
    found = beyond_usual(attacked, quiet)
    return found["longest_gap_ms"], found["waited_for"]


def test_a_gap_is_what_goes_beyond_the_usual_one() -> None:
    assert told({"http gap": 2.5, "grpc first": 0.4}, {"http gap": 0.5}) == (2000.0, "http gap")
    assert told({"http gap": 0.4}, {"http gap": 0.5}) == (0.0, "")
    assert told({"grpc first": 0.9}, {"http gap": 0.5}) == (400.0, "grpc first")
    assert told({}, {}) == (0.0, "")


def test_a_stall_belongs_to_the_class_during_which_it_lasted() -> None:
    stalls = [
        {"ended": ended, "seconds": seconds, "processor_seconds": busy, "role": role, "where": "f"}
        for ended, seconds, busy, role in (
            (99.0, 3.0, 0.9, "before"),
            (101.0, 0.5, 0.0, "without a core"),
            (102.0, 0.2, 0.1, "busy"),
            (120.0, 9.0, 0.9, "after"),
        )
    ]
    window = Window(0.0, 0.0, wall_began=100.0, wall_ended=110.0)
    found = longest_stall(stalls, window)
    assert (found["longest_stall_ms"], found["processor_ms"], found["role"]) == (500.0, 100.0, "busy")
    assert longest_stall([], window)["longest_stall_ms"] == 0.0


def test_repeats_give_the_median_gap_the_smallest_stall_and_all_counts() -> None:
    def one(stall: float, gap: float, leaked: int) -> dict[str, Any]:
        counts = {"inputs": 3, "wrong": 0, "hung": 1, "tracebacks": 0, "seconds": 1.0, "faults": ["a"]}
        return {
            "longest_stall_ms": stall,
            "processor_ms": stall,
            "longest_gap_ms": gap,
            "waited_for": f"gap of {gap}",
            "usual_gap_ms": 10.0,
            "leaked_bytes": leaked,
            "where": "f",
        } | {
            **counts,
            "statuses": {"400": 3},
        }

    all_ = summed_up([one(50.0, 900.0, 7), one(80.0, 20.0, 5), one(60.0, 30.0, 4)])
    assert (all_["longest_gap_ms"], all_["worst_gap_ms"]) == (30.0, 900.0)
    assert all_["waited_for"] == "gap of 900.0"
    assert (all_["longest_stall_ms"], all_["leaked_bytes"], all_["usual_gap_ms"]) == (50.0, 4, 10.0)
    assert (all_["inputs"], all_["hung"], all_["statuses"], all_["faults"]) == (9, 3, {"400": 9}, ["a"])
