"""Shows downloads and loading models on standard error: bars on a terminal, else a line now and then."""

import sys
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

from outrider.runtime.children import ServiceProcess

LINE_EVERY_S = 10.0
"""Seconds between two lines of progress without a terminal."""


class DownloadProgress:
    """Shows one download after another; the view of `outrider.hub.download`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._model = ""
        self._size = self._count = 0
        self._began_s = self._told_s = 0.0
        self._bar: tuple[Progress, TaskID] | None = None

    def began(self, model: str, size: int) -> None:
        """Draws an empty bar, or says what is downloaded."""
        self._model, self._size, self._count = model, size, 0
        self._began_s = self._told_s = time.monotonic()
        if self._console.is_terminal:
            progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeElapsedColumn(),
                console=self._console,
            )
            self._bar = progress, progress.add_task(model, total=size)
            progress.start()
        else:
            self._say(f"downloading {model}: {amount(size)}")

    def arrived(self, count: int) -> None:
        """Moves the bar to `count` bytes."""
        self._count = count
        if self._bar is not None:
            progress, task = self._bar
            progress.update(task, completed=count, description=self._model)
        elif time.monotonic() - self._told_s >= LINE_EVERY_S:
            self._told_s = time.monotonic()
            self._say(f"downloading {self._model}: {amount(count)} of {amount(self._size)}")

    def stalled(self, seconds: float) -> None:
        """Says that no byte arrives."""
        text = f"{self._model}: no byte for {seconds:.0f} s"
        if self._bar is not None:
            progress, task = self._bar
            progress.update(task, description=text)
        else:
            self._say(text)

    def ended(self) -> None:
        """Leaves the bar as it is; says how long a whole download took."""
        if self._bar is not None:
            self._bar[0].stop()
            self._bar = None
        elif self._count >= self._size:
            took = time.monotonic() - self._began_s
            self._say(f"downloaded {self._model}: {amount(self._size)} in {took:.1f} s")

    def _say(self, text: str) -> None:
        self._console.out(text, highlight=False)


class LoadProgress:
    """Shows processes that start: a line or bar each, with the tensors that are loaded, until it is ready.

    Args:
        compiles: whether models' passes are compiled before they serve.
    """

    def __init__(self, console: Console, *, compiles: bool = False) -> None:
        self._console = console
        self._compiles = compiles
        self._began_s = self._told_s = time.monotonic()
        self._tasks: dict[str, TaskID] = {}
        self._progress = Progress(
            TextColumn("{task.description:<13}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def show(self, children: Iterable[ServiceProcess]) -> None:
        """Shows the state of all processes now; call it a few times a second."""
        children = list(children)
        if self._console.is_terminal:
            for child in children:
                self._draw(child)
        elif time.monotonic() - self._told_s >= LINE_EVERY_S:
            self._told_s = time.monotonic()
            states = ", ".join(f"{child.role} {self._state(child)}" for child in children if not child.ready)
            if states:
                took = self._told_s - self._began_s
                self._console.out(f"starting for {took:.0f} s: {states}", highlight=False)

    def _state(self, child: ServiceProcess) -> str:
        return state_of(child, compiles=self._compiles)

    def _draw(self, child: ServiceProcess) -> None:
        task = self._tasks.get(child.role)
        if task is None:
            task = self._tasks[child.role] = self._progress.add_task(child.role, total=None, state="")
        # A task stops its clock once its total is completed.
        total = 1 if child.ready else child.of or None
        done = 1 if child.ready else min(child.loaded, max(0, child.of - 1))
        self._progress.update(task, total=total, completed=done, state=self._state(child))


def state_of(child: ServiceProcess, *, compiles: bool = False) -> str:
    """What a starting process does, in words; `compiles`: its passes are compiled before it serves."""
    if child.ready:
        return "ready"
    if not child.of:
        return "starts"
    if child.loaded < child.of:
        return f"has loaded {child.loaded:,} of {child.of:,} tensors"
    return "compiles its passes, which takes minutes the first time" if compiles else "checks its passes"


def amount(size: int) -> str:
    """A number of bytes for people to read: 16.4 GB, 3.1 MB or 12 kB."""
    for unit, bytes_ in (("GB", 1e9), ("MB", 1e6)):
        if size >= bytes_:
            return f"{size / bytes_:,.1f} {unit}"
    return f"{size / 1e3:,.0f} kB"


def standard_error() -> Console:
    """The console for progress; standard output is for what programs read."""
    return Console(file=sys.stderr, highlight=False, soft_wrap=True)
