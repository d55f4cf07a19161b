"""How past outputs are written down: bytes in, bytes out, no files.

Every file begins with a header: magic, version and length, which no version changes, then kind, generation,
next serial and the tenant's name, and a CRC-32 of it all. Records follow, each with its length and its
CRC-32, which starts from the file's generation so that a record of another file is none here. Ids are
little-endian uint32, one after the other, nothing done to them: what is searched for is what is there.
"""

import struct
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from retrieval_service.past.text import Added
from speculative.errors import OutriderError

VERSION = 1
_MAGIC = b"\x89ORpast\n"
_BEGINNING = struct.Struct("<8sHH")
_HEADER = struct.Struct("<BQQH")
_CRC = struct.Struct("<I")
_FRAME = struct.Struct("<II")
_ADDED = struct.Struct("<BQIH")
_END = struct.Struct("<BQQ")
_KIND_ADDED, _KIND_END, _KIND_FORGET = 1, 2, 3

SNAPSHOT, LOG, INTENT = 1, 2, 3


class PastError(OutriderError):
    """A folder of past outputs that cannot be used, and what to do about it."""

    code = "FAILED_PRECONDITION"


class DamagedError(Exception):
    """A file's bytes differ from what was written."""


@dataclass(frozen=True, slots=True)
class PastFileHeader:
    """Header of a file; `next_serial` is the one at the beginning of its generation."""

    kind: int
    generation: int
    next_serial: int
    tenant: str


@dataclass(frozen=True, slots=True)
class SnapshotEnd:
    """The last record of a snapshot, without which the snapshot is not whole."""

    sequences: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Intent record: a session whose text is to be removed."""

    session: str


Record = Added | SnapshotEnd | Forget


def pack_header(header: PastFileHeader) -> bytes:
    """A file's header as bytes."""
    name = header.tenant.encode()
    rest = _HEADER.pack(header.kind, header.generation, header.next_serial, len(name)) + name
    length = _BEGINNING.size + len(rest) + _CRC.size
    whole = _BEGINNING.pack(_MAGIC, VERSION, length) + rest
    return whole + _CRC.pack(zlib.crc32(whole))


def unpack_header(data: bytes, path: object) -> tuple[PastFileHeader, int]:
    """A file's header and the offset of its end.

    Raises DamagedError, or PastError where a whole header is of another version.
    """
    if len(data) < _BEGINNING.size:
        raise DamagedError("it ends within its header")
    magic, version, length = _BEGINNING.unpack_from(data)
    if magic != _MAGIC or length < _BEGINNING.size + _CRC.size or length > len(data):
        raise DamagedError("its header is none")
    inner = length - _CRC.size
    if _CRC.unpack_from(data, inner)[0] != zlib.crc32(data[:inner]):
        raise DamagedError("its header fails its checksum")
    if version != VERSION:
        raise PastError(
            f"{path} is of version {version} of past outputs and this reads version {VERSION}: nothing was "
            "changed; start the release that wrote it, or give another folder"
        )
    kind, generation, next_serial, size = _HEADER.unpack_from(data, _BEGINNING.size)
    name = data[_BEGINNING.size + _HEADER.size : inner]
    if len(name) != size:
        raise DamagedError("its header has a name of another length")
    return PastFileHeader(kind, generation, next_serial, name.decode()), length


def pack_record(record: Record, generation: int) -> bytes:
    """Bytes of a record in a file of `generation`."""
    match record:
        case Added(serial, session, start, ids):
            # Named once: what is added later is known by its serial.
            name = b"" if start else session.encode()
            payload = _ADDED.pack(_KIND_ADDED, serial, start, len(name)) + name
            payload += np.asarray(ids, "<u4").tobytes()
        case SnapshotEnd(sequences, tokens):
            payload = _END.pack(_KIND_END, sequences, tokens)
        case Forget(session):
            payload = bytes((_KIND_FORGET,)) + session.encode()
    return _FRAME.pack(len(payload), _checksum(payload, generation)) + payload


def unpack_records(data: bytes, at: int, generation: int) -> Iterator[tuple[Record, int]]:
    """Records from offset `at` on, each with the offset of its end, up to the first incomplete one."""
    while at + _FRAME.size <= len(data):
        length, crc = _FRAME.unpack_from(data, at)
        at += _FRAME.size
        # Where power failed a file may end in zeros: a frame with the right checksum of nothing.
        if not length or at + length > len(data):
            return
        payload = data[at : at + length]
        if _checksum(payload, generation) != crc:
            return
        at += length
        yield _unpack(payload), at


def _unpack(payload: bytes) -> Record:
    if payload[0] == _KIND_END:
        _, sequences, tokens = _END.unpack(payload)
        return SnapshotEnd(sequences, tokens)
    if payload[0] == _KIND_FORGET:
        return Forget(payload[1:].decode())
    _, serial, start, size = _ADDED.unpack_from(payload)
    name_end = _ADDED.size + size
    ids = np.frombuffer(payload, "<u4", offset=name_end).astype(np.uint32)
    return Added(serial, payload[_ADDED.size : name_end].decode(), start, array("I", ids.tobytes()))


def _checksum(payload: bytes, generation: int) -> int:
    return zlib.crc32(payload, generation & 0xFFFFFFFF)
