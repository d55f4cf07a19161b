"""A request is traced, named in logs and explained, whichever front it came through."""

import asyncio
import io
import json
import logging
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from outrider.runtime.log import configure
from outrider.runtime.tracing import Tracing
from outrider.tokens import TokenTable
from outrider.v1 import explain_pb2, generation_pb2
from outrider.v1.generation_pb2_grpc import GenerationStub
from outrider.wire.channel import open_channel
from speculative.errors import InvalidRequest, Unavailable, UnknownSession
from tests.orchestrator.conftest import World

TRACE = "0af7651916cd43dd8448eb211c80319c"
CLIENT = f"00-{TRACE}-b7ad6b7169203331-01"


@pytest.fixture
def logged() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    configure("orchestrator", "debug", "json", stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)


def events(stream: io.StringIO, message: str) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in stream.getvalue().splitlines()]
    return [event for event in events if event["message"] == message]


def recording(sample: float = 0.0) -> tuple[Tracing, Any]:
    pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from outrider.runtime.tracing import traced

    spans = InMemorySpanExporter()
    return traced("orchestrator", SimpleSpanProcessor(spans), sample), spans


async def generate(address: str, *metadata: tuple[str, str], **fields: Any) -> list[Any]:
    start = generation_pb2.GenerateStart(
        **{"ids": generation_pb2.TokenIds(ids=[5, 6]), "max_tokens": 4, **fields}
    )
    async with open_channel(address) as channel:
        call = GenerationStub(channel).Generate(
            iter([generation_pb2.GenerateRequest(start=start)]), timeout=100, metadata=metadata
        )
        return [message async for message in call]


async def test_a_trace_goes_from_the_client_through_the_request_to_the_verifier(world: World) -> None:
    verifier = await world.verifier()
    tracing, spans = recording()
    front = await world.ready(await world.front([verifier.address], tracing=tracing))
    await generate(front.address, ("traceparent", CLIENT), ("x-request-id", "job-7"), session="mine")
    await world.until(spans.get_finished_spans)
    (span,) = spans.get_finished_spans()
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == "b7ad6b7169203331"
    assert verifier.metadata[0]["traceparent"] == f"00-{TRACE}-{span.context.span_id:016x}-01"
    assert verifier.metadata[0]["x-request-id"] == "job-7"
    said = dict(span.attributes)
    assert said["gen_ai.request.model"] == "toy"
    assert said["gen_ai.conversation.id"] == "mine"
    assert (said["gen_ai.usage.input_tokens"], said["gen_ai.usage.output_tokens"]) == (2, 4)
    assert said["gen_ai.response.finish_reasons"] == ("length",)
    assert [event.name for event in span.events] == ["opened", "first token"]


async def test_what_is_not_sampled_leaves_no_span_and_asks_workers_for_none(world: World) -> None:
    verifier = await world.verifier()
    tracing, spans = recording(sample=0.0)
    front = await world.ready(await world.front([verifier.address], tracing=tracing))
    await generate(front.address)
    await generate(front.address, ("traceparent", CLIENT[:-2] + "00"))
    assert not [metadata for metadata in verifier.metadata if "traceparent" in metadata]
    assert spans.get_finished_spans() == ()


async def test_a_request_that_fails_is_a_span_that_says_so(world: World) -> None:
    verifier = await world.verifier(refusal=InvalidRequest("limit is odd"))
    tracing, spans = recording(sample=1.0)
    front = await world.ready(await world.front([verifier.address], tracing=tracing))
    with pytest.raises(grpc.aio.AioRpcError):
        await generate(front.address)
    await world.until(spans.get_finished_spans)
    (span,) = spans.get_finished_spans()
    assert span.status.description == "InvalidRequest"
    assert front.sample("request_errors_total", reason="InvalidRequest") == 1


def post(url: str, body: dict[str, Any], **headers: str) -> tuple[int, dict[str, str]]:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"content-type": "application/json", **headers}
    )
    try:
        with urllib.request.urlopen(request, timeout=100) as answer:
            return answer.status, dict(answer.headers)
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers)


