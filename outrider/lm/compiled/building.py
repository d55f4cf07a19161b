"""Has a child process compile one model's package."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from outrider.compiling.building import BuildLimits, build_in
from outrider.compiling.store import PackageStore
from outrider.lm.compiled.child import OPERATORS, ORDER, PACKAGE, PANELS
from outrider.lm.compiled.order import CompileOrder

_LIMITS = BuildLimits()

CHILD = (sys.executable, "-m", "outrider.lm.compiled.child")
"""Command that compiles in the folder named behind it."""


def build(
    order: CompileOrder,
    store: PackageStore,
    is_stopped: Callable[[], bool],
    limits: BuildLimits = _LIMITS,
    child: Sequence[str] = CHILD,
) -> Path:
    """Compiles an order in a child process, as `build_in` does; returns the package's folder.

    ``child`` is the command that compiles in the folder named by its last argument.
    """

    def command(folder: Path) -> Sequence[str]:
        (folder / ORDER).write_text(order.to_json())
        return [*child, str(folder)]

    return build_in(store, order.key, (OPERATORS, PACKAGE, PANELS), command, is_stopped, limits)
