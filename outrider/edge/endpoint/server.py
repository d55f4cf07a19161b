"""Serves OpenAI's API on this machine: the cloud answers every call, and the device drafts if it can."""

import contextlib
import http.client
import json
import logging
import re
import secrets
import socket
import threading
import time
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from outrider.edge.edge_drafter import EdgeDrafter, EdgeStream
from outrider.edge.endpoint.asked import PATHS, AskedBody, read_body, with_defaults
from outrider.edge.endpoint.cloud import HOP_BY_HOP, Cloud
from outrider.edge.endpoint.formats import AnswerFormat, broken_off, error_of
from outrider.edge.endpoint.page import page_of
from outrider.edge.local_answer import LOCAL, LocalStream
from outrider.wire.incoming.http_url import named_host, path_of
from speculative.errors import InvalidRequest, OutriderError, Unavailable

log = logging.getLogger(__name__)

LENGTH = re.compile("[0-9]{1,18}")
"""A Content-Length; str.isdigit takes digits that int does not."""
MOST_BODY = 64 << 20
"""Most bytes of an app's request body."""
IDLE_S = 120.0
"""Seconds after which an app's silent connection is closed."""
PIECE = 1 << 16
UNREACHABLE = "Outrider-Unreachable"
"""Header of a call whose app takes the device's own text while the cloud cannot be reached: `local`."""


