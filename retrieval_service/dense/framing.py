"""Messages between the service and an encoder's process: a kind, a length, that many bytes.

One byte of kind, 32 bits of length (big-endian), the payload. The encoder says HELLO (JSON: name, digest,
dimensions) once; each TEXTS (a JSON list of strings) is answered by VECTORS (rows and dimensions, 32 bits
each, little-endian, then float32) or by ERROR (UTF-8).
"""

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from retrieval_service.dense.embeddings import Vectors

HELLO, TEXTS, VECTORS, ERROR = b"H", b"T", b"V", b"E"
LONGEST = 256 * 2**20
"""Bytes of a payload; more is nonsense."""
_HEAD = struct.Struct(">cI")
_SHAPE = struct.Struct("<II")


@dataclass(frozen=True, slots=True)
class EncoderHello:
    """The encoder's name, digest and dimensions; see Embedder."""

    name: str
    digest: str
    dimensions: int


def frame(kind: bytes, payload: bytes) -> bytes:
    """Bytes of a message: kind, length, payload."""
    return _HEAD.pack(kind, len(payload)) + payload


def read_frame(read: Callable[[int], bytes]) -> tuple[bytes, bytes] | None:
    """The next message; None at the end. `read(n)` gives n bytes, fewer at the end. Raises ValueError."""
    head = read(_HEAD.size)
    if not head:
        return None
    if len(head) < _HEAD.size:
        raise ValueError("ends within a message's head")
    kind, length = _HEAD.unpack(head)
    if kind not in (HELLO, TEXTS, VECTORS, ERROR) or length > LONGEST:
        raise ValueError(f"no message begins with {head!r}; something else writes to the encoder's output")
    payload = read(length)
    if len(payload) < length:
        raise ValueError("ends within a message")
    return kind, payload


def pack_texts(texts: Sequence[str]) -> bytes:
    """The texts as the payload of a TEXTS message."""
    return json.dumps(list(texts)).encode()


def pack_vectors(vectors: Vectors) -> bytes:
    """The payload of VECTORS, of float32 [rows, dimensions]."""
    return _SHAPE.pack(*vectors.shape) + np.ascontiguousarray(vectors, dtype="<f4").tobytes()


def unpack_vectors(payload: bytes) -> Vectors:
    """Vectors of a VECTORS payload. Raises ValueError where its length does not fit its header."""
    if len(payload) < _SHAPE.size:
        raise ValueError("vectors without a shape")
    rows, dimensions = _SHAPE.unpack_from(payload)
    if len(payload) != _SHAPE.size + rows * dimensions * 4:
        raise ValueError(f"{len(payload)} bytes are not {rows} vectors of {dimensions}")
    return (
        np.frombuffer(payload, dtype="<f4", offset=_SHAPE.size).reshape(rows, dimensions).astype(np.float32)
    )
