"""Converts errors of the core to gRPC statuses and back, by one table for servers and clients.

Beside code and message, the trailing metadata carry the error's name (`outrider-error`), the seconds to wait
(`retry-after`) and the highest known epoch (`outrider-epoch`), and the same as google.rpc's details.
"""

import functools
import inspect
import logging
import secrets
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any, NamedTuple, NoReturn, TypeVar

import grpc
import grpc.aio

from outrider.wire.codec import epoch_from_text, epoch_to_text
from outrider.wire.error_details import DETAILS_KEY, error_details
from outrider.wire.incoming.hand_over import MessageSender, hand_over
from outrider.wire.incoming.message_stream import MessageStream
from outrider.wire.incoming.unparsed import OnlyRequest, Unparsed, parsed
from outrider.wire.keys import HEADER
from outrider.wire.origin import arrived, host_of, origin_of
from speculative import errors
from speculative.errors import OutriderError

log = logging.getLogger(__name__)

ERROR_KEY = "outrider-error"
EPOCH_KEY = "outrider-epoch"
RETRY_KEY = "retry-after"
LONGEST_MESSAGE = 1_000
LONGEST_PEER_TEXT = 500

_CODES: dict[type[OutriderError], grpc.StatusCode] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.MalformedDraft: grpc.StatusCode.INVALID_ARGUMENT,
    errors.StaleEpoch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.IdsNeeded: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ModelRefused: grpc.StatusCode.FAILED_PRECONDITION,
    errors.UnknownModel: grpc.StatusCode.NOT_FOUND,
    errors.UnknownSession: grpc.StatusCode.NOT_FOUND,
    errors.Superseded: grpc.StatusCode.ABORTED,
    errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.EmptySupport: grpc.StatusCode.INTERNAL,
    errors.DeadEnd: grpc.StatusCode.INVALID_ARGUMENT,
}


class Status(NamedTuple):
    """Code, message and trailing metadata of a failed call."""

    code: grpc.StatusCode
    message: str
    metadata: tuple[tuple[str, str], ...]


def status_of(error: BaseException) -> Status:
    """The gRPC status of an error.

    An error that is no OutriderError becomes INTERNAL with a number, under which the log has its text.
    """
    if not isinstance(error, OutriderError):
        incident = secrets.token_hex(4)
        log.error("internal error %s", incident, exc_info=error)
        return Status(
            grpc.StatusCode.INTERNAL, f"internal error {incident}; the log of that process has it", ()
        )
    code = _code_of(error)
    metadata = [(ERROR_KEY, type(error).__name__)]
    if isinstance(error, errors.StaleEpoch):
        metadata.append((EPOCH_KEY, epoch_to_text(error.highest)))
    if isinstance(error, errors.Overloaded):
        metadata.append((RETRY_KEY, f"{error.retry_after_s:g}"))
    return Status(code, shortened(str(error)), tuple(metadata))


def _code_of(error: OutriderError) -> grpc.StatusCode:
    """An error's code in the table; an error outside the table may name its own as `code`."""
    known = next((_CODES[kind] for kind in type(error).__mro__ if kind in _CODES), None)
    named = getattr(error, "code", "")
    if known is None and isinstance(named, str) and named in grpc.StatusCode.__members__:
        return grpc.StatusCode[named]
    return known or grpc.StatusCode.INTERNAL


def shortened(message: str, longest: int = LONGEST_MESSAGE) -> str:
    """A message cut to `longest` characters: status messages are HTTP/2 headers, limited to some 8 KB."""
    if len(message) <= longest:
        return message
    return f"{message[:longest]}... ({len(message)} characters)"


def peer_text(message: str) -> str:
    """A peer's message, cut to the length for logs and refusals."""
    return shortened(message, LONGEST_PEER_TEXT)


Handler = TypeVar("Handler", bound=Callable[..., Any])


