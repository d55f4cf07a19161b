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


class _Handle:
    """A callback or a timer: asyncio's handle without its checks."""

    __slots__ = ("args", "callback", "context", "dropped")

    def __init__(
        self, callback: Callable[..., Any], args: tuple[Any, ...], context: contextvars.Context | None
    ) -> None:
        self.callback = callback
        self.args = args
        self.context = contextvars.copy_context() if context is None else context
        self.dropped = False

    def cancel(self) -> None:
        """Lets the callback never run."""
        self.dropped = True


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop that runs callbacks in the order of their time without waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.frozen = 0
        """Number of frozen processes."""
        self.faults: list[str] = []
        """Exceptions that no code caught."""
        self._queue: deque[_Handle] = deque()
        self._timers: list[tuple[float, int, _Handle]] = []
        self._order = itertools.count()
        self.set_task_factory(_tagged)
        self.set_exception_handler(self._fault)

    def time(self) -> float:
        return self.now

    def call_soon(  # type: ignore[override]  # without the checks, as there is one thread only
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> _Handle:
        handle = _Handle(callback, args, context)
        self._queue.append(handle)
        return handle

    def call_at(  # type: ignore[override]  # timers due at the same time keep their order
        self,
        when: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> _Handle:
        timer = _Handle(callback, args, context)
        heapq.heappush(self._timers, (when, next(self._order), timer))
        return timer

    def call_later(  # type: ignore[override]  # as call_at
        self,
        delay: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> _Handle:
        return self.call_at(self.now + delay, callback, *args, context=context)

    call_soon_threadsafe = call_soon  # type: ignore[assignment]  # there is one thread

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
        queue, timers = self._queue, self._timers
        if not queue:
            while timers and timers[0][2].dropped:
                heapq.heappop(timers)
            if not timers:
                raise RuntimeError("nothing is left to happen, but a task still waits")
            self.now = max(self.now, timers[0][0])
        while timers and timers[0][0] <= self.now:
            queue.append(heapq.heappop(timers)[2])
        for _ in range(len(queue)):
            handle = queue.popleft()
            if handle.dropped or (self.frozen and self._holds(handle)):
                continue
            try:
                handle.context.run(handle.callback, *handle.args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                self.call_exception_handler({"message": f"in {handle.callback!r}", "exception": error})

    def _holds(self, handle: _Handle) -> bool:
        """Whether the handle belongs to a frozen process, which then keeps it."""
        process = handle.context.get(PROCESS)
        if process is None or not process.frozen:
            return False
        process.held.append(handle)
        return True

    def thaw(self, process: "Process") -> None:
        """Runs the handles that a frozen process has missed, in order."""
        self._queue.extend(process.held)
        process.held.clear()


def _tagged(
    loop: asyncio.AbstractEventLoop, coro: Any, context: contextvars.Context | None = None
) -> asyncio.Task[Any]:
    task: asyncio.Task[Any] = asyncio.Task(coro, loop=loop, context=context)
    process = PROCESS.get() if context is None else context.get(PROCESS)
    if process is not None:
        process.tasks.append(task)
    return task


class Process:
    """A simulated process, which is killed, frozen and woken as a whole."""

    def __init__(self, loop: VirtualLoop, name: str) -> None:
        self.loop = loop
        self.name = name
        self.alive = True
        self.frozen = False
        self.tasks: list[asyncio.Task[Any]] = []
        """All tasks that ran in the process, those that are done too: a scenario is short."""
        self.held: list[_Handle] = []
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
        for task in self.tasks:
            task.cancel()
        self.tasks.clear()


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
