"""Compute threads leave a core to everything else, within the container's limit."""

import os
from pathlib import Path

import pytest

from outrider.runtime.threads import cpu_limit, most_helped_threads, most_threads


@pytest.mark.parametrize(
    ("name", "text", "cores"),
    [
        ("cpu.max", "50000 100000", 0.5),
        ("cpu.max", "max 100000", None),
        ("cpu.max", "nonsense", None),
        ("none", "", None),
    ],
)
def test_the_limit_is_the_quota_or_the_affinity(
    tmp_path: Path, name: str, text: str, cores: float | None
) -> None:
    (tmp_path / name).write_text(text)
    assert cpu_limit(tmp_path) == (cores or len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(("quota", "cores"), [("50000", 0.5), ("-1", None)])
def test_the_first_version_of_control_groups_is_read_too(
    tmp_path: Path, quota: str, cores: float | None
) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text(quota)
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000")
    assert cpu_limit(tmp_path) == (cores or len(os.sched_getaffinity(0)))


def test_a_core_is_left_to_others_but_one_thread_always_computes() -> None:
    assert most_threads({}) == max(1, int(cpu_limit()) - 1)


@pytest.mark.parametrize(("asked", "most"), [("1", 1), ("2", 2), ("64", 7), ("0", 7), ("4,2", 7)])
def test_the_variable_of_openmp_bounds_the_threads(
    asked: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.runtime.threads.cpu_limit", lambda: 8.0)
    assert most_threads({"OMP_NUM_THREADS": asked}) == most


def test_threads_that_help_may_use_all_cores_but_under_a_quota_no_more_than_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cores = len(os.sched_getaffinity(0))
    assert most_helped_threads() == (cores if cpu_limit() == cores else most_threads())
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    for limit, most in ((8.0, 8), (6.5, 2), (0.5, 1)):
        monkeypatch.setattr("outrider.runtime.threads.cpu_limit", lambda limit=limit: limit)
        assert most_helped_threads() == most
