"""Stores: what orchestrators remember of sessions beyond the requests that they relay now.

Soft state: nothing that a client was given depends on a store, and every entry expires by itself. A store is
one file and one line in STORES.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from outrider.wire.codec import SessionKey
from outrider.wire.workers import WorkerEntry
from speculative.implementations import load_implementation

STORES = {
    "memory": "orchestrator.store.memory:MemoryStore",
    "redis": "orchestrator.store.redis:RedisStore",
}
LEASE_S = 300.0
"""How long an entry is kept after its last renewal, in seconds."""
REPORT_S = 5.0
"""How long a report of a worker is believed, in seconds."""
STALE = -1
"""The length that `append` returns where a later epoch has the session."""


class StoreUnavailable(Exception):
    """The store cannot be reached, is too slow, or is left alone for a while after such a failure."""


class SessionRecord(NamedTuple):
    """Record of the verifier and the epoch that a session's current request runs under."""

    key: SessionKey
    epoch: int
    verifier: str
    """host:port of the verifier that was asked to decode the session."""
    choices: int = 1
    """Number of choices, each a session there; `key` is the key of choice 0."""
    cancelled: bool = False
    """Whether the client cancelled the request: no orchestrator may go on with it."""
    request: int = 0
    """The request's mark, which tells the session's requests apart; see AdmittedRequest.mark. 0: unknown."""

    def may_be(self, request: int) -> bool:
        """Whether the record may belong to the request with this mark."""
        return not (self.request and request) or self.request == request


class Append(NamedTuple):
    """Generated tokens to add to the record of one choice."""

    key: SessionKey
    epoch: int
    start: int
    """How many generated tokens of this epoch's request come before these."""
    ids: Sequence[int]


class Tokens(NamedTuple):
    """The generated tokens on record of one choice."""

    epoch: int
    ids: tuple[int, ...]


class Handle(NamedTuple):
    """Which verifier has the keys and values of a session's last request, for the session's next request."""

    key: SessionKey
    epoch: int
    verifier: str
    length: int
    """Number of tokens, prompt and generated ones."""
    prefix_hash: int
    """Hash of these tokens."""


class WorkerReport(NamedTuple):
    """A verifier as one orchestrator sees it."""

    address: str
    reporter: str
    """Random id of the orchestrator's process."""
    model: str
    fingerprint: str
    """Tokenizer digest and numerics: sessions move only between verifiers that agree on them."""
    capacity: int
    """The most sessions that the verifier takes."""
    sessions: int
    """Sessions that the reporter has there."""
    step_s: float
    """Expected duration of the verifier's last step, in seconds."""


class SessionStore(Protocol):
    """Keeps one record per session; of two records of a session, the one with the higher epoch stands.

    Every method may raise StoreUnavailable after it was carried out all the same; each can be repeated.
    """

    async def put(self, records: Sequence[tuple[SessionRecord, int]]) -> list[bool]:
        """Keep and renew these records, each unless one with a higher epoch is there; whether each is kept.

        A recorded Cancel of the same request stays. A new request may have the mark of the one before it; so
        the second item of each pair lifts Cancels that were recorded under epochs below it (0: none).
        """

    async def find(self, key: SessionKey) -> SessionRecord | None:
        """The session's record; None where the store has none."""

    async def cancel(self, key: SessionKey) -> SessionRecord | None:
        """Mark the session's record as cancelled; the record as it was before, if any."""

    async def forget(self, key: SessionKey, epoch: int) -> None:
        """Drop the session's record if it is of this epoch; a cancelled record stays until its lease ends."""

    async def append(self, appends: Sequence[Append]) -> list[int]:
        """Add tokens to records of the same epoch that reach their start.

        Tokens that are on record already are skipped. The first tokens of a later epoch (start 0) replace the
        tokens of an earlier one. Returns, for each append, how many tokens are on record under its epoch
        then, or STALE.
        """

    async def tokens(self, key: SessionKey) -> Tokens | None:
        """The tokens on record of a choice, if any."""

    async def put_handle(self, handle: Handle) -> None:
        """Keep this handle, unless one with a higher epoch is there."""

    async def handle(self, key: SessionKey) -> Handle | None:
        """The session's handle; None where the store has none."""

    async def put_prefixes(self, scope: str, hashes: Sequence[int], verifier: str) -> None:
        """Record that the verifier has the keys and values of prefixes with these hashes.

        A scope is a tenant's model: prefixes of one scope are never found in another.
        """

    async def longest_prefix(self, scope: str, hashes: Sequence[int]) -> tuple[int, str] | None:
        """Index of the first of these hashes that is on record, and its verifier; None: none is on record."""

    async def report(self, reports: Sequence[WorkerReport]) -> None:
        """Keep these reports for REPORT_S seconds.

        Each takes the place of the reporter's earlier report on the same worker.
        """

    async def workers(self) -> list[WorkerReport]:
        """All reports of verifiers that have not expired."""

    async def announce(self, entries: Sequence[WorkerEntry]) -> None:
        """Keep these workers for BELIEVED_S seconds, each in place of the earlier entry of its address."""

    async def announced(self) -> list[WorkerEntry]:
        """All announced workers whose entries have not expired."""

    async def close(self) -> None:
        """Close the store's connections."""


def open_store(name: str, *where: str) -> SessionStore:
    """The store of this name; `where` is its URL and the PEM files of its TLS, if it has any. Dials nothing.

    Raises KeyError for a name that is not in STORES, ValueError for an invalid URL.
    """
    store: SessionStore = load_implementation(STORES, name)(*where)
    return store
