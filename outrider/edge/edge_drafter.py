"""The blocking client whose requests a device drafts for; see `outrider.edge`."""

import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Unpack

from outrider.client import Chunk, Client, Completion, Stream
from outrider.client.endpoints import credentials_of, ends_at, patience_for, time_left
from outrider.client.open_streams import OpenStreams
from outrider.client.options import Options
from outrider.client.resuming import Resuming
from outrider.edge.backends import DraftModel
from outrider.edge.controller import Preference
from outrider.edge.drafted_request import DeviceControls, DraftedRequest
from outrider.edge.drafting import DraftingThread
from outrider.edge.local_answer import LocalCompletion, LocalRequest, LocalStream
from outrider.edge.offer import PATIENCE_S, EdgeOptions, offer, renew, shown_to, start_drafting
from outrider.edge.outbox import Outbox
from outrider.edge.transports import GrpcTransport, OpenedCall, Transport, WebTransport
from outrider.edge.websocket import WebAddress, is_url
from outrider.v1 import generation_pb2
from speculative.errors import InvalidRequest


class DraftedCall(Iterator[generation_pb2.GenerateResponse]):
    """One stream of a request: shows the drafting thread each response, and ends what the request sends.

    Args:
        received: takes each response.
        lost: called once, when the stream has ended.
    """

    def __init__(
        self,
        call: OpenedCall,
        outbox: Outbox,
        received: Callable[[generation_pb2.GenerateResponse], None],
        lost: Callable[[], None],
    ) -> None:
        self._call = call
        self._outbox = outbox
        self._received = received
        self._lost = lost
        self._over = False

    def __next__(self) -> generation_pb2.GenerateResponse:
        try:
            response: generation_pb2.GenerateResponse = next(self._call)
        except BaseException:
            self._end()
            raise
        self._received(response)
        return response

    def cancel(self) -> None:
        """Ends the stream, which cancels the request."""
        self._call.cancel()
        self._end()

    def _end(self) -> None:
        # The error of a broken stream holds the stream until Python collects garbage: by then the request may
        # have been resumed, and the drafting thread must not take this end for that of the next stream.
        if not self._over:
            self._over = True
            self._outbox.close()
            self._lost()

    def __del__(self) -> None:
        self.cancel()  # else the thread that sends would wait for messages for ever


class EdgeStream(DeviceControls, Stream):
    """An answer as it is generated, while the device drafts ahead; see `Stream`."""

    def __init__(
        self,
        ask: "Callable[[Resuming], DraftedCall]",
        resuming: Resuming,
        choices: int,
        request: DraftedRequest,
        drafting: DraftingThread,
    ) -> None:
        self._request = request
        self._drafting = drafting
        super().__init__(ask, resuming, choices)  # type: ignore[arg-type]  # it iterates and cancels, as gRPC's call

    def completion(self) -> Completion:
        """The whole answer; reads the rest of the stream. `device` is final afterwards."""
        completion = super().completion()
        self._drafting.idle()
        return completion

    def __next__(self) -> Chunk:
        try:
            return super().__next__()
        except BaseException:
            self._drafting.release(self._request)
            raise

    def close(self) -> None:
        """Cancels the request."""
        super().close()
        self._drafting.release(self._request)

    def __del__(self) -> None:
        self._drafting.release(self._request)


