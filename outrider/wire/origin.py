"""The request that the running code works for, by its caller's id, and the fields of its log lines.

Both are bound to the task that answers the request (context variables): functions that the task calls see
them, other tasks do not.
"""

import asyncio
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

REQUEST_KEY = "x-request-id"
TRACE_KEY = "traceparent"

_REQUEST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+=-]{0,127}")
_TRACE = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class Origin:
    """Id and trace that came with a request; empty where none came."""

    request: str = ""
    """The request's id: the sender's, or a random one."""
    traceparent: str = ""
    """The request's trace, as W3C's Trace Context writes it."""

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """gRPC metadata that carry the origin to the next process."""
        pairs = ((REQUEST_KEY, self.request), (TRACE_KEY, self.traceparent))
        return tuple((key, value) for key, value in pairs if value)


_ORIGIN: ContextVar[Origin] = ContextVar("origin", default=Origin())  # noqa: B039  # it is frozen
_FIELDS: ContextVar[Mapping[str, str] | None] = ContextVar("fields", default=None)
# Python 3.11 shows no thread the context of another thread's task.
_OF_TASKS: "WeakKeyDictionary[asyncio.Task[Any], Origin]" = WeakKeyDictionary()


def origin_of(headers: Iterable[tuple[str, str | bytes]]) -> Origin:
    """The origin in gRPC metadata or HTTP headers with lower-case names; malformed values count as absent."""
    found = {key: _text(value) for key, value in headers if key in (REQUEST_KEY, TRACE_KEY)}
    request, trace = found.get(REQUEST_KEY, ""), found.get(TRACE_KEY, "")
    return Origin(
        request if _REQUEST.fullmatch(request) else secrets.token_hex(8),
        trace if _TRACE.fullmatch(trace) else "",
    )


def is_sampled(traceparent: str) -> bool:
    """Whether the sender records the trace; False for an empty or malformed traceparent."""
    return _TRACE.fullmatch(traceparent) is not None and bool(int(traceparent[-2:], 16) & _SAMPLED)


def current() -> Origin:
    """Origin of the request that this task answers; empty where the task answers none."""
    return _ORIGIN.get()


def arrived(origin: Origin) -> None:
    """Binds this task to the origin of the request that it answers, until its end or its next request."""
    _ORIGIN.set(origin)
    with suppress(RuntimeError):  # no loop runs on this thread
        if (task := asyncio.current_task()) is not None:
            _OF_TASKS[task] = origin


def origin_of_task(task: "asyncio.Task[Any]") -> Origin:
    """Origin that a task was bound to by `arrived`, else an empty one; may be called from any thread."""
    return _OF_TASKS.get(task, Origin())


def for_nobody() -> None:
    """Unbinds this task from the request that started it: its work is for no single request."""
    _ORIGIN.set(Origin())
    _FIELDS.set(None)


@contextmanager
def bound(origin: Origin, **fields: str) -> Iterator[None]:
    """Binds the block to a request: its calls carry the origin, its log lines these fields and the id."""
    before = _ORIGIN.get(), _FIELDS.get()
    _ORIGIN.set(origin)
    named = {"request": origin.request, **fields}
    _FIELDS.set({**(before[1] or {}), **{key: value for key, value in named.items() if value}})
    try:
        yield
    finally:
        # Set rather than reset: a generator that is closed by another task ends in a context of its own.
        _ORIGIN.set(before[0])
        _FIELDS.set(before[1])


def bound_fields() -> Mapping[str, str]:
    """Fields that log lines of this task carry."""
    return _FIELDS.get() or {}


def host_of(peer: str) -> str:
    """The peer's address, `ipv4:HOST` of `ipv4:HOST:PORT`: its port is another one each time."""
    return peer.rpartition(":")[0] or peer


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value
