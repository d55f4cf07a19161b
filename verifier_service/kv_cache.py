"""Keys and values of the sessions that run, and of prefixes that outlive them.

The engine thread owns it. A session begins with the blocks of its longest cached prefix; the blocks that it
fills with committed ids are cached at once, so that others find them while it still runs.
"""

from collections.abc import Sequence

from outrider.lm.blocks import BLOCK
from outrider.lm.plan import Share
from outrider.lm.pool import SlotPool
from outrider.lm.table import SlotTable, blocks_for
from verifier_service.portion import Portion
from verifier_service.prefix_cache import Name, Naming, PrefixCache
from verifier_service.scheduler import Need
from verifier_service.sessions import Session

_EVICTED_SHARE = 64
"""Of what is cached, the part that is evicted at a time at least."""


class _Held:
    """One session's table, and the names of its full blocks."""

    __slots__ = ("coming", "names", "salt", "table")

    def __init__(self, table: SlotTable, salt: Name, names: list[Name], coming: list[Name]) -> None:
        self.table = table
        self.salt = salt
        self.names = names
        self.coming = coming


class KVCache:
    """Tables by session handle.

    Args:
        pool: the target's.
        reuse: whether prefixes are found again.
        lease_s: for how long the blocks of a session that ended are evicted after others.
    """

    def __init__(self, pool: SlotPool, reuse: bool, lease_s: float) -> None:
        self.prefixes = PrefixCache(pool.blocks, BLOCK)
        self._pool = pool
        self._reuse = reuse
        self._lease_s = lease_s
        self._naming = Naming(BLOCK)
        self._held: dict[int, _Held] = {}
        self._coming: dict[Name, int] = {}  # blocks that a session is about to fill, and its handle
        self._now = 0.0
        self.released = 0
        """How often a session gave its table back: only then is there more room than before."""
        pool.evict = self._evict

    def __contains__(self, session: Session) -> bool:
        return session.handle in self._held

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return self._pool.free_blocks

    @property
    def available(self) -> int:
        """Blocks that are free or could be."""
        return self._pool.free_blocks + self.prefixes.evictable

    @property
    def running_slots(self) -> int:
        """Slots of the blocks that running sessions hold, shared ones once; from any thread."""
        tables = [held.table for held in list(self._held.values())]
        return BLOCK * len({block for table in tables for block in list(table.blocks)})

    def at(self, now: float) -> None:
        """The time, in seconds, from now on."""
        self._now = now

    def blocks_to_begin(self, session: Session) -> int:
        """Blocks that a session needs for what it has to compute, if nothing of it is cached."""
        return blocks_for(len(session.ids) + session.node_limit)

    def begin(self, session: Session) -> bool:
        """A session's table, with as much of its ids as is cached; whether it got one.

        It does not while another session is computing what it needs next: that is found cached soon.
        """
        salt = self._naming.salt(session.key.tenant)
        names: list[Name] = []
        blocks: list[int] = []
        if self._reuse:
            self._naming.extend(names, session.ids[:-1], salt)
            if self._is_coming(names):
                return False
            blocks = self.prefixes.match(names, len(session.ids), self._now)
        held = _Held(SlotTable(self._pool, session.slots), salt, names[: len(blocks)], names[len(blocks) :])
        self._held[session.handle] = held
        for name in held.coming:
            self._coming[name] = session.handle
        if blocks and self._pool.has_room(blocks_for(session.slots)):
            held.table.copy_of(blocks)
        else:
            held.table.adopt(blocks)
        session.resume_at(held.table.length)
        return True

    def need(self, session: Session, rows: int, nodes: int) -> Need:
        """Blocks that a step of so many pending ids and drafted nodes takes."""
        table = self._held[session.handle].table
        bare = table.lacks(session.cached + rows)
        drafted = table.lacks(session.cached + rows + nodes) - bare
        return Need(session.handle, len(table.blocks), bare, drafted)

    def share(self, session: Session, portion: Portion) -> Share:
        """A session's rows as the target takes them."""
        return Share(self._held[session.handle].table, portion.tokens, portion.parents, portion.want)

    def keep_rows(self, session: Session, path: Sequence[int]) -> None:
        """These rows of the last pass stay cached; the rest of the tree is off the path for good."""
        held = self._held[session.handle]
        held.table.keep(path)
        if self._reuse and held.table.length // BLOCK > len(held.names):
            first = len(held.names)
            self._naming.extend(held.names, session.ids[: held.table.length], held.salt)
            self.prefixes.publish(held.names, held.table.blocks, first, self._now)
            self._came(session, held)

    def release(self, session: Session) -> None:
        """Gives a session's table back, if it has one; what is cached of it stays until it is evicted."""
        held = self._held.pop(session.handle, None)
        if held is not None:
            self.released += 1
            held.table.close()
            self._came(session, held, everything=True)
            self.prefixes.lease(held.names, self._now + self._lease_s)

    def check(self) -> None:
        """Raises AssertionError if a block is lost or held by anybody it should not be."""
        self._pool.check_integrity([*(held.table.blocks for held in self._held.values()), self.prefixes.held])
        self.prefixes.check()

    def _is_coming(self, names: Sequence[Name]) -> bool:
        """Whether the first of these blocks that is not cached is being computed."""
        missing = next((name for name in names if name not in self.prefixes), None)
        return missing is not None and missing in self._coming

    def _came(self, session: Session, held: _Held, everything: bool = False) -> None:
        """What a session was about to fill is cached, or will never be."""
        while held.coming and (everything or held.coming[0] in self.prefixes):
            name = held.coming.pop(0)
            if self._coming.get(name) == session.handle:
                del self._coming[name]

    def _evict(self, blocks: int) -> int:
        # Looking for them takes the longer the more is cached, and the memory of a busy worker is full of it
        # at all times: so some more than are needed now.
        return self.prefixes.evict(max(blocks, len(self.prefixes) // _EVICTED_SHARE), self._now)
