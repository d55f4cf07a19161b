"""Calls that wait for each other without holding threads: those of one tenant, or for one corpus."""

import asyncio
from collections.abc import Hashable
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

K = TypeVar("K", bound=Hashable)


class Turns(Generic[K]):
    """Semaphores by key, each for `most` calls at once. They exist while calls hold or await them."""

    def __init__(self, most: int = 1) -> None:
        self._most = most
        self._semaphores: WeakValueDictionary[K, asyncio.Semaphore] = WeakValueDictionary()

    def of(self, key: K) -> asyncio.Semaphore:
        """The semaphore of a key, for an `async with` statement."""
        return self._semaphores.setdefault(key, asyncio.Semaphore(self._most))
