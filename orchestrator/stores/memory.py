"""Session records in this process's memory: gone with it, invisible to other orchestrators."""

from orchestrator.stores import SessionRecord
from outrider.wire.codec import SessionKey


class MemoryStore:
    """A dict behind the store interface."""

    def __init__(self) -> None:
        self._records: dict[SessionKey, SessionRecord] = {}

    async def put(self, record: SessionRecord) -> None:
        known = self._records.get(record.key)
        if known is None or known.epoch <= record.epoch:
            self._records[record.key] = record

    async def find(self, key: SessionKey) -> SessionRecord | None:
        return self._records.get(key)

    async def forget(self, key: SessionKey, epoch: int) -> None:
        known = self._records.get(key)
        if known is not None and known.epoch == epoch:
            del self._records[key]
