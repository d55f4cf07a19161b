"""What `chaos` and `upgrade` share: flags of the streams, the run of a fleet to its end, the last verdict."""

import argparse
import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from benchmarks.chaos.fleet_processes import ChaosFleet
from benchmarks.shared.envelope import add_pair
from outrider.runtime.children import ServiceFailed

INTERRUPTED = 130
"""Exit status after a signal."""
SERVICE_FAILURES = (ServiceFailed, RuntimeError, TimeoutError)
Fields = dict[str, Any]


def add_stream_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the streams and of the fleet."""
    parser.add_argument("--streams", type=int, default=16, help="streams at a time")
    parser.add_argument("--tokens", type=int, default=160, help="tokens of each choice of each stream")
    parser.add_argument("--prompt", type=int, default=200, help="most tokens of a first prompt")
    add_pair(parser)
    parser.add_argument("--log-level", default="error", help="log level of the services")
    parser.add_argument("--check", action="store_true", help="exit with 1 unless all streams are identical")


def run_fleet(
    make: Callable[[], ChaosFleet], measure: Callable[[ChaosFleet], Coroutine[Any, Any, Fields]]
) -> Fields:
    """The fields that `measure` finds; no process is left, however the run ends.

    Raises:
        SystemExit: a signal came first.
    """
    fields = asyncio.run(_until_signal(make, measure))
    if fields is None:
        raise SystemExit(INTERRUPTED)
    return fields


async def _until_signal(
    make: Callable[[], ChaosFleet], measure: Callable[[ChaosFleet], Coroutine[Any, Any, Fields]]
) -> Fields | None:
    fleet = make()
    work = asyncio.create_task(measure(fleet))
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, work.cancel)
    try:
        with contextlib.suppress(asyncio.CancelledError):
            return await work
        return None
    finally:
        fleet.close()


@contextlib.contextmanager
def failures_said(name: str) -> Iterator[None]:
    """Ends the program with one line where services fail to start or to end."""
    try:
        yield
    except (*SERVICE_FAILURES, BaseExceptionGroup) as failed:
        errors: tuple[BaseException, ...] = (failed,)
        if isinstance(failed, BaseExceptionGroup):
            if failed.split(SERVICE_FAILURES)[1] is not None:
                raise
            errors = failed.exceptions
        said = "; ".join(str(error) or repr(error) for error in errors)
        raise SystemExit(f"{name}: {said}") from failed


def all_streams_whole(fields: Fields, streams: int) -> bool:
    """Whether at least so many streams ended, and each gave its golden output, each token once."""
    all_identical = fields["identical"] == fields["streams"] >= streams
    return all_identical and not fields["duplicates"] and not fields["gaps"]
