"""What orchestrators remember of sessions beyond the request that each is relaying.

Soft state: nothing a client was given depends on it, and every entry ends by itself. A store is one file and
one line in STORES.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple, Protocol

from outrider.wire.codec import SessionKey
from outrider.wire.workers import WorkerEntry

STORES = {
    "memory": "orchestrator.store.memory:MemoryStore",
    "redis": "orchestrator.store.redis:RedisStore",
}
LEASE_S = 300.0
"""How long what nobody renews is kept, in seconds."""
REPORT_S = 5.0
"""How long a report of a worker is believed, in seconds."""
STALE = -1
"""The length that `append` answers where a later epoch has the session."""


class StoreUnavailable(Exception):
    """The store cannot be reached, is too slow, or is left alone for a while after that."""


class SessionRecord(NamedTuple):
    """Where a session's current request runs."""

    key: SessionKey
    epoch: int
    verifier: str
    """host:port of the verifier that was asked to decode it."""
    choices: int = 1
    """How many sessions it has there, choice 0 to this less one; `key` is choice 0's."""
    cancelled: bool = False
    """Whether its client gave it up: nobody may go on with it."""
    request: int = 0
    """Which of the session's requests it is; see Admitted.mark. 0: not known."""

    def may_be(self, request: int) -> bool:
        """Whether it may be of the request with this mark."""
        return not (self.request and request) or self.request == request


class Append(NamedTuple):
    """Generated ids of one choice."""

    key: SessionKey
    epoch: int
    start: int
    """How many generated ids of this epoch's request come before them."""
    ids: Sequence[int]


class Tokens(NamedTuple):
    """What is recorded of a choice."""

    epoch: int
    ids: tuple[int, ...]
    """Generated ones."""


class Handle(NamedTuple):
    """Where the KV of a session's last request is, for its next one."""

    key: SessionKey
    epoch: int
    verifier: str
    length: int
    """Ids that are in it, prompt and generated ones."""
    prefix_hash: int
    """Over these ids."""


class WorkerReport(NamedTuple):
    """A verifier as one orchestrator sees it."""

    address: str
    reporter: str
    """The orchestrator."""
    model: str
    fingerprint: str
    """Tokenizer and numerics: what sessions can move between."""
    capacity: int
    """Sessions that it takes."""
    sessions: int
    """Those that the reporter has there."""
    step_s: float
    """Duration of a step as it last announced one, in seconds."""


class SessionStore(Protocol):
    """One record per session; of two for the same session the higher epoch stands.

    Every method may raise StoreUnavailable, and may then have been carried out all the same: each can be
    repeated.
    """

    async def put(self, records: Sequence[tuple[SessionRecord, int]]) -> list[bool]:
        """Keep these, and their leases, unless one with a higher epoch is there; whether each is kept.

        A recorded Cancel stays, but one of another request. So that a new request may be the same as the one
        before, Cancels under epochs below the second of a pair are lifted, too; 0: none.
        """

    async def find(self, key: SessionKey) -> SessionRecord | None:
        """The session's record, where there is one."""

    async def cancel(self, key: SessionKey) -> SessionRecord | None:
        """Mark the record as cancelled; as it was before, where there is one."""

    async def forget(self, key: SessionKey, epoch: int) -> None:
        """Drop the record, where it still is of this epoch; one that is cancelled stays for its lease."""

    async def append(self, appends: Sequence[Append]) -> list[int]:
        """Add ids to what is recorded, where its epoch is this one and it reaches their start.

        Ids that are recorded already are passed over. The first ids of a later epoch (start 0) replace those
        of an earlier one. Answers how many are recorded under the epoch then, or STALE.
        """

    async def tokens(self, key: SessionKey) -> Tokens | None:
        """What is recorded of a choice, where something is."""

    async def put_handle(self, handle: Handle) -> None:
        """Keep this one, unless one with a higher epoch is there."""

    async def handle(self, key: SessionKey) -> Handle | None:
        """The session's, where there is one."""

    async def put_prefixes(self, scope: str, hashes: Sequence[int], verifier: str) -> None:
        """The verifier has the KV of prefixes with these hashes; of one scope, a tenant's model."""

    async def longest_prefix(self, scope: str, hashes: Sequence[int]) -> tuple[int, str] | None:
        """The first of these hashes that is known, as its index, and its verifier."""

    async def report(self, reports: Sequence[WorkerReport]) -> None:
        """Keep these for REPORT_S seconds, each in place of the reporter's earlier one of the worker."""

    async def workers(self) -> list[WorkerReport]:
        """All that are still believed."""

    async def announce(self, entries: Sequence[WorkerEntry]) -> None:
        """Keep these workers for BELIEVED_S seconds, each in place of the earlier entry of its address."""

    async def announced(self) -> list[WorkerEntry]:
        """All that are still believed."""

    async def close(self) -> None:
        """Let go of connections."""


def open_store(name: str, *where: str) -> SessionStore:
    """The store of this name, `where` being the URL of one that has it. Nothing is dialled yet.

    Raises KeyError for a name that is not in STORES, ValueError for a URL that is none.
    """
    module, _, factory = STORES[name].partition(":")
    store: SessionStore = getattr(import_module(module), factory)(*where)
    return store
