"""Keys and values of the simulated verifiers: counted in blocks, never computed."""

from collections.abc import Sequence

from verifier_service.scheduler import Need
from verifier_service.sessions import Session

BLOCK = 16


def _blocks(rows: int) -> int:
    return -(-rows // BLOCK)


class CountedMemory:
    """Stands in for KVCache: so many blocks, taken as sessions grow."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self.held: dict[int, int] = {}
        """Blocks by session handle."""
        self.released = 0
        """Sessions that gave back what they had, so far."""

    def __contains__(self, session: Session) -> bool:
        return session.handle in self.held

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return self._blocks - sum(self.held.values())

    available = free

    def at(self, now: float) -> None:
        """Nothing is cached for a while."""

    def blocks_to_begin(self, session: Session) -> int:
        """As KVCache has it."""
        return _blocks(len(session.ids) + session.node_limit)

    def begin(self, session: Session) -> bool:
        """Nothing is cached of anybody."""
        self.held[session.handle] = 0
        session.resume_at(0)
        return True

    def need(self, session: Session, rows: int, nodes: int) -> Need:
        """Blocks that a step takes."""
        held = self.held[session.handle]
        bare = max(0, _blocks(session.cached + rows) - held)
        drafted = max(0, _blocks(session.cached + rows + nodes) - held - bare)
        return Need(session.handle, held, bare, drafted)

    def take(self, session: Session, rows: int) -> None:
        """A step computes so many rows of a session."""
        self.held[session.handle] = max(self.held[session.handle], _blocks(session.cached + rows))
        assert self.free >= 0, f"{-self.free} blocks more than there are"

    def keep_rows(self, session: Session, path: Sequence[int]) -> None:
        """After a step: rows off the path are free again."""
        self.held[session.handle] = _blocks(session.cached)

    def release(self, session: Session) -> None:
        """Gives back what a session has."""
        if self.held.pop(session.handle, None) is not None:
            self.released += 1
