"""Measures how long callbacks keep an event loop to themselves."""

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

MOST_S = 0.020
"""The most processor time of a callback before a request is admitted, in seconds."""


@dataclass
class Longest:
    """The longest callback of an event loop."""

    processor_s: float = 0.0
    """Processor time of the loop's thread, which other processes on the machine do not change."""
    what: str = ""

    @property
    def ms(self) -> float:
        """The same processor time in ms."""
        return self.processor_s * 1e3


@contextmanager
def longest_callback() -> Iterator[Longest]:
    """Watches the callbacks of this thread's event loop."""
    longest, thread, run = Longest(), threading.get_ident(), asyncio.Handle._run

    def measured(handle: asyncio.Handle) -> None:
        if threading.get_ident() != thread:
            run(handle)
            return
        what, began = repr(handle), time.thread_time()
        run(handle)
        if (took := time.thread_time() - began) > longest.processor_s:
            longest.processor_s, longest.what = took, what

    gc.collect()
    gc.freeze()  # what the tests before have left is none of the loop's work
    try:
        with mock.patch.object(asyncio.Handle, "_run", measured):
            yield longest
    finally:
        gc.unfreeze()
