"""Turns of calls that work in threads."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from retrieval_service.turns import Turns


class NoThreads(ThreadPoolExecutor):
    """An executor of a machine that has no thread to spare, until `has_room`."""

    has_room = False

    def submit(self, *given, **named):  # type: ignore[no-untyped-def, override]
        if not self.has_room:
            raise RuntimeError("can't start new thread")
        return super().submit(*given, **named)


async def test_a_turn_comes_back_where_no_thread_can_be_started() -> None:
    threads = NoThreads(1)
    turns: Turns[str] = Turns(1, threads)
    held = turns.of("a")  # as by a call that waits
    with pytest.raises(RuntimeError, match="new thread"):
        await turns.run_in_thread("a", int)
    assert not held.locked()
    threads.has_room = True
    assert await asyncio.wait_for(turns.run_in_thread("a", int, "7"), 60) == 7
    threads.shutdown()
