"""Spans are made where an endpoint is set, and cost nothing elsewhere."""

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from outrider.runtime.tracing import Tracing, open_tracing, traced
from speculative.errors import InvalidRequest

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")

from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.in_time import in_time

ROOT = Path(__file__).resolve().parents[2]
TRACE = "0af7651916cd43dd8448eb211c80319c"
CLIENT = f"00-{TRACE}-b7ad6b7169203331-01"


def recording(sample: float = 1.0) -> tuple[Tracing, InMemorySpanExporter]:
    spans = InMemorySpanExporter()
    return traced("verifier", SimpleSpanProcessor(spans), sample), spans


def test_a_request_without_a_trace_begins_one_by_the_ratio() -> None:
    tracing, spans = recording(sample=1.0)
    span = tracing.request("outrider.request")
    assert span is not None
    span.set(gen_ai__request__model="m", specdec__rounds=3)
    span.end()
    (seen,) = spans.get_finished_spans()
    assert seen.attributes == {"gen_ai.request.model": "m", "specdec.rounds": 3}
    assert seen.resource.attributes["service.name"] == "outrider-verifier"
    never, _ = recording(sample=0.0)
    assert never.request("outrider.request") is None


@pytest.mark.parametrize(("flag", "sample"), [("01", 0.0), ("00", 1.0)])
def test_a_client_s_trace_continues_as_the_client_samples_it(flag: str, sample: float) -> None:
    tracing, spans = recording(sample)
    span = tracing.request("outrider.request", CLIENT[:-2] + flag)
    assert (span is not None) == (flag == "01")
    if span is not None:
        assert span.traceparent.split("-")[1] == TRACE
        span.end()
        (seen,) = spans.get_finished_spans()
        assert seen.parent is not None
        assert f"{seen.parent.span_id:016x}" == "b7ad6b7169203331"


def test_work_for_a_request_is_recorded_where_the_request_is() -> None:
    tracing, spans = recording(sample=0.0)
    span = tracing.part("outrider.decode", CLIENT)
    assert span is not None
    span.child("outrider.round", 10.0, 10.5, specdec__step=4)
    span.note("parked", why="nobody reads")
    span.end("it failed")
    inner, outer = spans.get_finished_spans()
    assert (inner.name, inner.attributes) == ("outrider.round", {"specdec.step": 4})
    assert inner.parent is not None
    assert inner.parent.span_id == outer.context.span_id
    assert inner.end_time is not None
    assert inner.start_time is not None
    assert abs(inner.end_time - inner.start_time - 5e8) < 1e7
    assert (outer.status.description, outer.events[0].name) == ("it failed", "parked")
    for unsampled in ("", CLIENT[:-2] + "00", "junk"):
        assert tracing.part("outrider.decode", unsampled) is None


def test_without_an_endpoint_nothing_is_imported_and_nothing_recorded() -> None:
    code = (
        "import sys\n"
        "import outrider.runtime.serve\n"
        "from outrider.runtime.tracing import open_tracing\n"
        "tracing = open_tracing('verifier', None, 1.0)\n"
        f"assert tracing.request('x', '{CLIENT}') is None and tracing.part('x', '{CLIENT}') is None\n"
        "tracing.close()\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry.sdk')]\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT, check=True, timeout=200)


def test_spans_reach_a_collector() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc", reason="the extra otel is not installed")
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as services

    received: list[Any] = []

    class Collector(services.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            received.append(request)
            return messages.ExportTraceServiceResponse()

    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        services.add_TraceServiceServicer_to_server(Collector(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        tracing = open_tracing("verifier", f"http://127.0.0.1:{port}", 1.0)
        span = tracing.request("outrider.request")
        assert span is not None
        span.end()
        tracing.close()
        server.stop(0).wait()
    (request,) = received
    (one,) = request.resource_spans[0].scope_spans[0].spans
    assert one.name == "outrider.request"


def test_an_absent_collector_does_not_delay_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc", reason="the extra otel is not installed")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "6")
    tracing = open_tracing("verifier", "http://127.0.0.1:1", 1.0)
    span = tracing.request("outrider.request")
    assert span is not None
    span.end()
    began = time.monotonic()
    tracing.close()
    took = time.monotonic() - began
    # The exporter draws from `random` as long as it retries, which Hypothesis objects to in other tests.
    retrying = [thread for thread in threading.enumerate() if thread.name == "last spans"]
    assert retrying, "the exporter gives up by itself before the end"
    for thread in retrying:
        thread.join(60)
        assert not thread.is_alive()
    in_time(took < 2.5)


def test_an_endpoint_without_the_library_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    with pytest.raises(InvalidRequest, match=r"install outrider\[otel\]"):
        open_tracing("verifier", "http://127.0.0.1:4317", 0.1)
