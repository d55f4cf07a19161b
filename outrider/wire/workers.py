"""A worker's announcement: one form for workers, orchestrators and the store that orchestrators share.

`checked` checks every announcement from the wire or from a store, and its errors name the wrong field.
"""

import math
import re
from dataclasses import dataclass

from outrider.v1 import registry_pb2
from outrider.wire.names import is_host_port
from speculative.errors import InvalidRequest

CONTRACT = 1
"""Version of the contract that this code speaks; processes of different versions do not use each other."""
EVERY_S = 1.0
"""Seconds between two announcements of a worker."""
BELIEVED_S = 4.0
"""Seconds after which an announcement expires."""
ROLES = {
    "verifier": registry_pb2.WORKER_ROLE_VERIFIER,
    "drafter": registry_pb2.WORKER_ROLE_DRAFTER,
    "retrieval": registry_pb2.WORKER_ROLE_RETRIEVAL,
}
_NAMES = {number: name for name, number in ROLES.items()}
_DIGEST = re.compile(r"[0-9a-f]{0,128}")
_LONGEST_TEXT = 256
_MOST = 2**31
_LONGEST_STEP_S = 3600.0


@dataclass(frozen=True, slots=True)
class WorkerState:
    """Model, load and step time of a worker at present; fields as in AnnounceRequest."""

    model: str = ""
    weights_digest: str = ""
    tokenizer_digest: str = ""
    numerics: str = ""
    capacity: int = 0
    sessions: int = 0
    step_s: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkerEntry:
    """A worker's role, address and state."""

    role: str
    """The worker's role, a key of ROLES."""
    address: str
    """host:port at which the worker serves gRPC."""
    state: WorkerState
    contract: int = CONTRACT
    draining: bool = False


def checked(entry: WorkerEntry) -> WorkerEntry:
    """The entry. Raises InvalidRequest where a field cannot be that of a worker."""
    state = entry.state
    if entry.role not in ROLES:
        raise InvalidRequest(f"a worker's role is {entry.role[:20]!r}; one of {', '.join(ROLES)}")
    checked_address(entry.address)
    for name in ("model", "numerics"):
        text: str = getattr(state, name)
        if len(text) > _LONGEST_TEXT or not (text.isprintable() or not text):
            raise InvalidRequest(
                f"a worker's {name} is {text[:40]!r}; at most {_LONGEST_TEXT} printable characters"
            )
    for name in ("weights_digest", "tokenizer_digest"):
        if not _DIGEST.fullmatch(text := getattr(state, name)):
            raise InvalidRequest(f"a worker's {name} is {text[:40]!r}; at most 128 hexadecimal digits")
    for name, number in (
        ("contract", entry.contract),
        ("capacity", state.capacity),
        ("sessions", state.sessions),
    ):
        if not 0 <= number < _MOST:
            raise InvalidRequest(f"a worker's {name} is {number}; 0 to {_MOST - 1}")
    if not (math.isfinite(state.step_s) and 0 <= state.step_s <= _LONGEST_STEP_S):
        raise InvalidRequest(f"a worker's step took {state.step_s} s; 0 to {_LONGEST_STEP_S:g}")
    return entry


def checked_address(address: str) -> str:
    """The address. Raises InvalidRequest where it is no host:port that a channel can dial."""
    if not is_host_port(address):
        raise InvalidRequest(f"a worker's address is {address[:80]!r}; host:port is needed, port 1 to 65535")
    return address


def entry_to_wire(entry: WorkerEntry) -> registry_pb2.AnnounceRequest:
    """The announcement of a worker for the wire."""
    state = entry.state
    return registry_pb2.AnnounceRequest(
        role=ROLES[entry.role],
        address=entry.address,
        contract=entry.contract,
        model=state.model,
        weights_digest=state.weights_digest,
        tokenizer_digest=state.tokenizer_digest,
        numerics=state.numerics,
        capacity=state.capacity,
        sessions=state.sessions,
        step_us=min(2**32 - 1, round(state.step_s * 1e6)),
        draining=entry.draining,
    )


def entry_from_wire(message: registry_pb2.AnnounceRequest) -> WorkerEntry:
    """A worker from its announcement. Raises InvalidRequest where a field cannot be that of a worker."""
    state = WorkerState(
        model=message.model,
        weights_digest=message.weights_digest,
        tokenizer_digest=message.tokenizer_digest,
        numerics=message.numerics,
        capacity=message.capacity,
        sessions=message.sessions,
        step_s=message.step_us * 1e-6,
    )
    role = _NAMES.get(message.role, str(message.role))
    return checked(WorkerEntry(role, message.address, state, message.contract or 1, message.draining))
