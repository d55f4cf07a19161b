"""Embeddings from a server: any that answers OpenAI's `POST /v1/embeddings`.

Ids become text here, for such a server reads text. Every answer is checked: its length, model, count,
width and numbers.
"""

import contextlib
import hashlib
import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import SplitResult, urlsplit

import numpy as np
from numpy.typing import NDArray

from outrider.tokens import TokenTable
from retrieval_service.dense.embeddings import Vectors, unit
from retrieval_service.dense.errors import EmbeddingsFailed, EmbeddingsUnfit
from speculative.errors import InvalidRequest

AT_ONCE = 64
"""Texts in one request."""
WIDEST = 16_384
"""Most dimensions of a vector."""
_PROBE = "def add(first, second):"
_BYTES_A_NUMBER = 40
"""JSON writes a float64 in at most 25 bytes; servers may indent."""
_BYTES_BESIDE = 65_536
_LARGEST = 1e30
"""Larger numbers become infinite in float32, or their squares do."""
_QUOTED = 200
"""Most characters of an answer that an error quotes."""
_BUSY = (408, 429)


class EmbeddingsServer:
    """An Embedder whose vectors a server computes; safe from several threads.

    Args:
        url: what clients of OpenAI call the base URL, such as http://host:8080/v1.
        tokens: the target's tokens, by which ids become text.
        model: the model to ask for; empty: requests name none.
        key: sent as a bearer token.
        deadline_s: most seconds of one request of up to 64 texts, from the connection to the last byte.

    Raises:
        InvalidRequest: `url` is no such URL.
        EmbeddingsFailed: the server cannot be reached, is too slow, or cannot answer now.
        EmbeddingsUnfit: the server refuses, or its answer holds no embeddings.
    """

    def __init__(
        self,
        url: str,
        tokens: TokenTable,
        *,
        model: str = "",
        key: str | None = None,
        deadline_s: float = 10.0,
    ) -> None:
        self._url = _checked_url(url)
        self._path = f"{self._url.path.rstrip('/')}/embeddings"
        self._shown = f"the embeddings server {self._url.geturl()}"
        self._context = ssl.create_default_context() if self._url.scheme == "https" else None
        self._tokens = tokens
        self._asked = {"model": model} if model else {}
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if key:
            if not (key.isascii() and key.isprintable()):
                raise InvalidRequest("embeddings_key is no key: it has characters that no header may have")
            self._headers["Authorization"] = f"Bearer {key}"
        self._deadline_s = deadline_s
        self._connections: set[socket.socket] = set()
        self._closed = False
        self.dimensions = 0
        self._model: str | None = None
        first = self._ask([_PROBE])
        self.dimensions = first.shape[1]
        self.name = f"{self._model or model or 'the model'} of {self._url.geturl()}"
        identity = f"openai:{model}:{self._model}:{self.dimensions}"
        self.digest = hashlib.sha256(identity.encode()).hexdigest()

    def embed(self, windows: Sequence[Sequence[int] | NDArray[np.integer[Any]]]) -> Vectors:
        """Embeds windows; see Embedder. Raises EmbeddingsFailed and EmbeddingsUnfit."""
        texts = [self._text(window) for window in windows]
        # Servers refuse an empty text.
        asked = [at for at, text in enumerate(texts) if text.strip()]
        vectors = np.zeros((len(texts), self.dimensions), dtype=np.float32)
        for start in range(0, len(asked), AT_ONCE):
            batch = asked[start : start + AT_ONCE]
            vectors[batch] = self._ask([texts[at] for at in batch])
        return unit(vectors)

    def close(self) -> None:
        """Ends the requests that run, and refuses further ones."""
        self._closed = True
        for connection in tuple(self._connections):
            _cut(connection)

    def _text(self, window: Sequence[int] | NDArray[np.integer[Any]]) -> str:
        return b"".join(self._tokens.token_bytes(int(id_)) for id_ in window).decode(errors="replace")

    def _ask(self, texts: Sequence[str]) -> Vectors:
        """Vectors of up to AT_ONCE texts: float32 [len(texts), dimensions]."""
        body = json.dumps({"input": list(texts), "encoding_format": "float", **self._asked}).encode()
        most_bytes = len(texts) * (self.dimensions or WIDEST) * _BYTES_A_NUMBER + _BYTES_BESIDE
        answer = self._post(body, most_bytes)
        try:
            vectors, model = _read_vectors(answer, len(texts))
            if self._model is not None and model != self._model:
                raise ValueError(
                    f"it is of the model {model[:_QUOTED]!r}, and the first was of {self._model!r}"
                )
            if self.dimensions and vectors.shape[1] != self.dimensions:
                raise ValueError(
                    f"its vectors have {vectors.shape[1]} numbers, the first had {self.dimensions}"
                )
        except ValueError as error:
            raise EmbeddingsUnfit(
                f"{self._shown} sent an answer that cannot be used: {error}{self._begins(answer)}. Name a"
                " server of one model of embeddings; after a change of the model start the worker again"
            ) from error
        self._model = model
        return vectors

    def _post(self, body: bytes, most_bytes: int) -> bytes:
        """The body of the answer to one request. Raises EmbeddingsFailed or EmbeddingsUnfit."""
        if self._closed:
            raise EmbeddingsFailed("the worker is closing")
        began = time.monotonic()
        try:
            with self._connected() as connection:
                connection.request("POST", self._path, body, self._headers)
                with connection.getresponse() as response:
                    answer = response.read(most_bytes + 1)
                if response.length and len(answer) <= most_bytes:
                    raise http.client.HTTPException("the answer is cut short")
                if time.monotonic() - began >= self._deadline_s:
                    raise TimeoutError
        except (OSError, http.client.HTTPException) as error:
            late = time.monotonic() - began >= self._deadline_s
            why = (
                f"no whole answer within {self._deadline_s:g} s"
                if late
                else str(error) or type(error).__name__
            )
            raise EmbeddingsFailed(f"{self._shown} cannot be asked: {why}") from error
        if response.status != http.client.OK:
            raise self._refused(response, answer)
        if len(answer) > most_bytes:
            raise EmbeddingsUnfit(f"{self._shown} sent more than {most_bytes} bytes")
        return answer

    def _refused(self, response: http.client.HTTPResponse, answer: bytes) -> Exception:
        why = f"{self._shown} answered {response.status} {response.reason[:50]}{self._begins(answer)}"
        if response.status >= 500 or response.status in _BUSY:
            return EmbeddingsFailed(why)
        return EmbeddingsUnfit(
            f"{why}; check embeddings_url (which often ends in /v1), embeddings_model and embeddings_key"
        )

    def _begins(self, answer: bytes) -> str:
        """How the first answer begins, for errors; later ones may repeat text, which no log holds."""
        return "" if self.dimensions else f" (it begins {answer[:_QUOTED].decode(errors='replace')!r})"

    @contextlib.contextmanager
    def _connected(self) -> Iterator[http.client.HTTPConnection]:
        """A connection that is cut at the deadline, whatever the server does until then."""
        began = time.monotonic()
        host = str(self._url.hostname)
        if self._context is None:
            connection = http.client.HTTPConnection(host, self._url.port or 80)
            raw = socket.create_connection((host, connection.port), self._deadline_s)
        else:
            connection = http.client.HTTPSConnection(host, self._url.port or 443, context=self._context)
            raw = socket.create_connection((host, connection.port), self._deadline_s)
            # The handshake comes later, within the deadline.
            raw = self._context.wrap_socket(raw, server_hostname=host, do_handshake_on_connect=False)
        timer = threading.Timer(max(0.0, self._deadline_s - (time.monotonic() - began)), _cut, (raw,))
        timer.daemon = True
        self._connections.add(raw)
        timer.start()
        try:
            if self._closed:
                _cut(raw)
            if isinstance(raw, ssl.SSLSocket):
                raw.do_handshake()
            connection.sock = raw
            yield connection
        finally:
            timer.cancel()
            self._connections.discard(raw)
            connection.close()
            raw.close()


