"""Probes a remote source again and again for what it can draft for, for routing alone.

Sessions reach a source through their verifier, which dials it. So a source that is away keeps its description
here, and sessions may still be sent its way. Knows nothing of drafts.
"""

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc.aio

from orchestrator.fleet.compatibility import Refusal, contract_refusal
from orchestrator.fleet.peers import turn_to_call
from orchestrator.fleet.placement import SourceInfo
from outrider.v1 import draft_source_pb2
from outrider.v1.draft_source_pb2_grpc import DraftSourceStub
from outrider.wire.channel import DEFAULT_MESSAGE_MB, open_channel
from outrider.wire.names import MAX_SOURCES, checked_source_name
from outrider.wire.status import peer_text
from outrider.wire.tls import SOURCE, Certificates
from speculative.errors import InvalidRequest

if TYPE_CHECKING:
    from outrider.v1.draft_source_pb2_grpc import DraftSourceAsyncStub  # a name of the type stubs only

log = logging.getLogger(__name__)

DESCRIBE_S = 2.0
ASK_UNKNOWN_S = 0.25
"""Pause between two probes of a source that is out of reach, in seconds."""
ROUND_TRIPS = 8
"""Probes of which the fastest says how far away a source is; the others met a busy process."""
ASK_KNOWN_S = 2.0
"""Pause between two probes of a source that answers, in seconds."""


@dataclass(frozen=True, slots=True)
class DescribedSource:
    """A source's own description."""

    names: tuple[str, ...]
    """Names under which the source drafts; several where one process is several sources."""
    tokenizer_digest: str
    capacity: int
    """The most sessions that the source follows; 0: unknown."""
    tenant: str = ""
    """The only tenant that the source drafts for; empty: any tenant."""


class SourceProbe:
    """Knows one remote source. `run` it for as long as the source is wanted."""

    def __init__(
        self,
        address: str,
        *,
        max_message_mb: int = DEFAULT_MESSAGE_MB,
        certificates: Certificates | None = None,
        first_calls: asyncio.Semaphore | None = None,
    ) -> None:
        self.address = address
        self.described: DescribedSource | None = None
        """The source's description; None before the first one, and while its name is invalid."""
        self.reachable = False
        """Whether the source answered the last probe."""
        self.sessions = 0
        """Running sessions that this orchestrator has sent to the source."""
        self.refusal: Refusal | None = None
        """Why no session is sent to the source, where its own description is the reason."""
        self.drafted_for: set[str] = set()
        """Models that have accepted a token of the source's, by name."""
        self._answered = False
        self._round_trips_s: deque[float] = deque(maxlen=ROUND_TRIPS)
        """Durations of the last probes that were answered, in seconds."""
        self._first_calls = first_calls
        self._channel = open_channel(address, max_message_mb, certificates=certificates, role=SOURCE)
        self._stub: DraftSourceAsyncStub = DraftSourceStub(self._channel)

    def infos(self) -> list[SourceInfo]:
        """The source as placement sees it, once for each of its names; empty until it is described."""
        known = self.described
        if known is None:
            return []
        return [
            SourceInfo(
                self.address,
                name,
                known.tokenizer_digest,
                self.sessions,
                self.reachable,
                known.capacity,
                rank=rank,
                tenant=known.tenant,
                round_trip_s=min(self._round_trips_s, default=0.0),
            )
            for rank, name in enumerate(known.names)
        ]

    async def run(self) -> None:
        """Probe the source until cancelled."""
        try:
            while True:
                await self._probe()
                await asyncio.sleep(ASK_KNOWN_S if self.reachable else ASK_UNKNOWN_S)
        finally:
            await self._channel.close()

    def refuse(self, refusal: Refusal) -> None:
        """Send no session to the source for this reason; log the reason if it is new."""
        if refusal != self.refusal:
            self.refusal = refusal
            log.warning(
                "source ignored: %s", peer_text(refusal.why), extra={"fields": {"peer": self.address}}
            )

    async def _probe(self) -> None:
        was = self.reachable
        try:
            async with turn_to_call(self._first_calls, self._answered):
                request, began_s = draft_source_pb2.SourceDescribeRequest(), time.monotonic()
                message = await self._stub.Describe(request, timeout=DESCRIBE_S)
            if self.reachable:  # else the call also opened the connection
                self._round_trips_s.append(time.monotonic() - began_s)
            self.described = self._checked(message)
            self.reachable = self._answered = True
        except grpc.aio.AioRpcError as error:
            self.reachable = False
            why = peer_text(error.details() or "")
            log.debug("no answer", extra={"fields": {"peer": self.address, "why": why}})
        if self.reachable != was:
            log.info(
                "source %s", "reached" if self.reachable else "lost", extra={"fields": {"peer": self.address}}
            )

    def _checked(self, message: draft_source_pb2.SourceDescription) -> DescribedSource | None:
        """The description; None where the source cannot be used, and is refused."""
        if (refusal := contract_refusal(message.contract)) is not None:
            self.refuse(refusal)
            return None
        try:
            given = message.names or (message.name,)
            if len(given) > MAX_SOURCES:
                raise InvalidRequest(f"a source has {len(given)} names; at most {MAX_SOURCES}")
            names = tuple(dict.fromkeys(checked_source_name(name) for name in given))
        except InvalidRequest as error:
            self.refuse(Refusal("name", str(error)))
            return None
        found = DescribedSource(names, message.tokenizer_digest, message.max_sessions, message.tenant)
        if found != self.described:
            self.refusal = None
        return found
