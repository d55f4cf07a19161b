"""Errors as gRPC statuses and back, through a real server."""

import inspect
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from outrider.v1 import generation_pb2, generation_pb2_grpc
from outrider.wire.channel import open_channel, server_options
from outrider.wire.codec import epoch_to_text
from outrider.wire.error_details import DETAILS_KEY
from outrider.wire.status import (
    error_object,
    error_of,
    guarded,
    peer_text,
    rpc_errors,
    shortened,
    status_of,
)
from speculative import errors
from speculative.errors import OutriderError

if TYPE_CHECKING:
    from outrider.v1.generation_pb2_grpc import GenerationAsyncStub  # a name of the type stubs only

FAMILY = [
    kind
    for kind in vars(errors).values()
    if inspect.isclass(kind) and issubclass(kind, OutriderError) and kind is not OutriderError
]
MADE: dict[str, OutriderError] = {
    "StaleEpoch": errors.StaleEpoch("epoch 3 is older than 7", highest=2**63 + 7),
    "Overloaded": errors.Overloaded("no room", retry_after_s=1.5),
    "QuotaExceeded": errors.QuotaExceeded("used up", retry_after_s=2.5),
    "ModelRefused": errors.ModelRefused("mamba is not served", model_type="mamba"),
}


def made(kind: type[OutriderError]) -> OutriderError:
    return MADE.get(kind.__name__) or kind("what was wrong")


