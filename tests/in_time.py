"""What depends on how soon something happens: on a busy machine the best of three tries counts."""

from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

TRIES = 3
"""How often a test whose failure is `NotInTime` is run at most; see tests/conftest.py."""

Case = TypeVar("Case")

PATIENCE_MS = 60_000
"""How long a process that a test started may leave a ping unanswered: it may get no core for a second."""


class NotInTime(AssertionError):
    """Something happened too late, or not before something else."""


def in_time(happened: object, what: object = "it came too late") -> None:
    """Asserts what a machine that is busy with others may break; nothing else may hang on the machine."""
    __tracebackhide__ = True
    if not happened:
        raise NotInTime(what)


async def each_in_time(check: Callable[[Case], Awaitable[object]], cases: Iterable[Case]) -> None:
    """Checks every case, and checks those again that were too late; any other failure is raised at once.

    So one late case of many costs one more check, not a second run of the whole test.
    """
    left = list(cases)
    for _ in range(TRIES):
        late: dict[Case, str] = {}
        for case in left:
            try:
                await check(case)
            except NotInTime as error:
                late[case] = str(error)
        left = list(late)
    in_time(not late, late)
