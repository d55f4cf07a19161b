"""Calls the orchestrator's HTTP API: for a conversation's ids, a model's facts, and what apps ask."""

import http.client
import json
import ssl
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from outrider.wire.incoming.http_url import http_url
from speculative.errors import InvalidRequest, Unavailable

TIMEOUT_S = 600.0
"""Seconds without a byte from the cloud after which a call is given up."""
FACTS_S = 30.0
"""Seconds for which a model's facts are kept."""
MOST_BYTES = 1 << 28
"""Most bytes of an answer that is read whole."""
HOP_BY_HOP = frozenset(
    (
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization"),
        *("te", "trailer", "transfer-encoding", "upgrade"),
    )
)
"""Headers that concern one connection, and are not passed on."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts that the cloud gives about a model."""

    name: str
    max_length: int
    sampling: Mapping[str, Any]
    """Sampling parameters of requests that set none."""
    parses_chat: bool
    """Whether the cloud makes more than text of an answer to a conversation, such as reasoning."""


class Cloud:
    """Calls of the HTTP API at `url`. For any thread: each call has a connection of its own.

    Args:
        url: http or https, host and port of the orchestrator's HTTP front.
        api_key: key to send with every call; None: calls keep the app's own credentials.
        ca: file with the certificates to trust.

    Raises:
        InvalidRequest: `url` is no URL of an HTTP server, or `ca` holds no certificates.
    """

    def __init__(self, url: str, api_key: str | None = None, ca: str | Path | None = None) -> None:
        split = http_url(url)
        if split is None or split.hostname is None:
            raise InvalidRequest(f"{url!r} is not the URL of an orchestrator, such as https://cloud.example")
        self.url = url
        self._host, self._port, self._base = split.hostname, split.port, split.path.rstrip("/")
        self._context = None
        if split.scheme == "https":
            self._context = _trusting(ca)
        self._api_key = api_key
        self._facts: dict[str, tuple[float, ModelFacts]] = {}
        self._lock = threading.Lock()

    def call(
        self, method: str, path: str, headers: Iterable[tuple[str, str]], body: bytes | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Sends a call on; the caller reads the answer, and closes the connection.

        Raises:
            Unavailable: the cloud cannot be reached.
        """
        if self._context is None:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)
        else:
            connection = http.client.HTTPSConnection(
                self._host, self._port, timeout=TIMEOUT_S, context=self._context
            )
        sent = {name: value for name, value in headers if name.lower() not in {*HOP_BY_HOP, "host", "origin"}}
        sent = {name: value for name, value in sent.items() if name.lower() != "content-length"}
        if self._api_key is not None:
            sent = {name: value for name, value in sent.items() if name.lower() != "authorization"}
            sent["Authorization"] = f"Bearer {self._api_key}"
        try:
            connection.request(method, self._base + path, body, sent)
            return connection, connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise Unavailable(f"{self.url} cannot be reached: {error or type(error).__name__}") from error

    def facts(self, model: str, headers: Iterable[tuple[str, str]]) -> ModelFacts | None:
        """Facts of a model, for an empty name of the only model; None if the cloud refuses."""
        now = time.monotonic()
        with self._lock:
            read, known = self._facts.get(model, (0.0, None))
        if known is not None and now < read + FACTS_S:
            return known
        path = f"/v1/models/{quote(model, safe='')}" if model else "/v1/models"
        found = self._json("GET", path, headers, None)
        if not model and found is not None:
            listed = found.get("data")
            found = listed[0] if isinstance(listed, list) and len(listed) == 1 else None
        if not isinstance(found, dict) or not isinstance(found.get("sampling_defaults"), dict):
            return None
        facts = ModelFacts(
            str(found["id"]),
            int(found["max_model_len"]),
            found["sampling_defaults"],
            found.get("parses_chat") is not False,  # an older cloud does not say
        )
        with self._lock:
            if len(self._facts) > 64:  # apps make names up
                self._facts.clear()
            self._facts[model] = now, facts
        return facts

    def ids_of(
        self, messages: tuple[Any, ...], model: str, headers: Iterable[tuple[str, str]]
    ) -> tuple[int, ...] | None:
        """Token ids of a conversation in the model's chat template; None if the cloud refuses."""
        asked: dict[str, Any] = {"messages": messages} | ({"model": model} if model else {})
        found = self._json("POST", "/tokenize", headers, json.dumps(asked).encode())
        ids = None if found is None else found.get("tokens")
        return tuple(ids) if isinstance(ids, list) and all(type(id_) is int for id_ in ids) else None

    def _json(
        self, method: str, path: str, headers: Iterable[tuple[str, str]], body: bytes | None
    ) -> dict[str, Any] | None:
        named = [(name, value) for name, value in headers if name.lower() == "authorization"]
        if body is not None:
            named.append(("Content-Type", "application/json"))
        connection, response = self.call(method, path, named, body)
        try:
            read = json.loads(response.read(MOST_BYTES)) if response.status == 200 else None
        except (OSError, ValueError, http.client.HTTPException):
            return None
        finally:
            connection.close()
        return read if isinstance(read, dict) else None


def _trusting(ca: str | Path | None) -> ssl.SSLContext:
    """A context that trusts the certificates in this file; None: those that the system trusts."""
    try:
        return ssl.create_default_context(cafile=None if ca is None else str(ca))
    except OSError as error:  # ssl's own errors are among them
        raise InvalidRequest(f"ca {str(ca)!r} holds no certificates that can be read: {error}") from error
