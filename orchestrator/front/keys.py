"""Who may ask: the file that says which keys there are, whose they are, and how much each may use.

One JSON object per line; empty lines, and lines that begin with #, are passed over. Keys themselves are not
in it, only their digests, and no message repeats a line: somebody may have put a key there.
"""

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from orchestrator.front.quota import Quota
from outrider.wire.codec import checked_tenant
from outrider.wire.keys import key_digest
from outrider.wire.reloading import EVERY_S, Reloaded
from speculative.errors import InvalidRequest

SETTING = "api_keys_file"
Count = Annotated[int, Field(ge=1, le=10**12)]


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", repr=False)]
    tenant: Annotated[str, Field(min_length=1)]
    streams: Count | None = None
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One that is known."""

    id: str
    """What logs may call it: the beginning of its digest."""
    tenant: str
    quota: Quota


class KeyTable:
    """The keys of a file, found in a time that says nothing of how much of one was guessed."""

    def __init__(self, keys: Mapping[str, ApiKey]) -> None:
        """`keys` by their digests."""
        # What is looked up is a digest under a secret of this table, so that where it would lie is nobody's
        # to choose, and how long it takes to find nothing lies there is nobody's to learn from.
        self._secret = secrets.token_bytes(32)
        self._keys = {self._place(digest): key for digest, key in keys.items()}

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, key: str) -> ApiKey | None:
        """The key that was shown, if it is one."""
        return self._keys.get(self._place(key_digest(key)))

    def _place(self, digest: str) -> bytes:
        return hashlib.blake2b(digest.encode(), key=self._secret, digest_size=32).digest()


def read_keys(contents: Mapping[str, bytes]) -> KeyTable:
    """The file's keys. Raises InvalidRequest, with the line's number, where a line is not what it must be."""
    try:
        lines = contents[SETTING].decode().splitlines()
    except UnicodeDecodeError:
        raise InvalidRequest(f"{SETTING}: it is no text in UTF-8; write it anew") from None
    keys: dict[str, ApiKey] = {}
    for number, text in enumerate(lines, start=1):
        if not text.strip() or text.lstrip().startswith("#"):
            continue
        line = _line(number, text)
        if line.sha256 in keys:
            raise _wrong(number, "has the same sha256 as an earlier line; leave one of them out")
        quota = Quota(line.streams, line.requests_per_minute, line.tokens_per_minute)
        keys[line.sha256] = ApiKey(line.sha256[:12], line.tenant, quota)
    if not keys:
        raise InvalidRequest(f"{SETTING}: it has no key; add one with `outrider keys new --tenant NAME`")
    return KeyTable(keys)


def watched_keys(path: Path, *, every_s: float = EVERY_S) -> Reloaded[KeyTable]:
    """The file's keys, read again when it changes. Raises InvalidRequest."""
    return Reloaded({SETTING: path}, read_keys, every_s=every_s)


def _line(number: int, text: str) -> _Line:
    try:
        line = _Line.model_validate(json.loads(text, object_pairs_hook=_once))
        checked_tenant(line.tenant)
    except ValidationError as error:
        raise _wrong(number, _faults(error.errors(include_input=False))) from None
    except InvalidRequest as error:
        raise _wrong(number, str(error)) from None
    except (ValueError, RecursionError):
        raise _wrong(number, 'is no JSON object such as {"sha256": "...", "tenant": "..."}') from None
    return line


def _once(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    """JSON lets a name come twice, and readers disagree on which of them counts."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name comes twice")
    return found


def _faults(faults: Sequence[Mapping[str, object]] | Sequence[object]) -> str:
    told = []
    for fault in faults:
        assert isinstance(fault, dict)
        known = [name for name in map(str, fault["loc"]) if name in _Line.model_fields]
        told.append(f"{'.'.join(known)}: {fault['msg']}" if known else "has a field that is not known")
    return "; ".join(told)


def _wrong(number: int, why: str) -> InvalidRequest:
    return InvalidRequest(f"{SETTING}: line {number}: {why}")
