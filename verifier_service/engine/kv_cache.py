"""Keys and values of the running sessions, and of prefixes that outlive them.

A session begins with the blocks of its longest cached prefix. The blocks that it fills with committed ids are
cached at once, so that others find them while it still runs. Belongs to the engine's thread.
"""

from collections.abc import Sequence, Set
from functools import partial
from itertools import takewhile

from outrider.lm.kv.blocks import BLOCK
from outrider.lm.kv.pool import Run, SlotPool
from outrider.lm.kv.table import SlotTable, blocks_for
from outrider.lm.plan import SequenceRows
from speculative.reading_order import UnreadPrompt
from verifier_service.engine.prefix_cache import BlockHash, BlockHasher, PrefixCache
from verifier_service.engine.scheduler import Need
from verifier_service.engine.session import Session
from verifier_service.engine.step import StepRows

_EVICTED_SHARE = 64
"""An eviction gives back at least this part (1 / n) of the cached blocks."""


class _CachedSession:
    """One session's table, the hashes of its full blocks, and those of blocks that it is about to fill."""

    __slots__ = ("coming", "hashes", "is_outdated", "salt", "table", "tenant")

    def __init__(
        self,
        table: SlotTable,
        tenant: str,
        salt: BlockHash,
        hashes: list[BlockHash],
        coming: list[BlockHash],
    ) -> None:
        self.table = table
        self.tenant = tenant
        self.salt = salt
        self.hashes = hashes
        self.coming = coming
        self.is_outdated = False
        """Whether nobody may begin with the session's blocks."""


