"""The port at which verifiers attach to the source `edge`; clients have no business there."""

from collections.abc import Sequence

import grpc
import grpc.aio

from orchestrator.edge.source import EdgeSource
from outrider.v1.draft_source_pb2_grpc import add_DraftSourceServicer_to_server
from outrider.wire.bind_errors import bind_failure
from outrider.wire.channel import server_options
from outrider.wire.incoming.unparsed import unparsed
from speculative.errors import InvalidRequest

WILDCARDS = ("0.0.0.0", "[::]")
STOP_S = 0.2


class EdgeServer:
    """Serves an EdgeSource at `bind`, host:port; port 0 picks a free port.

    Raises Unavailable if the address cannot be bound, InvalidRequest if verifiers could not dial it.

    Args:
        advertise: host:port that verifiers dial; empty: the bound address.
        max_message_mb: largest message in MiB from a verifier, which introduces whole sessions.
        credentials: the server's certificate; None: connections are not encrypted.
        interceptors: decide who may attach.
    """

    def __init__(
        self,
        source: EdgeSource,
        bind: str,
        advertise: str,
        max_message_mb: int,
        credentials: grpc.ServerCredentials | None = None,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    ) -> None:
        host = bind.rpartition(":")[0]
        if not advertise and host in WILDCARDS:
            raise InvalidRequest(
                f"edge_bind is {bind}, which verifiers cannot dial; give --edge-advertise HOST:PORT"
            )
        self.source = source
        self._server = grpc.aio.server(options=server_options(max_message_mb), interceptors=interceptors)
        add_DraftSourceServicer_to_server(source, unparsed(self._server))
        try:
            if credentials is None:
                port = self._server.add_insecure_port(bind)
            else:
                port = self._server.add_secure_port(bind, credentials)
        except RuntimeError as error:
            raise bind_failure("the edge source", bind, "orchestrator", "edge_bind", error) from error
        self.address = advertise or f"{host}:{port}"
        """host:port that verifiers dial."""

    async def start(self) -> None:
        """Begins to serve verifiers."""
        await self._server.start()

    async def stop(self) -> None:
        """Ends all streams; sessions continue without their devices."""
        self.source.stop()
        await self._server.stop(STOP_S)