def guarded(handler: Handler) -> Handler:
    """Decorates a servicer's method (a coroutine or an async generator): every error becomes a status.

    The method gets its requests parsed, within the bounds of small messages. It runs bound to the origin of
    the call; see `outrider.wire.origin`. Cancellation passes through, and so does an abort by the method
    itself.
    """
    return _guarded(handler, parsed)


def guarded_unparsed(handler: Handler) -> Handler:
    """As `guarded`, for a method that parses its requests itself; see `outrider.wire.incoming.unparsed`."""
    return _guarded(handler, _as_it_is)


def _guarded(handler: Handler, read: Callable[[Any], Awaitable[Any]]) -> Handler:
    wrapped: Callable[..., Any]
    if inspect.isasyncgenfunction(handler):

        @functools.wraps(handler)
        async def wrapped_stream(self: Any, request: Any, context: Any) -> AsyncIterator[Any]:
            arrived(origin_of(context.invocation_metadata() or ()))
            try:
                async with aclosing(
                    handler(self, await _incoming(request, context, read), context)
                ) as responses:
                    async for response in responses:
                        yield response
            except grpc.aio.AbortError:
                raise
            except Exception as error:
                await _abort(context, error)

        wrapped = wrapped_stream
    else:

        @functools.wraps(handler)
        async def wrapped_call(self: Any, request: Any, context: Any) -> Any:
            arrived(origin_of(context.invocation_metadata() or ()))
            try:
                return await handler(self, await _incoming(request, context, read), context)
            except grpc.aio.AbortError:
                raise
            except Exception as error:
                await _abort(context, error)

        wrapped = wrapped_call
    return wrapped  # type: ignore[return-value]  # the same signature, by functools.wraps


async def _incoming(request: Any, context: Any, read: Callable[[Any], Awaitable[Any]]) -> Any:
    """The method's request, or the iterator of its requests, as the method wants them."""
    if isinstance(request, AsyncIterable):
        return MessageStream(request, lambda: context.peer(), read, _sender_of(context))
    if isinstance(request, OnlyRequest):
        request = await _taken(request, context)
    return await read(request)


async def _taken(request: OnlyRequest, context: Any) -> Any:
    """The only request of a call, once it has its turn. Raises InvalidRequest where none comes."""
    try:
        taken = await hand_over().take(anext(aiter(request.messages)), _sender_of(context))
    except StopAsyncIteration:
        raise errors.InvalidRequest("the call has no message; send one, which may be empty") from None
    if isinstance(taken, Unparsed):
        taken.peer = context.peer()
    return taken


def _sender_of(context: Any) -> MessageSender:
    metadata = context.invocation_metadata() or ()
    credentials = next((value for name, value in metadata if name == HEADER), "")
    connection = context.peer()
    return MessageSender(host_of(connection), connection, hash(credentials))


async def _as_it_is(request: Any) -> Any:
    return request


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> NoReturn:
    status = status_of(error)
    _let_go(error)
    await context.abort(status.code, status.message, (*status.metadata, *_details(status)))


def _let_go(error: BaseException) -> None:
    """Frees what the frames of an error hold, such as the message that was refused.

    An abort and its call hold each other, so they stay until Python collects garbage; the abort holds the
    error. Refused messages of some MB each would add up meanwhile, to hundreds of MB.
    """
    told, seen = [error], set[int]()
    while told:
        error = told.pop()
        if id(error) not in seen:
            seen.add(id(error))
            error.__traceback__ = None
            told += [other for other in (error.__cause__, error.__context__) if other is not None]


def _details(status: Status) -> Iterator[tuple[str, bytes]]:
    """The error of the metadata in google.rpc's messages; empty for a bug, which has no name."""
    told = dict(status.metadata)
    if ERROR_KEY not in told:
        return
    number: int = status.code.value[0]
    retry_after_s = float(told[RETRY_KEY]) if RETRY_KEY in told else None
    facts = {EPOCH_KEY: told[EPOCH_KEY]} if EPOCH_KEY in told else {}
    if details := error_details(number, status.message, told[ERROR_KEY], retry_after_s, facts):
        yield DETAILS_KEY, details