async def over_http(front: Any, body: dict[str, Any], **headers: str) -> tuple[int, dict[str, str]]:
    return await asyncio.to_thread(post, f"{front.http}/v1/completions", body, **headers)


async def test_headers_over_http_do_what_metadata_do_over_grpc(
    world: World, table: TokenTable, logged: io.StringIO
) -> None:
    verifier = await world.verifier(tokens=table)
    tracing, spans = recording()
    front = await world.front([verifier.address], tracing=tracing, http_bind="127.0.0.1:0")
    await world.ready(front)
    body = {"prompt": "abc", "max_tokens": 4}
    status, headers = await over_http(front, body, traceparent=CLIENT, **{"X-Request-Id": "job-8"})
    assert (status, headers["x-request-id"]) == (200, "job-8")
    await world.until(spans.get_finished_spans)
    (span,) = spans.get_finished_spans()
    assert verifier.metadata[0]["traceparent"] == f"00-{TRACE}-{span.context.span_id:016x}-01"
    (event,) = events(logged, "request ended")
    assert (event["request"], event["outcome"], event["tokens"]) == ("job-8", "length", 4)
    assert event["session"] == verifier.opened[0].key.session
    status, headers = await over_http(front, {"prompt": 7.5})
    assert status == 400
    assert len(headers["x-request-id"]) == 16, "an error has an id to ask about, too"


async def test_logs_name_the_request_and_hold_nothing_of_what_was_said(
    world: World, table: TokenTable, logged: io.StringIO
) -> None:
    verifier = await world.verifier(tokens=table)
    front = await world.ready(await world.front([verifier.address]))
    prompt, stop = "zxcvbnm", "qwertyu"
    completion = await front.client.generate(
        prompt, max_tokens=12, session="mine", tenant="us", stop=[stop], seed=5
    )
    with pytest.raises(InvalidRequest):
        await front.client.generate(prompt, max_tokens=12, temperature=-1.0, session="bad")
    await world.until(lambda: len(events(logged, "request ended")) == 2)
    done, refused = events(logged, "request ended")
    assert (done["tenant"], done["session"], done["outcome"]) == ("us", "mine", "length")
    assert len(done["request"]) == 16
    assert refused["outcome"] == "InvalidRequest"
    assert verifier.metadata[0]["x-request-id"] == done["request"]
    assert completion.text
    for secret in (prompt, stop, completion.text, str(list(completion.ids))):
        assert secret not in logged.getvalue()


def incarnation(epoch: int) -> explain_pb2.Incarnation:
    return explain_pb2.Incarnation(epoch=epoch, source_names=["lookup"], prompt_tokens=2)


async def test_all_verifiers_that_had_a_session_explain_it_the_latest_last(world: World) -> None:
    first = await world.verifier(explained=[incarnation(9)])
    second = await world.verifier(explained=[incarnation(4)])
    front = await world.ready(await world.front([first.address, second.address]))
    explanation = await front.client.explain("mine", tenant="us")
    assert [(one.epoch, one.verifier) for one in explanation.incarnations] == [
        (4, second.address),
        (9, first.address),
    ]
    with pytest.raises(UnknownSession, match="no verifier knows session 'mine' of tenant 'them'"):
        await front.client.explain("mine", tenant="them")
    with pytest.raises(UnknownSession, match="no verifier knows choice 3 of session 'mine'"):
        await front.client.explain("mine", tenant="them", choice=3)
    with pytest.raises(InvalidRequest):
        await front.client.explain("two\nlines")


async def test_an_explanation_does_without_a_verifier_that_is_gone(world: World) -> None:
    here = await world.verifier(explained=[incarnation(4)])
    gone = await world.verifier()
    front = await world.ready(await world.front([here.address, gone.address]))
    await gone.server.stop(0)
    assert len((await front.client.explain("mine", tenant="us")).incarnations) == 1
    with pytest.raises(Unavailable, match="not answering: 1"):
        await front.client.explain("mine", tenant="them")