class Failing(generation_pb2_grpc.GenerationServicer):
    """Ends every call with the error it was made with."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error
        self.closed = False

    @guarded
    async def Cancel(self, request: Any, context: Any) -> generation_pb2.CancelResponse:
        if self.error is None:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "its own words")
        assert self.error is not None
        raise self.error

    @guarded
    async def ListModels(self, request: Any, context: Any) -> generation_pb2.ListModelsResponse:
        return generation_pb2.ListModelsResponse()

    @guarded
    async def Generate(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        try:
            yield generation_pb2.GenerateResponse()
            async for _ in request_iterator:
                if self.error is not None:
                    raise self.error
        finally:
            self.closed = True


@asynccontextmanager
async def failing(
    error: BaseException | None,
) -> AsyncIterator[tuple["GenerationAsyncStub", Failing]]:
    server = grpc.aio.server(options=server_options())
    port = server.add_insecure_port("127.0.0.1:0")
    servicer = Failing(error)
    generation_pb2_grpc.add_GenerationServicer_to_server(servicer, server)
    await server.start()
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            yield generation_pb2_grpc.GenerationStub(channel), servicer
    finally:
        await server.stop(None)


async def failed_call(error: BaseException | None) -> grpc.aio.AioRpcError:
    async with failing(error) as (stub, _):
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub.Cancel(generation_pb2.CancelRequest(), timeout=100)
        return failed.value


@pytest.mark.parametrize("kind", FAMILY)
async def test_each_error_arrives_as_itself(kind: type[OutriderError]) -> None:
    sent = made(kind)
    received = error_of(await failed_call(sent))
    if kind is errors.ModelRefused:  # announced by a process that fails to start, not sent over a call
        assert str(sent) in str(received)
        return
    assert type(received) is kind
    assert str(received) == str(sent)
    assert vars(received) == vars(sent)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidRequest("x"), grpc.StatusCode.INVALID_ARGUMENT),
        (MADE["StaleEpoch"], grpc.StatusCode.FAILED_PRECONDITION),
        (errors.UnknownModel("x"), grpc.StatusCode.NOT_FOUND),
        (errors.UnknownSession("x"), grpc.StatusCode.NOT_FOUND),
        (errors.Superseded("x"), grpc.StatusCode.ABORTED),
        (MADE["Overloaded"], grpc.StatusCode.RESOURCE_EXHAUSTED),
        (MADE["QuotaExceeded"], grpc.StatusCode.RESOURCE_EXHAUSTED),
        (errors.Unauthenticated("x"), grpc.StatusCode.UNAUTHENTICATED),
        (errors.PermissionDenied("x"), grpc.StatusCode.PERMISSION_DENIED),
        (errors.Unavailable("x"), grpc.StatusCode.UNAVAILABLE),
        (errors.DeadlineExceeded("x"), grpc.StatusCode.DEADLINE_EXCEEDED),
        (errors.EmptySupport("x"), grpc.StatusCode.INTERNAL),
    ],
)
def test_each_error_has_the_code_that_the_contract_names(error: OutriderError, code: grpc.StatusCode) -> None:
    assert status_of(error).code is code


async def test_overload_says_when_to_come_back() -> None:
    failed = await failed_call(MADE["Overloaded"])
    assert ("retry-after", "1.5") in tuple(failed.trailing_metadata() or ())


async def test_a_stale_epoch_names_the_highest_epoch() -> None:
    failed = await failed_call(MADE["StaleEpoch"])
    assert ("outrider-epoch", "8000000000000007") in tuple(failed.trailing_metadata() or ())


async def test_a_bug_is_internal_and_its_text_stays_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        failed = await failed_call(RuntimeError("secret detail"))
    assert failed.code() is grpc.StatusCode.INTERNAL
    message = failed.details() or ""
    assert "secret" not in message
    assert "secret detail" in caplog.text
    incident = message.split()[2].rstrip(";")
    assert incident in caplog.text


async def test_an_abort_of_the_handlers_own_passes() -> None:
    failed = await failed_call(None)
    assert (failed.code(), failed.details()) == (grpc.StatusCode.PERMISSION_DENIED, "its own words")


async def test_an_error_in_a_stream_ends_it_with_its_status() -> None:
    async with failing(errors.Superseded("a later request took over")) as (stub, servicer):
        call = stub.Generate()
        await call.write(generation_pb2.GenerateRequest())
        assert await call.read() == generation_pb2.GenerateResponse()
        with pytest.raises(errors.Superseded, match="a later request took over"), rpc_errors():
            await call.read()
        assert servicer.closed


async def test_a_cancelled_stream_closes_its_handler() -> None:
    async with failing(None) as (stub, servicer):
        call = stub.Generate()
        await call.read()
        call.cancel()
        with pytest.raises(errors.OutriderError, match="CANCELLED"):
            raise error_of(await _ended(call))
    assert servicer.closed


async def _ended(call: Any) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(
        await call.code(), grpc.aio.Metadata(), grpc.aio.Metadata(), await call.details()
    )


async def test_a_peer_that_is_not_there_is_unavailable() -> None:
    async with open_channel("127.0.0.1:1") as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        with pytest.raises(errors.Unavailable), rpc_errors():
            await stub.Cancel(generation_pb2.CancelRequest(), timeout=100)


def test_a_method_that_a_service_does_not_have_means_another_service_or_version() -> None:
    nothing = grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNIMPLEMENTED, nothing, nothing, "Method not found!")
    assert str(error_of(error)) == (
        "UNIMPLEMENTED: Method not found; another service is at this address, or an older version"
    )


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.Unavailable),
        (grpc.StatusCode.OUT_OF_RANGE, errors.InvalidRequest),
        (grpc.StatusCode.UNIMPLEMENTED, OutriderError),
        (grpc.StatusCode.FAILED_PRECONDITION, OutriderError),
    ],
)
def test_a_status_without_a_name_is_known_by_its_code(
    code: grpc.StatusCode, kind: type[OutriderError]
) -> None:
    nothing = grpc.aio.Metadata()
    assert type(error_of(grpc.aio.AioRpcError(code, nothing, nothing, "why"))) is kind


@pytest.mark.parametrize(
    "metadata",
    [("outrider-epoch", "nonsense"), ("retry-after", "soon"), ("outrider-error", "Exception")],
)
@pytest.mark.parametrize("code", [grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.RESOURCE_EXHAUSTED])
def test_a_peers_nonsense_in_metadata_is_no_bug_here(
    metadata: tuple[str, str], code: grpc.StatusCode
) -> None:
    failed = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(metadata), "why")
    assert isinstance(error_of(failed), OutriderError)


@pytest.mark.parametrize(
    ("details", "kind"),
    [
        ("CANCELLED", errors.Unavailable),
        ("Locally cancelled by application!", OutriderError),
        ("Stream removed (Channel closed!)", OutriderError),  # another thread has closed the client
    ],
)
def test_a_call_that_the_peer_breaks_off_is_lost_and_one_that_is_cancelled_here_is_not(
    details: str, kind: type[OutriderError]
) -> None:
    """A server that stops sends either GOAWAY first or the stream's reset, which says CANCELLED."""
    nothing = grpc.aio.Metadata()
    assert type(error_of(grpc.aio.AioRpcError(grpc.StatusCode.CANCELLED, nothing, nothing, details))) is kind


