"""Memory for bodies that arrive: shared, so that no client takes what others need. Pure."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from speculative.errors import Overloaded

FREE_BYTES = 8_192
"""Size of bodies that count for nothing: the bound on connections bounds them."""
RETRY_AFTER_S = 1.0


class HeldMemory:
    """The memory that one body holds."""

    def __init__(self, shared: "BodyMemory", owner: str) -> None:
        self._shared = shared
        self._owner = owner
        self._size = 0

    def grow(self, size: int) -> None:
        """Hold `size` bytes in all, if that is more than before. Raises Overloaded."""
        if size > max(self._size, FREE_BYTES):
            self._shared.take(self._owner, size - self._size)
            self._size = size

    def release(self) -> None:
        """Hold nothing any more."""
        self._shared.give(self._owner, self._size)
        self._size = 0


class BodyMemory:
    """Memory for all bodies. An owner may hold as much as is left free: half of all, if nobody else asks."""

    def __init__(self, size: int) -> None:
        self._free = size
        self._held: Counter[str] = Counter()

    @contextmanager
    def held(self, owner: str) -> Iterator[HeldMemory]:
        """Memory for one body of this owner, for as long as the context lasts."""
        memory = HeldMemory(self, owner)
        try:
            yield memory
        finally:
            memory.release()

    def take(self, owner: str, size: int) -> None:
        """Take this many bytes more for an owner. Raises Overloaded."""
        if self._held[owner] + size > self._free - size:
            raise Overloaded("large bodies that are on their way fill the memory for them", RETRY_AFTER_S)
        self._held[owner] += size
        self._free -= size

    def give(self, owner: str, size: int) -> None:
        """Give bytes of an owner back."""
        self._held[owner] -= size
        self._free += size
        if not self._held[owner]:
            del self._held[owner]
