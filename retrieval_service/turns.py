"""Calls that wait for each other without holding threads: those of one tenant, or for one corpus.

A call that is cancelled keeps its turn until what it has begun in a thread has ended.
"""

import asyncio
import logging
from collections.abc import Callable, Hashable
from concurrent.futures import Executor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

log = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class Turns(Generic[K]):
    """Semaphores by key, each for `most` calls at once. They exist while calls hold or await them.

    Args:
        threads: where `run_in_thread` runs; None: the threads that all calls share.
    """

    def __init__(self, most: int = 1, threads: Executor | None = None) -> None:
        self._most = most
        self._threads = threads
        self._semaphores: WeakValueDictionary[K, asyncio.Semaphore] = WeakValueDictionary()

    def of(self, key: K) -> asyncio.Semaphore:
        """The semaphore of a key, for an `async with` statement."""
        return self._semaphores.setdefault(key, asyncio.Semaphore(self._most))

    async def run_in_thread(self, key: K, work: Callable[..., T], *given: object) -> T:
        """Runs `work` in a thread while it holds a place of this key's semaphore, until `work` ends.

        `work` cannot be cancelled: a call that is cancelled waits for `work` to end, then raises
        CancelledError.
        """
        turn = self.of(key)
        await turn.acquire()
        try:
            running = asyncio.get_running_loop().run_in_executor(
                self._threads, partial(copy_context().run, work, *given)
            )
        except BaseException:  # there is no thread to be had
            turn.release()
            raise
        running.add_done_callback(lambda _: turn.release())
        return await _to_its_end(running)


async def in_thread(work: Callable[..., T], *given: object) -> T:
    """`asyncio.to_thread` for work that needs what its call holds.

    A call that is cancelled waits for `work` to end, then raises CancelledError.
    """
    return await _to_its_end(asyncio.ensure_future(asyncio.to_thread(work, *given)))


async def _to_its_end(running: "asyncio.Future[T]") -> T:
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            with suppress(asyncio.CancelledError):  # the client's cancel, then the end of the server's grace
                await asyncio.wait((running,))
        if not running.cancelled() and (error := running.exception()) is not None:
            log.warning("a call was cancelled, and what it had begun failed: %s", error)
        raise
