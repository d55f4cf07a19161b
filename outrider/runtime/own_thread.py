"""Threads for one job that computes, which end with the job."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_own_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs `work`, which computes with torch, off the event loop, in a thread that ends with it.

    Each thread that computes with OpenMP keeps a team of compute threads until it ends. While all teams of a
    process together are larger than the number of cores, OpenMP's threads sleep at each barrier and no longer
    spin, so a pass takes several times as long. A thread of a pool, as of asyncio.to_thread, would keep its
    team beside that of the thread that serves.

    Raises what `work` raises. Whoever is cancelled does not wait for `work`. Context variables are not handed
    over, and children that are tied to the thread (`die_with_parent`) end with it.
    """
    executor = ThreadPoolExecutor(1, "one-job")
    try:
        return await asyncio.get_running_loop().run_in_executor(executor, lambda: work(*args, **kwargs))
    finally:
        executor.shutdown(wait=False)
