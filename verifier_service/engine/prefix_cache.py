"""Full blocks of committed ids that outlive their sessions, found again by what they hold.

A block's hash is a keyed 128-bit hash over its parent block's hash and its own ids; the first parent is a
salt of the tenant. The key belongs to the process, which has one target and no adapters. So equal hashes
mean equal ids of one target from the first position on, and no tenant finds another's blocks. The cache is
one more holder of each block that it knows. It evicts blocks that nobody else holds, the end of a chain
before its beginning: those whose lease has ended first, then the least recently used. A lease orders eviction
and never keeps a running session from memory. Pure: blocks are numbers, time is an argument.
"""

import hashlib
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Protocol

import numpy as np

BlockHash = bytes


class Holders(Protocol):
    """The part of a block allocator that the cache uses."""

    def holders(self, block: int) -> int:
        """Number of a block's holders."""

    def share(self, blocks: Iterable[int]) -> None:
        """Adds a holder to each block."""

    def give(self, blocks: Iterable[int]) -> None:
        """Takes a holder from each block."""


class Resumption(Protocol):
    """Where a session can go on: the part of a pool that knows what is kept beside the blocks."""

    def resumable(self, blocks: Sequence[int]) -> Sequence[int]:
        """The longest beginning of these cached blocks behind which a session can go on."""

    def same(self, cached: int, own: int) -> None:
        """Notes that block `own` holds what block `cached` holds."""


