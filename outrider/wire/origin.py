"""Whose request the running code works for, as its caller named it, and what its log lines name.

Both are bound to the task that answers the request (context variables): whatever it calls sees them, and no
other task does.
"""

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

REQUEST_KEY = "x-request-id"
TRACE_KEY = "traceparent"

_REQUEST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+=-]{0,127}")
_TRACE = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class Origin:
    """What came with a request beside itself; empty where nothing did."""

    request: str = ""
    """The request's id: its sender's, or drawn where it has none."""
    traceparent: str = ""
    """Which trace it is part of, as W3C's Trace Context writes it."""

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """As it goes on to the next process, in gRPC metadata."""
        pairs = ((REQUEST_KEY, self.request), (TRACE_KEY, self.traceparent))
        return tuple((key, value) for key, value in pairs if value)


_ORIGIN: ContextVar[Origin] = ContextVar("origin", default=Origin())  # noqa: B039  # it is frozen
_FIELDS: ContextVar[Mapping[str, str] | None] = ContextVar("fields", default=None)


def origin_of(headers: Iterable[tuple[str, str | bytes]]) -> Origin:
    """From gRPC metadata or HTTP headers, their names in lower case; what is malformed counts as absent."""
    found = {key: _text(value) for key, value in headers if key in (REQUEST_KEY, TRACE_KEY)}
    request, trace = found.get(REQUEST_KEY, ""), found.get(TRACE_KEY, "")
    return Origin(
        request if _REQUEST.fullmatch(request) else secrets.token_hex(8),
        trace if _TRACE.fullmatch(trace) else "",
    )


def is_sampled(traceparent: str) -> bool:
    """Whether the trace is recorded where it comes from; not where there is none, or a malformed one."""
    return _TRACE.fullmatch(traceparent) is not None and bool(int(traceparent[-2:], 16) & _SAMPLED)


def current() -> Origin:
    """Of the request that this task answers; empty outside of one."""
    return _ORIGIN.get()


def arrived(origin: Origin) -> None:
    """This task answers a request that came so; until it ends, or another comes."""
    _ORIGIN.set(origin)


def for_nobody() -> None:
    """This task works for no request in particular, though one may have begun it."""
    _ORIGIN.set(Origin())
    _FIELDS.set(None)


@contextmanager
def bound(origin: Origin, **fields: str) -> Iterator[None]:
    """Inside, calls go out as this request's and log lines carry these fields and the request's id."""
    before = _ORIGIN.get(), _FIELDS.get()
    _ORIGIN.set(origin)
    told = {"request": origin.request, **fields}
    _FIELDS.set({**(before[1] or {}), **{key: value for key, value in told.items() if value}})
    try:
        yield
    finally:
        # Set rather than reset: a generator that is closed by another task ends in a context of its own.
        _ORIGIN.set(before[0])
        _FIELDS.set(before[1])


def bound_fields() -> Mapping[str, str]:
    """What log lines of this task carry."""
    return _FIELDS.get() or {}


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value