def _checked_url(url: str) -> SplitResult:
    if "@" in url:  # first of all, as the other messages quote the URL
        raise InvalidRequest("embeddings_url has a name or password in it; give the key as embeddings_key")
    try:
        split = urlsplit(url)
        host, _ = split.hostname, split.port
    except ValueError as error:
        raise InvalidRequest(f"embeddings_url {url!r} is not a URL: {error}") from None
    plain = url.isascii() and url.isprintable() and " " not in url
    if not plain or not host or split.scheme not in ("http", "https") or split.query or split.fragment:
        raise InvalidRequest(f"embeddings_url {url!r} is not the URL of a server; give http://HOST:PORT/v1")
    return split


def _read_vectors(answer: bytes, count: int) -> tuple[Vectors, str]:
    """The vectors of an answer in the order asked, and its model's name. Raises ValueError."""
    try:
        whole = json.loads(answer)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    rows = whole.get("data") if isinstance(whole, dict) else None
    if not isinstance(rows, list):
        raise ValueError("it has no list `data`")
    if len(rows) != count:
        raise ValueError(f"it has {len(rows)} embeddings for {count} texts")
    ordered: list[Any] = [None] * count
    for at, row in enumerate(rows):
        index = row.get("index", at) if isinstance(row, dict) else None
        if type(index) is not int or not 0 <= index < count or ordered[index] is not None:
            raise ValueError(f"item {at} of `data` has no index of its own within 0 .. {count - 1}")
        ordered[index] = _read_vector(row.get("embedding"), at)
    widths = sorted({len(vector) for vector in ordered})
    if len(widths) > 1:
        raise ValueError(f"its vectors have {widths[0]} and {widths[-1]} numbers")
    return np.array(ordered, dtype=np.float32), str(whole.get("model") or "")


def _read_vector(vector: Any, at: int) -> list[float]:
    if not isinstance(vector, list) or not 1 <= len(vector) <= WIDEST:
        raise ValueError(f"item {at} of `data` has no `embedding` of 1 to {WIDEST} numbers")
    for number in vector:
        if type(number) not in (int, float) or not abs(number) <= _LARGEST:
            what = "a number beyond float32" if type(number) in (int, float) else type(number).__name__
            raise ValueError(f"item {at} of `data` holds {what} where a finite number belongs")
    if not any(vector):
        raise ValueError(f"the embedding of item {at} of `data` is all zeros, so it is near to no text")
    return vector


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
