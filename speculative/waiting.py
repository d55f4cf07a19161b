"""Fragments whose base is not known yet, bounded per source; knows nothing of trees."""

from speculative.fragment import Fragment


class WaitingRoom:
    """Keeps fragments until the prefix that they continue is drafted or committed.

    Args:
        capacity: largest number of fragments of one source; the oldest is dropped first.
    """

    __slots__ = ("_by_hash", "_by_source", "_capacity")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        # Dictionaries as ordered sets: a fragment waits once, and the oldest comes first.
        self._by_source: dict[int, dict[Fragment, None]] = {}
        self._by_hash: dict[int, list[Fragment]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_source.values()))

    def __contains__(self, fragment: Fragment) -> bool:
        return fragment in self._by_source.get(fragment.source, ())

    def add(self, fragment: Fragment) -> Fragment | None:
        """Adds a fragment; returns the fragment dropped for it, or None."""
        queue = self._by_source.setdefault(fragment.source, {})
        queue[fragment] = None
        self._by_hash.setdefault(fragment.prefix_hash, []).append(fragment)
        if len(queue) <= self._capacity:
            return None
        oldest = next(iter(queue))
        self._remove(oldest)
        return oldest

    def take(self, prefix_hash: int) -> list[Fragment]:
        """Removes and returns the fragments that wait for the prefix of this hash, the oldest first."""
        found = self._by_hash.get(prefix_hash)
        return self._remove_all(list(found)) if found else []

    def take_up_to(self, length: int) -> list[Fragment]:
        """Removes and returns the fragments that wait for a prefix of at most `length` ids."""
        return self._remove_all([f for queue in self._by_source.values() for f in queue if f.base <= length])

    def _remove_all(self, fragments: list[Fragment]) -> list[Fragment]:
        for fragment in fragments:
            self._remove(fragment)
        return fragments

    def _remove(self, fragment: Fragment) -> None:
        del self._by_source[fragment.source][fragment]
        same_base = self._by_hash[fragment.prefix_hash]
        same_base.remove(fragment)
        if not same_base:
            del self._by_hash[fragment.prefix_hash]
