"""Virtual time: an event loop that jumps to the next event, and processes that freeze and die on it.

All code of a simulated process runs in a context that names the process; tasks, callbacks and timers inherit
it. So one loop runs all processes. The handles of a frozen process wait until it is woken, while its clock
goes on as a stopped process's does. Nothing here is left to chance: the same calls give the same order.
"""

import asyncio
import contextvars
import heapq
import itertools
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import ModuleType
from typing import Any

EPOCH_NS = 1_750_000_000 * 10**9
"""The wall clock's nanoseconds at the beginning."""
PATCHED = ("orchestrator", "verifier_service", "outrider")
"""Packages whose modules read the virtual clock instead of the machine's clock."""

PROCESS: contextvars.ContextVar["Process | None"] = contextvars.ContextVar("process", default=None)


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop that runs callbacks in the order of their time without waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.frozen = 0
        """Number of frozen processes."""
        self.faults: list[str] = []
        """Exceptions that no code caught."""
        self._ready: deque[asyncio.Handle]
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._order = itertools.count()
        self.set_task_factory(_tagged)
        self.set_exception_handler(self._fault)

    def time(self) -> float:
        return self.now

    def call_soon(  # type: ignore[override]  # without the checks, as there is one thread only
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(  # type: ignore[override]  # timers due at the same time keep their order
        self,
        when: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._order), timer))
        return timer

    def run_in_executor(  # type: ignore[override]  # at once, in the only thread
        self, executor: object, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def _fault(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.faults.append(f"{context.get('message')}: {context.get('exception')!r}")

    def _write_to_self(self) -> None:
        """Does nothing, as no other thread wakes the loop."""

    def _process_events(self, event_list: object) -> None:
        """Does nothing, as there are no sockets."""

    def _run_once(self) -> None:
        ready, timers = self._ready, self._timers
        if not ready:
            while timers and timers[0][2]._cancelled:
                heapq.heappop(timers)
            if not timers:
                raise RuntimeError("nothing is left to happen, but a task still waits")
            self.now = max(self.now, timers[0][0])
        while timers and timers[0][0] <= self.now:
            ready.append(heapq.heappop(timers)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            if self.frozen:
                process = handle._context.get(PROCESS)  # type: ignore[attr-defined]
                if process is not None and process.frozen:
                    process.held.append(handle)
                    continue
            handle._run()

    def thaw(self, process: "Process") -> None:
        """Runs the handles that a frozen process has missed, in order."""
        self._ready.extend(process.held)
        process.held.clear()


def _tagged(
    loop: asyncio.AbstractEventLoop, coro: Any, context: contextvars.Context | None = None
) -> asyncio.Task[Any]:
    task: asyncio.Task[Any] = asyncio.Task(coro, loop=loop, context=context)
    process = PROCESS.get() if context is None else context.get(PROCESS)
    if process is not None:
        process.tasks[task] = None
        task.add_done_callback(process.forget)
    return task


class Process:
    """A simulated process, which is killed, frozen and woken as a whole."""

    def __init__(self, loop: VirtualLoop, name: str) -> None:
        self.loop = loop
        self.name = name
        self.alive = True
        self.frozen = False
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self.held: list[asyncio.Handle] = []
        self.context = contextvars.copy_context()
        self.context.run(PROCESS.set, self)
        self.on_death: list[Callable[[], None]] = []

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Starts a task of this process; an exception in it counts as a fault of the simulated code."""
        task = self.loop.create_task(work, context=self.context)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        if self.alive and not task.cancelled() and (error := task.exception()) is not None:
            self.loop.faults.append(f"{self.name}: {error!r}")

    def run(self, call: Callable[..., Any], *args: Any) -> Any:
        """Calls a function inside this process, now."""
        return self.context.run(call, *args)

    def freeze(self) -> None:
        """Freezes the process, as SIGSTOP does."""
        if self.alive and not self.frozen:
            self.frozen = True
            self.loop.frozen += 1

    def wake(self) -> None:
        """Wakes the process, as SIGCONT does."""
        if self.frozen:
            self.frozen = False
            self.loop.frozen -= 1
            self.loop.thaw(self)

    def kill(self) -> None:
        """Kills the process, as SIGKILL does: its peers notice, and it reaches none of them any more.

        Its tasks are cancelled unseen, so that none is left when the simulation ends.
        """
        if not self.alive:
            return
        self.alive = False
        for on_death in self.on_death:
            on_death()
        self.wake()
        for task in list(self.tasks):
            task.cancel()

    def forget(self, task: asyncio.Task[Any]) -> None:
        """Forgets a task that is done."""
        self.tasks.pop(task, None)


def current() -> Process:
    """The process whose code runs now."""
    process = PROCESS.get()
    assert process is not None, "this is called inside a simulated process"
    return process


class VirtualTime:
    """Replaces the `time` module where a module has imported it."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.monotonic = self.perf_counter = loop.time
        self._loop = loop

    def time_ns(self) -> int:
        """Nanoseconds of the virtual wall clock."""
        return EPOCH_NS + int(self._loop.now * 1e9)


@lru_cache(maxsize=1)
def _modules(loaded: int) -> list[ModuleType]:
    """Modules of PATCHED that read a clock; `loaded` is the number of loaded modules, the cache's key."""
    return [
        module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in PATCHED and getattr(module, "time", None) is time
    ]


@contextmanager
def virtual_time(loop: VirtualLoop) -> Iterator[None]:
    """Lets modules of PATCHED read this loop's clock inside the block."""
    modules = _modules(len(sys.modules))
    clock: Any = VirtualTime(loop)
    for module in modules:
        vars(module)["time"] = clock
    try:
        yield
    finally:
        for module in modules:
            vars(module)["time"] = time