@contextmanager
def rpc_errors() -> Iterator[None]:
    """Context that raises a failed RPC, sync or async, as the error that its status stands for."""
    try:
        yield
    except grpc.RpcError as error:
        raise error_of(error) from error


_KINDS: Mapping[grpc.StatusCode, type[OutriderError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: errors.InvalidRequest,
    grpc.StatusCode.ABORTED: errors.Superseded,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: errors.PermissionDenied,
    grpc.StatusCode.UNAVAILABLE: errors.Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.Unavailable,
}
# Errors made from a message alone, by the error's name in the metadata.
_NAMED: Mapping[str, type[OutriderError]] = {
    kind.__name__: kind
    for kind in (
        errors.InvalidRequest,
        errors.MalformedDraft,
        errors.IdsNeeded,
        errors.UnknownModel,
        errors.UnknownSession,
        errors.Superseded,
        errors.Unauthenticated,
        errors.PermissionDenied,
        errors.Unavailable,
        errors.DeadlineExceeded,
        errors.EmptySupport,
        errors.DeadEnd,
    )
}


_TOO_LARGE = "larger than max"
"""Part of gRPC's own text, on either end, for a message that is larger than its receiver accepts."""
_UNREACHED = "failed to connect to all addresses"
"""Part of gRPC's own text where nobody answers at an address, or answers in another protocol."""
_CANCELLED_HERE = ("Locally cancelled", "Channel closed")
"""Parts of gRPC's own texts for a call that this end has cancelled, or whose channel this end has closed."""


def error_of(error: grpc.RpcError) -> OutriderError:
    """The error that a failed call stands for: by the name that the peer sent, else by the status code."""
    call: Any = error  # both stacks' errors have these methods, the base class has none
    code: grpc.StatusCode = call.code()
    message: str = shortened(call.details() or "no message")
    metadata = {key: value for key, value in call.trailing_metadata() or () if isinstance(value, str)}
    if code is grpc.StatusCode.FAILED_PRECONDITION and EPOCH_KEY in metadata:
        return errors.StaleEpoch(message, highest=_number(metadata[EPOCH_KEY], epoch_from_text, 0))
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        if ERROR_KEY not in metadata and _TOO_LARGE in message:
            advice = "raise max_message_mb of the receiving process"
            return errors.InvalidRequest(f"the message is too large: {message} (sizes in bytes); {advice}")
        full = errors.QuotaExceeded if metadata.get(ERROR_KEY) == "QuotaExceeded" else errors.Overloaded
        return full(message, retry_after_s=_number(metadata.get(RETRY_KEY, ""), float, 1.0))
    if code is grpc.StatusCode.CANCELLED and not any(text in message for text in _CANCELLED_HERE):
        # No service of ours ends a call so, but gRPC may where a stopping peer breaks its streams off.
        return errors.Unavailable(f"the peer broke the call off: {message}")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and ERROR_KEY not in metadata:
        message = "the whole answer did not come within the call's time limit"
    if code is grpc.StatusCode.UNAVAILABLE and _UNREACHED in message:
        found = message.rpartition("last error: ")[2].removeprefix("UNKNOWN: ")
        message = f"no service answers: {found}; check host, port (gRPC's, not HTTP's) and certificates"
    if code is grpc.StatusCode.UNIMPLEMENTED:
        message = f"{message.rstrip('!')}; another service is at this address, or an older version"
    kind = _NAMED.get(metadata.get(ERROR_KEY, "")) or _KINDS.get(code)
    return kind(message) if kind else OutriderError(f"{code.name}: {message}")


Number = TypeVar("Number", int, float)


def _number(text: str, read: Callable[[str], Number], otherwise: Number) -> Number:
    """A peer's number, or `otherwise` where the text is no number."""
    try:
        return read(text)
    except ValueError:
        return otherwise


def error_object(error: BaseException) -> dict[str, dict[str, str]]:
    """An error as JSON that programs read in place of a result: status code's name and message."""
    status = status_of(error)
    return {"error": {"code": status.code.name, "message": status.message}}
