"""What chaos and upgrade share: a run ends with its fields or after a signal, and its fleet ends with it."""

import asyncio
import os
import signal
from typing import Any

import pytest

from benchmarks.chaos.harmed_run import INTERRUPTED, all_streams_whole, failures_said, run_fleet
from outrider.runtime.children import ServiceFailed

WHOLE: dict[str, Any] = {"identical": 4, "streams": 4, "duplicates": 0, "gaps": 0}


class Fleet:
    """A fleet without processes."""

    closed = False

    def close(self) -> None:
        self.closed = True


def run(fleet: Fleet, measure: Any) -> dict[str, Any]:
    return run_fleet(lambda: fleet, measure)  # type: ignore[arg-type, return-value]


def test_a_run_gives_its_fields_and_closes_its_fleet() -> None:
    async def measure(_: Any) -> dict[str, Any]:
        return WHOLE

    fleet = Fleet()
    assert run(fleet, measure) == WHOLE
    assert fleet.closed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_and_closes_its_fleet(number: signal.Signals) -> None:
    async def measure(_: Any) -> dict[str, Any]:
        os.kill(os.getpid(), number)
        await asyncio.sleep(60)
        return WHOLE

    fleet = Fleet()
    with pytest.raises(SystemExit) as ended, failures_said("chaos"):
        run(fleet, measure)
    assert ended.value.code == INTERRUPTED
    assert fleet.closed


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ServiceFailed("verifier ended", "verifier"), "chaos: verifier ended"),
        (TimeoutError(), "chaos: TimeoutError()"),
        (ExceptionGroup("both", [RuntimeError("one"), TimeoutError("two")]), "chaos: one; two"),
    ],
)
def test_a_failed_service_is_one_line(error: Exception, said: str) -> None:
    with pytest.raises(SystemExit) as ended, failures_said("chaos"):
        raise error
    assert ended.value.code == said


def test_failures_of_other_kinds_keep_their_traceback() -> None:
    with pytest.raises(ExceptionGroup), failures_said("chaos"):
        raise ExceptionGroup("both", [TimeoutError(), KeyError("mine")])


@pytest.mark.parametrize(
    "wrong", [{"identical": 3}, {"streams": 3, "identical": 3}, {"duplicates": 1}, {"gaps": 1}], ids=str
)
def test_streams_are_whole_only_if_all_ended_with_every_token_once(wrong: dict[str, int]) -> None:
    assert all_streams_whole(WHOLE, 4)
    assert not all_streams_whole(WHOLE | wrong, 4)
