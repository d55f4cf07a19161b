"""What the remote sources at the listed addresses can draft for; asked again and again, for routing alone.

Sessions reach a source through their verifier, which dials it. So one that is away is remembered as it
described itself, and a session may still be sent its way. Knows nothing of drafts.
"""

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc.aio

from orchestrator.fleet.compatibility import Refusal, other_contract
from orchestrator.fleet.placement import Drafting
from outrider.v1 import draft_source_pb2
from outrider.v1.draft_source_pb2_grpc import DraftSourceStub
from outrider.wire.channel import DEFAULT_MESSAGE_MB, open_channel
from outrider.wire.names import checked_source_name
from outrider.wire.status import peer_text
from outrider.wire.tls import SOURCE, Certificates
from speculative.errors import InvalidRequest

if TYPE_CHECKING:
    from outrider.v1.draft_source_pb2_grpc import DraftSourceAsyncStub  # a name of the type stubs only

log = logging.getLogger(__name__)

DESCRIBE_S = 2.0
ASK_UNKNOWN_S = 0.25
ASK_KNOWN_S = 2.0


@dataclass(frozen=True, slots=True)
class SourceName:
    """What a source said of itself."""

    names: tuple[str, ...]
    """Under which it drafts; several where one process is several sources."""
    tokenizer_digest: str
    capacity: int
    """Sessions that it follows; 0: not known."""


class SourceLink:
    """One remote source. `run` for as long as it is to be known."""

    def __init__(
        self,
        address: str,
        *,
        max_message_mb: int = DEFAULT_MESSAGE_MB,
        certificates: Certificates | None = None,
    ) -> None:
        self.address = address
        self.said: SourceName | None = None
        """None until it has described itself once, and while its name cannot be one."""
        self.reachable = False
        self.sessions = 0
        """Sessions that this orchestrator has sent its way and that still run."""
        self.refusal: Refusal | None = None
        """Why no session is sent its way, where what it says of itself is the reason."""
        self._channel = open_channel(address, max_message_mb, certificates=certificates, role=SOURCE)
        self._stub: DraftSourceAsyncStub = DraftSourceStub(self._channel)

    def drafting(self) -> list[Drafting]:
        """As placement sees it, under each of its names; none while nobody knows what it is."""
        said = self.said
        if said is None:
            return []
        return [
            Drafting(self.address, name, said.tokenizer_digest, self.sessions, self.reachable, said.capacity)
            for name in said.names
        ]

    async def run(self) -> None:
        """Ask until cancelled."""
        try:
            while True:
                await self._ask()
                await asyncio.sleep(ASK_KNOWN_S if self.reachable else ASK_UNKNOWN_S)
        finally:
            await self._channel.close()

    def ignored(self, refusal: Refusal) -> None:
        """No session is sent its way for this reason; it is logged when it is a new one."""
        if refusal != self.refusal:
            self.refusal = refusal
            log.warning(
                "source ignored: %s", peer_text(refusal.why), extra={"fields": {"peer": self.address}}
            )

    async def _ask(self) -> None:
        was = self.reachable
        try:
            said = await self._stub.Describe(draft_source_pb2.SourceDescribeRequest(), timeout=DESCRIBE_S)
            self.said = self._checked(said)
            self.reachable = True
        except grpc.aio.AioRpcError as error:
            self.reachable = False
            why = peer_text(error.details() or "")
            log.debug("no answer", extra={"fields": {"peer": self.address, "why": why}})
        if self.reachable != was:
            log.info(
                "source %s", "reached" if self.reachable else "lost", extra={"fields": {"peer": self.address}}
            )

    def _checked(self, said: draft_source_pb2.SourceDescription) -> SourceName | None:
        if (refusal := other_contract(said.contract)) is not None:
            self.ignored(refusal)
            return None
        try:
            names = tuple(dict.fromkeys(checked_source_name(name) for name in said.names or (said.name,)))
        except InvalidRequest as error:
            self.ignored(Refusal("name", str(error)))
            return None
        found = SourceName(names, said.tokenizer_digest, said.max_sessions)
        if found != self.said:
            self.refusal = None
        return found