@pytest.mark.parametrize("details", ["Deadline Exceeded", "Stream removed (Deadline Exceeded)"])
def test_a_time_limit_reads_as_one_however_grpc_words_it(details: str) -> None:
    nothing = grpc.aio.Metadata()
    error = error_of(grpc.aio.AioRpcError(grpc.StatusCode.DEADLINE_EXCEEDED, nothing, nothing, details))
    assert type(error) is errors.Unavailable
    assert str(error) == "the whole answer did not come within the call's time limit"


async def test_a_port_where_nobody_listens_is_named_with_what_to_look_at() -> None:
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await channel.unary_unary("/a/b")(b"")
    said = str(error_of(failed.value))
    assert said.startswith("no service answers: ipv4:127.0.0.1:1: ")
    assert said.endswith("; check host, port (gRPC's, not HTTP's) and certificates")


@pytest.mark.parametrize("end", ["CLIENT: Received", "SERVER: Received", "CLIENT: Sent"])
def test_a_message_that_is_too_large_is_no_overload(end: str) -> None:
    said = f"{end} message larger than max (41943078 vs. 33554432)"
    nothing = grpc.aio.Metadata()
    error = error_of(grpc.aio.AioRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, nothing, nothing, said))
    assert type(error) is errors.InvalidRequest
    assert "too large" in str(error)
    assert "max_message_mb" in str(error)
    assert "41943078 vs. 33554432" in str(error)


def test_a_full_worker_that_speaks_of_a_maximum_is_an_overload() -> None:
    named = grpc.aio.Metadata(("outrider-error", "Overloaded"))
    nothing = grpc.aio.Metadata()
    said = "this is larger than max_sessions"
    error = error_of(grpc.aio.AioRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, nothing, named, said))
    assert type(error) is errors.Overloaded


def test_a_peer_s_text_is_bounded() -> None:
    nothing = grpc.aio.Metadata()
    error = error_of(grpc.aio.AioRpcError(grpc.StatusCode.UNKNOWN, nothing, nothing, "x" * 100_000))
    assert str(error).endswith("... (100000 characters)")
    assert peer_text("x" * 501) == "x" * 500 + "... (501 characters)"
    assert peer_text("short") == "short"


async def test_a_long_message_is_cut_to_fit_a_header() -> None:
    failed = await failed_call(errors.InvalidRequest("x" * 1_000_000))
    assert failed.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (failed.details() or "").endswith("... (1000000 characters)")
    assert shortened("short") == "short"


def details_of(failed: grpc.aio.AioRpcError) -> Status:
    (data,) = [value for key, value in failed.trailing_metadata() or () if key == DETAILS_KEY]
    assert isinstance(data, bytes)
    return Status.FromString(data)


async def test_other_languages_read_the_name_and_the_delay_as_details() -> None:
    failed = await failed_call(errors.Overloaded("no room", retry_after_s=1.5))
    status, info, retry = details_of(failed), ErrorInfo(), RetryInfo()
    assert (status.code, status.message) == (8, failed.details())
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain) == ("Overloaded", "outrider")
    assert status.details[1].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 1500


async def test_the_details_of_a_stale_epoch_name_the_highest() -> None:
    info = ErrorInfo()
    failed = await failed_call(errors.StaleEpoch("epoch 3 is older than 7", highest=7))
    assert details_of(failed).details[0].Unpack(info)
    assert info.metadata["outrider-epoch"] == epoch_to_text(7)


@pytest.mark.parametrize("error", [errors.InvalidRequest("é" * 2_000), ValueError("a bug")])
async def test_details_that_are_long_or_nobodys_are_left_out(error: Exception) -> None:
    failed = await failed_call(error)
    assert DETAILS_KEY not in dict(failed.trailing_metadata() or ())


def test_programs_read_the_codes_name_and_the_message() -> None:
    assert error_object(errors.UnknownModel("no model x")) == {
        "error": {"code": "NOT_FOUND", "message": "no model x"}
    }