class BlockHasher:
    """Hashes blocks. Its key is drawn per process, so nobody can aim at a hash."""

    def __init__(self, block: int, key: bytes | None = None) -> None:
        self._block = block
        self._key = key or secrets.token_bytes(16)

    def salt(self, *parts: str) -> BlockHash:
        """The parent hash of a first block. No two lists of parts share one."""
        encoded = [part.encode("utf-8", "surrogatepass") for part in parts]
        return self._digest(b"".join(len(part).to_bytes(8, "little") + part for part in encoded))

    def extend(self, hashes: list[BlockHash], ids: Sequence[int], salt: BlockHash) -> None:
        """Appends the hashes of the full blocks of `ids` that `hashes` does not have yet."""
        for at in range(len(hashes), len(ids) // self._block):
            part = np.asarray(ids[at * self._block : (at + 1) * self._block], dtype=np.uint32)
            hashes.append(self._digest((hashes[-1] if hashes else salt) + part.tobytes()))

    def _digest(self, data: bytes) -> BlockHash:
        return hashlib.blake2b(data, digest_size=16, key=self._key).digest()


@dataclass(slots=True)
class _Entry:
    block: int
    parent: BlockHash | None
    """The parent's hash, where the parent is cached."""
    tenant: str
    children: int = 0
    used: float = 0.0
    lease_until: float = 0.0


@dataclass(slots=True)
class CacheCounts:
    """Counts of the prefix cache: tokens asked for and found, and blocks evicted."""

    asked: int = 0
    hit: int = 0
    evicted_blocks: int = 0


class PrefixCache:
    """Cached blocks by hash.

    Args:
        holders: the block allocator.
        block: number of ids in a block.
        resumption: knows behind which cached blocks a session can go on; None: behind all.
    """

    def __init__(self, holders: Holders, block: int, resumption: Resumption | None = None) -> None:
        self.counts = CacheCounts()
        self._resumption = resumption
        self._holders = holders
        self._block = block
        self._entries: dict[BlockHash, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, hash_: BlockHash) -> bool:
        return hash_ in self._entries

    @property
    def held(self) -> list[int]:
        """Numbers of the blocks that the cache holds."""
        return [entry.block for entry in self._entries.values()]

    @property
    def evictable(self) -> int:
        """Number of blocks that `evict` could give back: those that nobody else holds."""
        return sum(map(self._is_lone, self._entries.values()))

    def match(self, hashes: Sequence[BlockHash], length: int, now: float) -> list[int]:
        """Blocks of the longest cached beginning of `length` ids; the last id is always left to compute."""
        self.counts.asked += length
        found: list[int] = []
        for hash_ in hashes[: (length - 1) // self._block]:
            entry = self._entries.get(hash_)
            if entry is None:
                break
            entry.used = now
            found.append(entry.block)
        if self._resumption is not None:
            found = list(self._resumption.resumable(found))
        self.counts.hit += len(found) * self._block
        return found

    def publish(
        self, hashes: Sequence[BlockHash], blocks: Sequence[int], first: int, now: float, tenant: str = ""
    ) -> None:
        """Caches a tenant's blocks from index `first` on, except those whose hash is cached already."""
        for at in range(first, len(hashes)):
            hash_ = hashes[at]
            if (known := self._entries.get(hash_)) is not None:
                if self._resumption is not None and known.block != blocks[at]:
                    self._resumption.same(known.block, blocks[at])
                continue
            parent = hashes[at - 1] if at and hashes[at - 1] in self._entries else None
            if at and parent is None:
                return  # what is before it was evicted: nothing would find it
            self._holders.share([blocks[at]])
            self._entries[hash_] = _Entry(blocks[at], parent, tenant, used=now)
            if parent is not None:
                self._entries[parent].children += 1

    def lease(self, hashes: Sequence[BlockHash], until: float) -> None:
        """Has the cached ones of these blocks evicted after others, until the time `until`."""
        for hash_ in hashes:
            if (entry := self._entries.get(hash_)) is not None:
                entry.lease_until = max(entry.lease_until, until)

    def evict(self, blocks: int, now: float, most: int = 0) -> int:
        """Gives back `blocks` blocks if it can, and up to `most` at the ends of chains; returns their number.

        A session that copied a prefix, or computed it beside another session, has cached blocks behind blocks
        that the session does not hold. If memory requires it, the cache forgets the session's blocks, so that
        the blocks in front of them can be given back.
        """
        leaves = [self._rank(hash_, now) for hash_, entry in self._entries.items() if self._is_leaf(entry)]
        given = self._give_back(leaves, max(blocks, most), now)
        # Behind what is given back there may be another held end, with more blocks in front of it.
        while given < blocks and (covering := self._covering(now)):
            for hash_ in covering:
                leaves = [] if (leaf := self._uncover(hash_)) is None else [self._rank(leaf, now)]
                given += self._give_back(leaves, blocks - given, now)
                if given >= blocks:
                    break
        self.counts.evicted_blocks += given
        return given

    def forget(self, tenant: str) -> None:
        """Gives the cached blocks of a tenant up; empty: of all tenants."""
        gone = [hash_ for hash_, entry in self._entries.items() if tenant in ("", entry.tenant)]
        self._holders.give([self._entries.pop(hash_).block for hash_ in gone])
        self.counts.evicted_blocks += len(gone)

    def _give_back(self, leaves: list[tuple[float, float, BlockHash]], blocks: int, now: float) -> int:
        """Gives back up to `blocks` blocks, beginning with these leaves; returns their number."""
        heapify(leaves)
        given = 0
        while leaves and given < blocks:
            parent = self._forget(heappop(leaves)[-1])
            given += 1
            if parent is not None and self._is_leaf(self._entries[parent]):
                heappush(leaves, self._rank(parent, now))
        return given

    def _covering(self, now: float) -> list[BlockHash]:
        """Held ends of chains that have a block in front which nobody holds, in order of eviction."""
        found = []
        for hash_, entry in self._entries.items():
            if entry.children or self._is_lone(entry):
                continue
            above = entry.parent
            while above is not None and not self._is_lone(self._entries[above]):
                above = self._entries[above].parent
            if above is not None:
                found.append(self._rank(hash_, now))
        return [rank[-1] for rank in sorted(found)]

    def _uncover(self, hash_: BlockHash) -> BlockHash | None:
        """Forgets a held end of a chain up to the first lone block; returns that block if now a leaf."""
        above = self._forget(hash_)
        while above is not None and not self._entries[above].children:
            if self._is_lone(self._entries[above]):
                return above
            above = self._forget(above)
        return None

    def check(self) -> None:
        """Raises AssertionError where a chain of cached blocks is not whole."""
        children = dict.fromkeys(self._entries, 0)
        for entry in self._entries.values():
            if entry.parent is not None:
                assert entry.parent in self._entries, "a cached block's parent was evicted before it"
                children[entry.parent] += 1
        assert all(self._entries[hash_].children == count for hash_, count in children.items())

    def _is_leaf(self, entry: _Entry) -> bool:
        return not entry.children and self._is_lone(entry)

    def _is_lone(self, entry: _Entry) -> bool:
        return self._holders.holders(entry.block) == 1

    def _rank(self, hash_: BlockHash, now: float) -> tuple[float, float, BlockHash]:
        entry = self._entries[hash_]
        return (entry.lease_until if entry.lease_until > now else 0.0, entry.used, hash_)

    def _forget(self, hash_: BlockHash) -> BlockHash | None:
        """Forgets the end of a chain, and gives up its block; returns the hash of its parent."""
        entry = self._entries.pop(hash_)
        self._holders.give([entry.block])
        if entry.parent is not None:
            self._entries[entry.parent].children -= 1
        return entry.parent
