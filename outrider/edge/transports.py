"""How a blocking drafter reaches orchestrators: gRPC, or a WebSocket on the port of the HTTP API."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import grpc
from grpc_health.v1 import health_pb2

from outrider.client.endpoints import CONTROL_S
from outrider.edge.drafted_request import Ping
from outrider.edge.outbox import Outbox
from outrider.edge.websocket import WebAddress, WebSocketCall
from outrider.v1 import generation_pb2
from outrider.v1.generation_pb2_grpc import GenerationStub

HEALTH = "/grpc.health.v1.Health/Check"


class OpenedCall(Iterator[generation_pb2.GenerateResponse], Protocol):
    """The responses to one request."""

    def cancel(self) -> object:
        """Ends the stream, which cancels the request."""


class Transport(Protocol):
    """Opens streams at one of several orchestrators."""

    orchestrators: int
    """How many orchestrators there are."""

    def open(
        self, number: int, outbox: Outbox, choices: int, timeout: float | None
    ) -> tuple[OpenedCall, Ping]:
        """A stream at orchestrator `number`, and what measures round trips there.

        Args:
            choices: number of choices of the request.
            timeout: seconds until the request is cancelled; None: never.
        """


class GrpcTransport:
    """Streams over a client's channels; `metadata` goes with every call."""

    def __init__(
        self,
        channels: Sequence[grpc.Channel],
        stubs: Sequence[GenerationStub],
        metadata: tuple[tuple[str, str], ...],
    ) -> None:
        self.orchestrators = len(stubs)
        self._channels, self._stubs, self._metadata = channels, stubs, metadata

    def open(
        self, number: int, outbox: Outbox, choices: int, timeout: float | None
    ) -> tuple[OpenedCall, Ping]:
        """See Transport."""
        call: Any = self._stubs[number].Generate(outbox, timeout=timeout, metadata=self._metadata)
        return call, self._pinging(number)

    def _pinging(self, number: int) -> Ping:
        """A function that measures a round trip, and never blocks."""
        check = self._channels[number].unary_unary(
            HEALTH,
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )

        def ping(done: Callable[[float], None]) -> None:
            began = time.monotonic()

            def answered(future: "grpc.Future[Any]") -> None:
                if not future.cancelled() and future.exception() is None:
                    done(1000 * (time.monotonic() - began))

            with contextlib.suppress(ValueError):  # the channel is closed
                check.future(
                    health_pb2.HealthCheckRequest(), timeout=CONTROL_S, metadata=self._metadata
                ).add_done_callback(answered)

        return ping


class WebTransport:
    """Streams over WebSockets at one address."""

    orchestrators = 1

    def __init__(self, address: WebAddress) -> None:
        self._address = address

    def open(
        self, number: int, outbox: Outbox, choices: int, timeout: float | None
    ) -> tuple[OpenedCall, Ping]:
        """See Transport."""
        call = WebSocketCall(self._address, outbox, choices, timeout)
        return call, call.ping
