"""What orchestrators remember of sessions beyond the request that each is relaying.

Soft state: nothing a client was given depends on it. A store is one file and one line in STORES.
"""

from importlib import import_module
from typing import NamedTuple, Protocol

from outrider.wire.codec import SessionKey

STORES = {"memory": "orchestrator.stores.memory:MemoryStore"}


class SessionRecord(NamedTuple):
    """Where a session's current request runs."""

    key: SessionKey
    epoch: int
    verifier: str
    """host:port of the verifier that was asked to decode it."""
    choices: int = 1
    """How many sessions it has there, choice 0 to this less one; `key` is choice 0's."""


class SessionStore(Protocol):
    """One record per session; of two for the same session the higher epoch stands."""

    async def put(self, record: SessionRecord) -> None:
        """Keep this record, unless one with a higher epoch is there."""

    async def find(self, key: SessionKey) -> SessionRecord | None:
        """The session's record, where there is one."""

    async def forget(self, key: SessionKey, epoch: int) -> None:
        """Drop the record, where it still is of this epoch."""


def open_store(name: str) -> SessionStore:
    """The store of this name. Raises KeyError for a name that is not in STORES."""
    module, _, factory = STORES[name].partition(":")
    store: SessionStore = getattr(import_module(module), factory)()
    return store
