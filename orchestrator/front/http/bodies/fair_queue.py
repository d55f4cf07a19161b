"""A bounded queue in which owners take turns, however much one of them puts in. Pure."""

from collections import Counter, OrderedDict, deque
from typing import Generic, TypeVar

from speculative.errors import Overloaded

RETRY_AFTER_S = 1.0
Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """Items of owners, who are served in turn.

    Args:
        most: items that may wait, of all owners.
        most_each: items of one owner that may be worked on at once.
    """

    def __init__(self, most: int, most_each: int) -> None:
        self._most = most
        self._most_each = most_each
        self._waiting: OrderedDict[str, deque[Item]] = OrderedDict()
        self._count = 0
        self._running: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._count

    def put(self, owner: str, item: Item) -> None:
        """Add an item. Raises Overloaded where the queue is full, or half full of this owner's items."""
        own = len(self._waiting.get(owner, ()))
        if self._count >= self._most or own >= max(1, self._most // 2):
            raise Overloaded(f"{self._count} large bodies wait to be read here", RETRY_AFTER_S)
        self._waiting.setdefault(owner, deque()).append(item)
        self._count += 1

    def take(self) -> tuple[str, Item] | None:
        """The next item and its owner, who then waits behind the others; None: nothing may begin now.

        To be followed by `done`.
        """
        for owner, items in self._waiting.items():
            if self._running[owner] < self._most_each:
                item = items.popleft()
                self._waiting.move_to_end(owner)
                if not items:
                    del self._waiting[owner]
                self._count -= 1
                self._running[owner] += 1
                return owner, item
        return None

    def discard(self, owner: str, item: Item) -> None:
        """Take out an item of this owner, if it still waits."""
        items = self._waiting.get(owner)
        if items is None or item not in items:
            return
        items.remove(item)
        self._count -= 1
        if not items:
            del self._waiting[owner]

    def empty(self) -> list[Item]:
        """Takes out all items that wait."""
        items = [item for waiting in self._waiting.values() for item in waiting]
        self._waiting.clear()
        self._count = 0
        return items

    def done(self, owner: str) -> None:
        """Count an item of this owner as done."""
        self._running[owner] -= 1
        if not self._running[owner]:
            del self._running[owner]
