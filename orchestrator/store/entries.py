"""Names and encodings of the entries of a shared store. Pure.

All entries of a session share one hash tag, hence one slot. Epochs are texts of fixed width, since Lua's
numbers are exact to 53 bits only. Every entry carries VERSION: an entry of another version is not ours, and
is left alone.
"""

import dataclasses
import json
import math
import sys
from array import array
from collections.abc import Mapping, Sequence
from hashlib import blake2b

from orchestrator.store import Handle, SessionRecord, Tokens, WorkerReport
from outrider.wire.codec import MAX_CHOICES, SessionKey, epoch_from_text, epoch_to_text
from outrider.wire.workers import WorkerEntry, WorkerState, checked
from speculative.errors import InvalidRequest

VERSION = b"1"
HEADER = 17
"""Bytes before the token ids of a record of tokens: version and epoch. Ids follow, four bytes each, low
first."""
MOST = 2**31
"""An upper bound of counts of sessions, so that no sum overflows."""
WORKERS = "outrider:{workers}"
REGISTERED = "outrider:{workers}:registered"
ORCHESTRATORS = "outrider:{workers}:orchestrators"


class ForeignEntry(Exception):
    """A store's entry is of another version."""


class BrokenEntry(Exception):
    """A store's entry is of this version, but not valid."""


def session_name(key: SessionKey, kind: str) -> str:
    """The name of a session's entry in Redis.

    The name holds a digest, since tenants and sessions may be any text, braces too.
    """
    text = json.dumps([key.tenant, key.session])
    return f"outrider:{{{blake2b(text.encode(), digest_size=16).hexdigest()}}}:{kind}"


def record_name(key: SessionKey) -> str:
    """The name of the session's record, a Redis hash."""
    return session_name(key, "record")


def handle_name(key: SessionKey) -> str:
    """The name of the session's handle, a Redis hash."""
    return session_name(key, "handle")


def tokens_name(key: SessionKey) -> str:
    """The name of a choice's record of tokens, a Redis string."""
    return session_name(key, f"tokens:{key.choice}")


def quota_name(key: str) -> str:
    """The name of an API key's quota, a Redis hash; `key` is the beginning of the key's digest."""
    return f"outrider:{{{key}}}:quota"


def prefix_name(scope: str, hash_: int) -> str:
    """The name of a prefix's entry. Entries of one scope are looked up together, so they share a slot."""
    return f"outrider:{{{blake2b(scope.encode(), digest_size=16).hexdigest()}}}:prefix:{hash_:016x}"


def ids_to_bytes(ids: Sequence[int]) -> bytes:
    """Token ids as bytes, four each, low first."""
    packed = array("I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def tokens_from(data: bytes) -> Tokens:
    """The tokens of an entry. Raises ForeignEntry, BrokenEntry."""
    if not data.startswith(VERSION):
        raise ForeignEntry(data[:1].decode(errors="replace"))
    if len(data) < HEADER or (len(data) - HEADER) % 4:
        raise BrokenEntry(f"{len(data)} bytes are no epoch and ids")
    ids = array("I", data[HEADER:])
    if sys.byteorder == "big":
        ids.byteswap()
    return Tokens(_epoch(data[1:HEADER]), tuple(ids))


def record_from(key: SessionKey, fields: Mapping[bytes, bytes]) -> SessionRecord | None:
    """The record of an entry; None: the entry has no fields. Raises ForeignEntry, BrokenEntry."""
    if not _ours(fields):
        return None
    choices = _number(fields, b"choices")
    if not 1 <= choices <= MAX_CHOICES:
        raise BrokenEntry(f"{choices} choices")
    return SessionRecord(
        key,
        _epoch(fields.get(b"epoch", b"")),
        _verifier(fields),
        choices,
        cancelled=fields.get(b"cancelled") == b"1",
        request=_epoch(fields.get(b"request", b"0" * 16)),
    )


def handle_from(key: SessionKey, fields: Mapping[bytes, bytes]) -> Handle | None:
    """The handle of an entry; None: the entry has no fields. Raises ForeignEntry, BrokenEntry."""
    if not _ours(fields):
        return None
    return Handle(
        key,
        _epoch(fields.get(b"epoch", b"")),
        _verifier(fields),
        _number(fields, b"length"),
        _epoch(fields.get(b"hash", b"")),
    )


def report_to_bytes(report: WorkerReport) -> bytes:
    """The report as the version and JSON."""
    return VERSION + json.dumps(report._asdict()).encode()


def report_from(data: bytes) -> WorkerReport:
    """The report of an entry. Raises ForeignEntry, BrokenEntry."""
    if not data.startswith(VERSION):
        raise ForeignEntry(data[:1].decode(errors="replace"))
    try:
        report = WorkerReport(**json.loads(data[1:]))
        kinds = [type(default) for default in WorkerReport("", "", "", "", 0, 0, 0.0)]
        counts = (report.sessions, report.capacity)
        if [type(value) for value in report] != kinds or not all(0 <= it < MOST for it in counts):
            raise BrokenEntry(f"{data[:80]!r}")
        if not math.isfinite(report.step_s):
            raise BrokenEntry(f"a step of {report.step_s} s")
        return report
    except (ValueError, TypeError, RecursionError) as error:
        raise BrokenEntry(f"{data[:80]!r}: {error}") from error


def entry_to_bytes(entry: WorkerEntry) -> bytes:
    """A registered worker as the version and JSON."""
    return VERSION + json.dumps(dataclasses.asdict(entry)).encode()


def entry_from(data: bytes) -> WorkerEntry:
    """The registered worker of an entry. Raises ForeignEntry, BrokenEntry."""
    if not data.startswith(VERSION):
        raise ForeignEntry(data[:1].decode(errors="replace"))
    try:
        fields = json.loads(data[1:])
        entry = WorkerEntry(**fields | {"state": WorkerState(**fields["state"])})
        _check_kinds(entry, WorkerEntry("", "", WorkerState()))
        _check_kinds(entry.state, WorkerState())
        return checked(entry)
    except (ValueError, TypeError, KeyError, RecursionError, InvalidRequest) as error:
        raise BrokenEntry(f"{data[:80]!r}: {error}") from error


def _check_kinds(given: object, blank: object) -> None:
    """Check the types of a dataclass's fields, which the dataclass itself does not. Raises TypeError.

    `blank` has a value of the right type in each field.
    """
    for field in dataclasses.fields(blank):  # type: ignore[arg-type]  # it is a dataclass
        kind, value = type(getattr(blank, field.name)), getattr(given, field.name)
        if type(value) is not kind:
            raise TypeError(f"{field.name} is {value!r}")


def epoch_to_bytes(epoch: int) -> bytes:
    """The epoch as text of fixed width."""
    return epoch_to_text(epoch).encode()


def _ours(fields: Mapping[bytes, bytes]) -> bool:
    if not fields:
        return False
    if (version := fields.get(b"version")) != VERSION:
        raise ForeignEntry("none" if version is None else version[:20].decode(errors="replace"))
    return True


def _epoch(text: bytes) -> int:
    try:
        return epoch_from_text(text.decode("ascii"))
    except ValueError as error:
        raise BrokenEntry(str(error)) from error


def _number(fields: Mapping[bytes, bytes], name: bytes) -> int:
    text = fields.get(name, b"")
    if not (text.isdigit() and len(text) < 10):
        raise BrokenEntry(f"{name.decode()} is {text[:20]!r}")
    return int(text)


def _verifier(fields: Mapping[bytes, bytes]) -> str:
    text = fields.get(b"verifier", b"")
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise BrokenEntry(f"verifier is {text[:40]!r}") from error