class EdgeDrafter(Client):
    """A client that drafts with a local model; the server verifies, so that the text is the server's own.

    One request at a time has drafts. Another request at the same time, a request for several answers, or one
    without speculation is answered without drafts, and its `device.trouble` says why. Safe to share between
    threads; close it, or use it as a context manager.
    """

    def __init__(
        self,
        address: str,
        draft_with: str | DraftModel,
        *,
        preference: str = Preference.BALANCED,
        mode: str | None = None,
        vocabulary: str | Path | None = None,
        patience_s: float = PATIENCE_S,
        wait_for_ready: bool = True,
        api_key: str | None = None,
        ca: str | Path | None = None,
        cert: str | Path | None = None,
        cert_key: str | Path | None = None,
    ) -> None:
        """Opens the local model at once, and connects at the first call.

        Args:
            address: host:port of an orchestrator, or several with commas between them. Or the URL of one
                orchestrator's HTTP API: then requests travel over a WebSocket, where networks let nothing
                else through, and `models`, `cancel` and `explain` reach nobody.
            draft_with: the URL of a running llama-server, a GGUF file (which needs the extra [edge-llama]), a
                folder with a Hugging Face model (which needs torch), or any object with the methods of
                `DraftModel`.
            preference: `latency` for the fewest milliseconds per token, `balanced` for the fewest passes of
                the target without being slower, `economy` for the fewest passes at up to four times the time
                per token, or at up to 100 ms per token where that is more.
            mode: `cloud`, `hinting`, `waiting` or `pipelined` fixes the mode; default: measurements decide.
            vocabulary: copy of the llama-server's GGUF file, if this machine cannot read the
                server's own path.
            patience_s: seconds for which the client tries to resume a request after a lost connection.
            wait_for_ready: False has a request fail at once if the cloud is away before the answer begins.
            api_key, ca, cert, cert_key: as for `Client`; a WebSocket sends no client certificate.

        Raises InvalidRequest for invalid arguments, OutriderError if the model cannot be opened.
        """
        self._options = EdgeOptions(preference, mode)
        self._wait_for_ready = wait_for_ready
        self._transport: Transport
        if is_url(address):
            # Not the client's own beginning: there is no channel.
            self._patience_s, self._channels, self._stubs = patience_for([address], patience_s), [], []
            self._streams = OpenStreams()
            self._transport = WebTransport(_web_address(address, api_key, ca, cert))
        else:
            super().__init__(
                address, patience_s=patience_s, api_key=api_key, ca=ca, cert=cert, cert_key=cert_key
            )
            self._transport = GrpcTransport(self._channels, self._stubs, self._metadata)
        self._drafting = start_drafting(draft_with, vocabulary)
        try:
            self._drafting.wait_open()
        except BaseException:
            self.close()
            raise
        self.device_enabled = True
        """Whether later requests use the device; False saves battery power and network traffic."""

    def stream(self, prompt: str | None = None, **options: Unpack[Options]) -> EdgeStream:
        """The answer as it is generated; sends the request at once. Raises OutriderError."""
        drafting, ends = self._drafting, ends_at(options)
        offered = offer(drafting, self._options, self.device_enabled, prompt, options)
        request, choices = offered.request, options.get("n") or 1

        def ask(resuming: Resuming) -> DraftedCall:
            renew(drafting, request, resuming.request)
            outbox = Outbox(resuming.request)
            received = shown_to(drafting, request, resuming.request, outbox.put)
            left = choices - len(resuming.request.start.ended)
            number, timeout = resuming.orchestrator, time_left(ends)
            with self._streams.beginning_a_call():
                call, request.ping = self._transport.open(number, outbox, left, timeout)
            return DraftedCall(call, outbox, received, lambda: drafting.lost(request))

        places, patience_s = self._transport.orchestrators, self._patience_s
        resuming = Resuming(
            offered.message, places, patience_s, ends=ends, wait_for_ready=self._wait_for_ready
        )
        return self._streams.add(EdgeStream(ask, resuming, choices, request, drafting))

    def stream_locally(self, prompt: str | None = None, **options: Unpack[Options]) -> LocalStream:
        """An answer of the device's own model, without the cloud: NOT the target's text.

        For times when `stream` raises Unavailable and the app prefers this text to none. The stream and its
        completion have `provenance` `local`. Raises OutriderError.
        """
        return LocalStream(self._drafting, LocalRequest.of(prompt, options))

    def generate_locally(self, prompt: str | None = None, **options: Unpack[Options]) -> LocalCompletion:
        """The whole answer of `stream_locally`. Raises OutriderError."""
        return self.stream_locally(prompt, **options).completion()

    @property
    def model_name(self) -> str:
        """Name of the local model."""
        return self._drafting.model_name

    def close(self) -> None:
        """Cancels running requests, closes all connections and frees the local model."""
        super().close()
        self._drafting.close()


def _web_address(url: str, api_key: str | None, ca: str | Path | None, cert: str | Path | None) -> WebAddress:
    """The WebSocket at a URL. Raises InvalidRequest."""
    if cert is not None:
        raise InvalidRequest(
            f"cert is given, but the WebSocket at {url} sends no client certificate; use gRPC"
        )
    context = None if ca is None else ssl.create_default_context(cafile=str(ca))
    return WebAddress(url, credentials_of(api_key, None, None, None).metadata, context)
