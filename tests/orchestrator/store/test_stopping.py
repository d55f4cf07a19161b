"""What was being written when an orchestrator stops is written all the same."""

import asyncio
from collections.abc import Sequence

from orchestrator.store import SessionRecord
from orchestrator.store.ledger import Ledger
from orchestrator.store.memory import MemoryStore
from outrider.wire.codec import SessionKey
from outrider.wire.epochs import RANDOM_BITS, wall_clock_ms

KEY = SessionKey("", "mine")


class SlowStore(MemoryStore):
    """A store that answers its first put too late."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Event()

    async def put(self, records: Sequence[tuple[SessionRecord, int]]) -> list[bool]:
        if not self.asked.is_set():
            self.asked.set()
            await asyncio.sleep(100)
        return await super().put(records)


async def test_the_batch_that_a_stop_interrupts_is_written() -> None:
    store = SlowStore()
    ledger = Ledger(store, lambda seconds: None)
    ledger.start()
    record = SessionRecord(KEY, wall_clock_ms() << RANDOM_BITS, "a:1")
    ledger.opened(record, 0, {0: [1, 2]})
    await asyncio.wait_for(store.asked.wait(), 100)
    await ledger.stop()
    assert await store.find(KEY) == record
