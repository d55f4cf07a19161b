"""The service's side of an encoder's process: starts it, asks it, starts it again when it has died.

Ids become text here, for such a model reads text.
"""

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.tokens import TokenTable
from retrieval_service.dense.embeddings import Vectors, unit
from retrieval_service.dense.errors import EncoderFailed
from retrieval_service.dense.framing import (
    ERROR,
    HELLO,
    TEXTS,
    VECTORS,
    EncoderHello,
    frame,
    pack_texts,
    read_frame,
    unpack_vectors,
)


class EncoderProcess:
    """An Embedder whose vectors another process computes. Close it at the end."""

    def __init__(
        self,
        command: Sequence[str],
        tokens: TokenTable,
        *,
        start_s: float = 120.0,
        answer_s: float = 30.0,
    ) -> None:
        """Starts the process and waits for its HELLO, at most `start_s` seconds. Raises EncoderFailed."""
        self._command = list(command)
        self._tokens = tokens
        self._start_s = start_s
        self._answer_s = answer_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        hello = self._start()
        self.name, self.digest, self.dimensions = hello.name, hello.digest, hello.dimensions

    @classmethod
    def of_model(cls, model: str, tokens: TokenTable, threads: int = 1) -> "EncoderProcess":
        """An encoder process of a sentence-transformers model, by name or folder. Raises EncoderFailed."""
        module = "retrieval_service.dense.encoder"
        return cls([sys.executable, "-m", module, "--model", model, "--threads", str(threads)], tokens)

    def embed(self, windows: Sequence[Sequence[int] | NDArray[np.integer[Any]]]) -> Vectors:
        """Embeds windows; see Embedder. Restarts a process that has died."""
        if not windows:
            return np.zeros((0, self.dimensions), dtype=np.float32)
        texts = [self._text(window) for window in windows]
        with self._lock:
            if self._socket is None:
                hello = self._start()
                if hello.digest != self.digest:
                    self._stop()
                    now, before = _named(hello), _named(EncoderHello(self.name, self.digest, self.dimensions))
                    raise EncoderFailed(
                        f"the encoder came back as {now}, it was {before}; restart the service"
                    )
            kind, payload = self._exchange(frame(TEXTS, pack_texts(texts)), self._answer_s)
            if kind == ERROR:
                raise EncoderFailed(f"the encoder {self.name} says: {payload.decode(errors='replace')}")
            try:
                vectors = unpack_vectors(payload)
                if kind != VECTORS or vectors.shape != (len(windows), self.dimensions):
                    wanted = (len(windows), self.dimensions)
                    raise ValueError(f"{kind!r} of shape {vectors.shape} where {wanted} was asked for")
            except ValueError as error:
                self._stop()
                raise EncoderFailed(f"the encoder {self.name} answered nonsense: {error}") from error
        return unit(vectors)

    def close(self) -> None:
        """Ends the encoder's process."""
        with self._lock:
            self._stop()

    def _text(self, window: Sequence[int] | NDArray[np.integer[Any]]) -> str:
        return b"".join(self._tokens.token_bytes(int(id_)) for id_ in window).decode(errors="replace")

    def _start(self) -> EncoderHello:
        # A pair of sockets stands for its stdin and stdout: unlike pipes they take a timeout both ways.
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(self._command, stdin=theirs.fileno(), stdout=theirs.fileno())
            except OSError as error:
                ours.close()
                raise EncoderFailed(f"the encoder {self._command[0]} does not start: {error}") from error
        self._socket = ours
        kind, payload = self._exchange(b"", self._start_s)
        if kind == ERROR:
            self._stop()
            raise EncoderFailed(f"the encoder does not start: {payload.decode(errors='replace')}")
        try:
            if kind != HELLO:
                raise ValueError(f"it begins with {kind!r}")
            return EncoderHello(**json.loads(payload))
        except (ValueError, TypeError) as error:
            self._stop()
            raise EncoderFailed(f"the encoder does not say who it is: {error}") from error

    def _exchange(self, message: bytes, seconds: float) -> tuple[bytes, bytes]:
        """Sends a message and reads the answer within a time in seconds. Any failure ends the process."""
        assert self._socket is not None
        deadline = time.monotonic() + seconds
        try:
            self._wait_until(deadline)
            self._socket.sendall(message)
            answer = read_frame(lambda count: self._read(count, deadline))
        except (OSError, ValueError) as error:
            self._stop()
            raise EncoderFailed(f"the encoder {' '.join(self._command)} failed: {error}") from error
        if answer is None:
            self._stop()
            raise EncoderFailed(f"the encoder {' '.join(self._command)} ended; its stderr says why")
        return answer

    def _read(self, count: int, deadline: float) -> bytes:
        assert self._socket is not None
        parts = bytearray()
        while len(parts) < count:
            self._wait_until(deadline)
            part = self._socket.recv(min(count - len(parts), 2**20))
            if not part:
                break
            parts += part
        return bytes(parts)

    def _wait_until(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("took too long")
        assert self._socket is not None
        self._socket.settimeout(left)

    def _stop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _named(hello: EncoderHello) -> str:
    return f"{hello.name} ({hello.digest[:12]})"