class EdgeEndpoint:
    """The endpoint; a context that serves until it is left.

    Args:
        drafter: sends the requests that the device drafts for.
        cloud: answers all other requests.
        host, port: address to listen at, an IPv6 host in brackets; port 0 picks a free port.

    Attributes:
        url: http://HOST:PORT; apps find the API below /v1.

    Raises:
        InvalidRequest: the address cannot be bound.
    """

    def __init__(self, drafter: EdgeDrafter, cloud: Cloud, host: str = "127.0.0.1", port: int = 0) -> None:
        self.drafter, self.cloud = drafter, cloud
        self.latest: EdgeStream | None = None
        """The latest request that the device drafted for."""
        try:
            self._server = _Server(host, port, self)
        except OSError as error:
            raise InvalidRequest(f"{host}:{port} cannot be bound: {error.strerror}") from error
        self.hosts = {"localhost", "127.0.0.1", "::1", host.strip("[]")}
        """Host names in apps' calls; a page of another site would use its own host name."""
        self.url = f"http://{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True)

    def explain(self) -> dict[str, Any]:
        """The device's contribution to the latest request, with the reason for its mode."""
        latest = self.latest
        if latest is None:
            return {"device": None, "explain": None}
        return {"device": asdict(latest.device), "explain": latest.explain()}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, host: str, port: int, endpoint: EdgeEndpoint) -> None:
        self.endpoint = endpoint
        if host.startswith("["):
            self.address_family = socket.AF_INET6
        super().__init__((host.strip("[]"), port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.exception("an app's connection failed")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = IDLE_S
    server: _Server

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_DELETE(self) -> None:
        self._answer()

    def _answer(self) -> None:
        """Answers one call; ignores errors of an app that has disconnected."""
        with contextlib.suppress(ConnectionError, TimeoutError):
            body = self._body()
            if body is None or self._is_foreign():
                return
            path = path_of(self.path)
            if self.command == "GET" and path == "/edge":
                self._explain()
            elif self.command == "POST" and path in PATHS and self._drafted(body, chat=PATHS[path]):
                pass  # answered
            else:
                self._pass_on(body, path)

    def _explain(self) -> None:
        """How the device is used: a page for browsers, else an object."""
        explained = self.server.endpoint.explain()
        if "text/html" in self.headers.get("Accept", ""):
            self._send(200, "text/html; charset=utf-8", page_of(explained))
        else:
            self._send_json(200, explained)

    def _body(self) -> bytes | None:
        """The call's body; None if the endpoint refused the body."""
        length = self.headers.get("Content-Length", "0")
        if "Transfer-Encoding" in self.headers or not LENGTH.fullmatch(length) or int(length) > MOST_BODY:
            self.close_connection = True
            self._send_json(411, error_of("send Content-Length, up to 64 MiB", "invalid_request_error"))
            return None
        return self.rfile.read(int(length))

    def _is_foreign(self) -> bool:
        """Whether a page of another site calls; if so, the endpoint has refused the call."""
        named = self.headers.get("Host", "")
        origin = self.headers.get("Origin")
        if named_host(named) in self.server.endpoint.hosts and (
            origin is None or origin.partition("://")[2] == named
        ):
            return False
        self._send_json(403, error_of("this endpoint is for programs on this machine", "permission_error"))
        return True

    def _drafted(self, data: bytes, *, chat: bool) -> bool:
        """Answers with the device's drafts; returns False, before sending anything, if the cloud must
        answer."""
        asked = read_body(data, chat=chat)
        if asked is None:
            return False
        try:
            found = self._stream(asked)
            if found is None:
                return False
            stream, form = found
            first = next(stream, None)
        except OutriderError as error:
            log.info("the cloud answers alone: %s", error)
            return False
        try:
            if asked.stream:
                self._send_events(stream, first, form, usage=asked.usage)
            else:
                self._send_json(200, form.whole(stream.completion(), stream.device))
        except OutriderError as error:  # of a whole answer: nothing was sent
            self._send_json(503, broken_off(error))
        finally:
            stream.close()
        return True

    def _stream(self, asked: AskedBody) -> tuple[EdgeStream, AnswerFormat] | None:
        """The running request; None if the cloud must answer without the device. Raises OutriderError."""
        endpoint, headers = self.server.endpoint, self.headers.items()
        facts = endpoint.cloud.facts(asked.model, headers)
        if facts is None:
            return None
        prompt, ids, limit = asked.prompt, None, None
        if asked.messages:
            if facts.parses_chat:  # only the cloud can tell an answer's reasoning from its content
                return None
            ids = endpoint.cloud.ids_of(asked.messages, asked.model, headers)
            if not ids or len(ids) >= facts.max_length:
                return None
            limit = facts.max_length - len(ids)
        elif not isinstance(prompt, str):
            ids = prompt
        options = with_defaults(asked.options, facts.sampling, limit)
        text = prompt if ids is None and isinstance(prompt, str) else None
        if ids is not None:
            options["ids"] = ids
        options["model"] = facts.name
        stream = endpoint.drafter.stream(text, **options)
        endpoint.latest = stream
        number = secrets.token_hex(12)
        return stream, AnswerFormat(not asked.prompt, number, facts.name, int(time.time()))

    def _send_events(
        self, stream: EdgeStream | LocalStream, first: Any, form: AnswerFormat, *, usage: bool
    ) -> None:
        self._begin(
            200, [("Content-Type", "text/event-stream; charset=utf-8"), ("Cache-Control", "no-cache")]
        )
        try:
            if first is not None:
                self._event(form.event(first, first=True))
            for chunk in stream:
                self._event(form.event(chunk, first=False))
            completion = stream.completion()
            report = stream.device if isinstance(stream, EdgeStream) else None
            self._event(form.last(completion, report))
            if usage:
                self._event(form.usage(completion))
            self._chunk(b"data: [DONE]\n\n")
        except OutriderError as error:
            self._event(broken_off(error))
        self._chunk(b"")

    def _event(self, event: dict[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n")

    def _answer_alone(self, data: bytes, path: str) -> str | None:
        """Answers by the device's own model; returns why the model cannot, and sends nothing then."""
        if PATHS.get(path) is not False:
            return "its model answers nothing but /v1/completions"
        asked = read_body(data, chat=False)
        if asked is None:
            return "its model takes a prompt, limits, stops and sampling parameters, for one answer"
        drafter, prompt, options = self.server.endpoint.drafter, asked.prompt, asked.options
        form = AnswerFormat(False, secrets.token_hex(12), drafter.model_name, int(time.time()), LOCAL)
        try:
            if not isinstance(prompt, str):
                options["ids"] = prompt
            with drafter.stream_locally(prompt if isinstance(prompt, str) else None, **options) as stream:
                first = next(stream, None)
                if asked.stream:
                    self._send_events(stream, first, form, usage=asked.usage)
                else:
                    self._send_json(200, form.whole(stream.completion(), None))
        except OutriderError as error:
            log.warning("the device cannot answer alone: %s", error)
            return str(error)
        return None

    def _pass_on(self, body: bytes, path: str) -> None:
        """Passes the call to the cloud unchanged, and the cloud's answer to the app."""
        try:
            connection, response = self.server.endpoint.cloud.call(
                self.command, self.path, self.headers.items(), body or None
            )
        except Unavailable as error:
            if self.headers.get(UNREACHABLE, "").lower() != LOCAL:
                self._send_json(502, error_of(str(error)))
            elif (why := self._answer_alone(body, path)) is not None:
                self._send_json(502, error_of(f"{error}; the device cannot answer alone: {why}"))
            return
        with contextlib.closing(connection):
            kept = [(name, value) for name, value in response.getheaders() if name.lower() not in _NOT_KEPT]
            self._begin(response.status, kept)
            try:
                while piece := response.read1(PIECE):
                    self._chunk(piece)
            except (OSError, http.client.HTTPException) as error:
                log.warning("the cloud's answer broke off: %s", error)
                self.close_connection = True  # an app sees that the answer is not whole
                return
            self._chunk(b"")

    def _begin(self, status: int, headers: list[tuple[str, str]]) -> None:
        """Sends a status and headers, ahead of the pieces of the body."""
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _send_json(self, status: int, answer: dict[str, Any]) -> None:
        self._send(status, "application/json", json.dumps(answer, separators=(",", ":")).encode())

    def _send(self, status: int, kind: str, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Logs nothing: an app's calls are its own."""


_NOT_KEPT = HOP_BY_HOP | {"content-length", "date", "server"}
