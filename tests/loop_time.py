"""How much processor time the event loop's thread spends in one callback."""

import asyncio.events
import time
from collections.abc import Iterator
from contextlib import contextmanager


class LongestCallback:
    """The longest callback so far, in milliseconds of the thread's processor time."""

    ms = 0.0


@contextmanager
def longest_callback() -> Iterator[LongestCallback]:
    """Measures every callback of this thread's event loop while the context lasts."""
    longest, run = LongestCallback(), asyncio.events.Handle._run

    def measured(handle: asyncio.events.Handle) -> None:
        began = time.thread_time()
        run(handle)
        longest.ms = max(longest.ms, 1000 * (time.thread_time() - began))

    asyncio.events.Handle._run = measured  # type: ignore[method-assign]
    try:
        yield longest
    finally:
        asyncio.events.Handle._run = run  # type: ignore[method-assign]
