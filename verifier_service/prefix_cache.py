"""Full blocks of committed ids that outlive their sessions, found again by what they hold.

A block's name is a keyed 128-bit hash over its parent block's name and its own ids, and the first parent is a
salt of the tenant. The key is the process's own, which holds one target and no adapters. So equal names mean
equal ids of one target from the first position on, and no tenant finds another's. The cache holds each
block that it names once more. Evicted are blocks that nobody else holds and that no cached block continues,
those whose lease has ended first, then the least recently used; a lease orders eviction and never keeps a
running session from memory. Pure: blocks are numbers, time is an argument.
"""

import hashlib
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Protocol

import numpy as np

Name = bytes


class Holders(Protocol):
    """The part of a block allocator that the cache uses."""

    def holders(self, block: int) -> int:
        """How many hold it."""

    def share(self, blocks: Iterable[int]) -> None:
        """One holder more of each."""

    def give(self, blocks: Iterable[int]) -> None:
        """One holder fewer of each."""


class Naming:
    """How blocks are named. The key is drawn per process, so nobody can aim at a name."""

    def __init__(self, block: int, key: bytes | None = None) -> None:
        self._block = block
        self._key = key or secrets.token_bytes(16)

    def salt(self, *parts: str) -> Name:
        """The parent of a first block; parts are told apart whatever they hold."""
        encoded = [part.encode("utf-8", "surrogatepass") for part in parts]
        return self._digest(b"".join(len(part).to_bytes(8, "little") + part for part in encoded))

    def extend(self, names: list[Name], ids: Sequence[int], salt: Name) -> None:
        """Adds to the names of the first full blocks of `ids` those of the others."""
        for at in range(len(names), len(ids) // self._block):
            part = np.asarray(ids[at * self._block : (at + 1) * self._block], dtype=np.uint32)
            names.append(self._digest((names[-1] if names else salt) + part.tobytes()))

    def _digest(self, data: bytes) -> Name:
        return hashlib.blake2b(data, digest_size=16, key=self._key).digest()


@dataclass(slots=True)
class _Entry:
    block: int
    parent: Name | None
    """Only where the parent is cached."""
    children: int = 0
    used: float = 0.0
    lease_until: float = 0.0


@dataclass(slots=True)
class CacheCounts:
    """What the cache did, in tokens but for evictions."""

    asked: int = 0
    hit: int = 0
    evicted_blocks: int = 0


class PrefixCache:
    """Cached blocks by name.

    Args:
        holders: of the blocks.
        block: ids of a block.
    """

    def __init__(self, holders: Holders, block: int) -> None:
        self.counts = CacheCounts()
        self._holders = holders
        self._block = block
        self._entries: dict[Name, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: Name) -> bool:
        return name in self._entries

    @property
    def held(self) -> list[int]:
        """Blocks that the cache holds."""
        return [entry.block for entry in self._entries.values()]

    @property
    def evictable(self) -> int:
        """Blocks that `evict` could give back: nobody else holds them, nor any that continue them.

        A session that began with a copy of a prefix holds what it added, and not what that continues.
        """
        lone = {
            name: entry for name, entry in self._entries.items() if self._holders.holders(entry.block) == 1
        }
        needed: set[Name] = set()
        for name, entry in self._entries.items():
            parent = None if name in lone else entry.parent
            while parent is not None and parent not in needed:
                needed.add(parent)
                parent = self._entries[parent].parent
        return len(lone.keys() - needed)

    def match(self, names: Sequence[Name], length: int, now: float) -> list[int]:
        """Blocks of the longest cached beginning of `length` ids, of which the last is left to compute."""
        self.counts.asked += length
        found: list[int] = []
        for name in names[: (length - 1) // self._block]:
            entry = self._entries.get(name)
            if entry is None:
                break
            entry.used = now
            found.append(entry.block)
        self.counts.hit += len(found) * self._block
        return found

    def publish(self, names: Sequence[Name], blocks: Sequence[int], first: int, now: float) -> None:
        """Caches the blocks from number `first` on, but those whose ids are cached already."""
        for at in range(first, len(names)):
            name = names[at]
            if name in self._entries:
                continue
            parent = names[at - 1] if at and names[at - 1] in self._entries else None
            if at and parent is None:
                return  # what is before it was evicted: nothing would find it
            self._holders.share([blocks[at]])
            self._entries[name] = _Entry(blocks[at], parent, used=now)
            if parent is not None:
                self._entries[parent].children += 1

    def lease(self, names: Sequence[Name], until: float) -> None:
        """Those of these blocks that are cached are evicted after others, until then."""
        for name in names:
            if (entry := self._entries.get(name)) is not None:
                entry.lease_until = max(entry.lease_until, until)

    def evict(self, blocks: int, now: float) -> int:
        """Gives back up to so many blocks; returns how many."""
        leaves = [self._rank(name, now) for name, entry in self._entries.items() if self._is_leaf(entry)]
        heapify(leaves)
        given = 0
        while leaves and given < blocks:
            name = heappop(leaves)[-1]
            parent = self._forget(name)
            given += 1
            if parent is not None and self._is_leaf(self._entries[parent]):
                heappush(leaves, self._rank(parent, now))
        self.counts.evicted_blocks += given
        return given

    def check(self) -> None:
        """Raises AssertionError where chains are not whole."""
        children = dict.fromkeys(self._entries, 0)
        for entry in self._entries.values():
            if entry.parent is not None:
                assert entry.parent in self._entries, "a cached block's parent was evicted before it"
                children[entry.parent] += 1
        assert all(self._entries[name].children == count for name, count in children.items())

    def _is_leaf(self, entry: _Entry) -> bool:
        return not entry.children and self._holders.holders(entry.block) == 1

    def _rank(self, name: Name, now: float) -> tuple[float, float, Name]:
        entry = self._entries[name]
        return (entry.lease_until if entry.lease_until > now else 0.0, entry.used, name)

    def _forget(self, name: Name) -> Name | None:
        """Gives a leaf's block back; returns its parent."""
        entry = self._entries.pop(name)
        self._holders.give([entry.block])
        if entry.parent is not None:
            self._entries[entry.parent].children -= 1
        return entry.parent