class KVCache:
    """The slot tables of running sessions over the target's pool, and the prefix cache.

    Args:
        pool: the target's.
        reuse: whether a session begins with cached blocks.
        lease_s: seconds for which the blocks of an ended session are evicted after others.
    """

    def __init__(self, pool: SlotPool, reuse: bool, lease_s: float) -> None:
        self.prefixes = PrefixCache(pool.blocks, BLOCK, pool)
        self.pool = pool
        """Slots of all sessions."""
        self._reuse = reuse
        self._lease_s = lease_s
        self._hasher = BlockHasher(BLOCK)
        self._held: dict[int, _CachedSession] = {}
        self._coming: dict[BlockHash, int] = {}  # handle of the session that is about to fill a block
        self._awaited: dict[BlockHash, list[int]] = {}  # handles of the sessions that begin behind it
        self._arrived: list[int] = []
        self._now = 0.0
        self.released = 0
        """Number of tables given back so far; only then is there more room than before."""
        pool.evict = self._evict

    def __contains__(self, session: Session) -> bool:
        return session.handle in self._held

    @property
    def free(self) -> int:
        """Number of blocks that nobody holds."""
        return self.pool.free_blocks

    @property
    def available(self) -> int:
        """Number of blocks that are free or can be evicted."""
        return self.pool.free_blocks + self.prefixes.evictable

    @property
    def running_slots(self) -> int:
        """Number of slots in blocks that running sessions hold, shared ones once; from any thread."""
        tables = [held.table for held in list(self._held.values())]
        return BLOCK * len({block for table in tables for block in list(table.blocks)})

    def at(self, now: float) -> None:
        """Sets the time, in seconds, for leases and eviction."""
        self._now = now

    def blocks_to_begin(self, session: Session) -> int:
        """Number of blocks that a session needs to begin, if none of its ids is cached."""
        return blocks_for(len(session.ids) + session.node_limit)

    def unread(self, session: Session) -> UnreadPrompt:
        """What the target has to compute of a session before it goes on, in the words of `reading_order`."""
        ids = session.ids[:-1]
        if not self._reuse:
            return UnreadPrompt(session.handle, (), session.uncomputed)
        hashes: list[BlockHash] = []
        self._hasher.extend(hashes, ids, self._salt(session))
        cached = next((at for at, hash_ in enumerate(hashes) if hash_ not in self.prefixes), len(hashes))
        first = max(cached, session.cached // BLOCK)
        return UnreadPrompt(session.handle, hashes[first:], len(session.ids) - len(hashes) * BLOCK)

    def begin(self, session: Session) -> bool:
        """Gives a session a table with as many of its ids as are cached; returns whether it got one.

        It gets none while another session computes the block that it needs next: that will be cached soon.
        The session is then among those that `take_arrived` returns, once it may begin.
        """
        salt = self._salt(session)
        hashes: list[BlockHash] = []
        # A prompt that is scored is computed from its first token on: cached blocks hold no logits.
        finds = self._reuse and (session.scorer is None or session.scorer.done)
        if finds:
            self._hasher.extend(hashes, session.ids[:-1], salt)
            if (coming := self._last_coming(hashes)) is not None:
                self._awaited.setdefault(coming, []).append(session.handle)
                return False
        # The table comes first: it may take the place of a state behind a cached block.
        table = self.pool.table(session.slots)
        blocks = self.prefixes.match(hashes, len(session.ids), self._now) if finds else []
        held = _CachedSession(
            table,
            session.key.tenant,
            salt,
            hashes[: len(blocks)],
            hashes[len(blocks) :],
        )
        self._held[session.handle] = held
        for hash_ in held.coming:
            self._coming[hash_] = session.handle
        if blocks and self.pool.has_room(blocks_for(session.slots)):
            held.table.copy_of(blocks)
        else:
            held.table.adopt(blocks)
        session.resume_at(held.table.length)
        return True

    def take_arrived(self) -> list[int]:
        """Handles of the sessions that `begin` let wait and that need not wait any longer."""
        arrived, self._arrived = self._arrived, []
        return arrived

    def surely_fit(self, rows: int, sessions: int) -> bool:
        """Whether this many rows more fit into free blocks, however they are spread over these sessions."""
        return rows // BLOCK + sessions <= self.free

    def need(self, session: Session, rows: int, nodes: int) -> Need:
        """Blocks that a session's step of `rows` uncomputed ids and `nodes` drafted nodes takes."""
        table = self._held[session.handle].table
        slots, held = session.cached + rows, len(table.blocks)
        bare = max(0, blocks_for(slots) - held)
        drafted = max(0, blocks_for(slots + nodes) - held) - bare
        return Need(session.handle, held, bare, drafted)

    def sequence_rows(self, session: Session, step_rows: StepRows) -> SequenceRows:
        """A session's rows of a step, as the target takes them."""
        return SequenceRows(
            self._held[session.handle].table,
            step_rows.tokens,
            step_rows.parents,
            step_rows.want,
            partial(session.asks, step_rows) if step_rows.wanted else None,
            session.contrast,
        )

    def runs(self, session: Session, low: int, high: int) -> tuple[Run, ...]:
        """The runs of slots that hold, or will hold, the session's positions `low` to `high - 1`."""
        return tuple(self._held[session.handle].table.runs(low, high))

    def block(self, session: Session, position: int) -> int:
        """The block that holds this position of a session."""
        return self._held[session.handle].table.blocks[position // BLOCK]

    def blocks(self, session: Session) -> Sequence[int]:
        """The blocks that a session holds, in order of position; none without memory."""
        held = self._held.get(session.handle)
        return () if held is None else held.table.blocks

    def keep_rows(self, session: Session, path: Sequence[int]) -> None:
        """Keeps these rows of the last pass, which are committed now, and frees the others."""
        held = self._held[session.handle]
        held.table.keep(path)
        if self._reuse and not held.is_outdated and held.table.length // BLOCK > len(held.hashes):
            first = len(held.hashes)
            self._hasher.extend(held.hashes, session.ids[: held.table.length], held.salt)
            self.prefixes.publish(held.hashes, held.table.blocks, first, self._now, held.tenant)
            self._came(session.handle, held, set(held.hashes[first:]))

    def forget(self, tenant: str) -> None:
        """Has no session of a tenant begin with what was computed so far, be it cached or not.

        What a running session computes behind such positions is not cached, either. An empty name means all
        tenants.
        """
        self.prefixes.forget(tenant)
        for handle, held in self._held.items():
            if held.table.length and tenant in ("", held.tenant):
                held.is_outdated = True
                held.hashes.clear()
                self._came(handle, held, set(held.coming))

    def release(self, session: Session) -> None:
        """Gives a session's table back, if it has one; its cached blocks stay until they are evicted."""
        held = self._held.pop(session.handle, None)
        if held is not None:
            self.released += 1
            held.table.close()
            self._came(session.handle, held, set(held.coming))
            self.prefixes.lease(held.hashes, self._now + self._lease_s)

    def check(self) -> None:
        """Raises AssertionError if a block is lost, or held by anyone but tables and prefix cache."""
        self.pool.check_integrity([*(held.table.blocks for held in self._held.values()), self.prefixes.held])
        self.prefixes.check()

    def _salt(self, session: Session) -> BlockHash:
        """The hash before a session's first block."""
        # Eager and compiled passes differ in the last bits, so no prefix of one kind is found by the other.
        # A session that contrasts needs blocks that an amateur has computed as well.
        kind = "plain" if session.contrast is None else "contrasting"
        return self._hasher.salt(session.key.tenant, self.pool.numerics, kind)

    def _last_coming(self, hashes: Sequence[BlockHash]) -> BlockHash | None:
        """The last of these blocks, from the first one that is not cached on, that are all being computed."""
        missing = (hash_ for hash_ in hashes if hash_ not in self.prefixes)
        coming = list(takewhile(self._coming.__contains__, missing))
        return coming[-1] if coming else None

    def _came(self, handle: int, held: _CachedSession, gone: Set[BlockHash]) -> None:
        """Notes that a session will not fill the blocks in `gone` any more, nor those that are cached by now.

        A block that was filled is not cached if a block in front of it was evicted.
        """
        while held.coming and (held.coming[0] in gone or held.coming[0] in self.prefixes):
            hash_ = held.coming.pop(0)
            if self._coming.get(hash_) == handle:
                del self._coming[hash_]
                self._arrived += self._awaited.pop(hash_, ())

    def _evict(self, blocks: int) -> int:
        # The search takes longer the more is cached, and a busy worker's memory is always full of cached
        # blocks. So each search gives back some more than are needed now.
        return self.prefixes.evict(blocks, self._now, len(self.prefixes) // _EVICTED_SHARE)
