"""Spans of requests, exported over OTLP where an endpoint is set; OpenTelemetry is imported only then.

Each process that works for a request makes one span, and child spans only where the trace is sampled. A
process passes the `traceparent` of its span to the processes that it calls; only the front door begins a
trace. This module knows nothing of what the spans are about.
"""

import threading
import time
from typing import TYPE_CHECKING, TypeAlias

from outrider.wire.origin import is_sampled
from speculative.errors import InvalidRequest

if TYPE_CHECKING:
    from opentelemetry import trace
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

Value: TypeAlias = str | bool | int | float | tuple[str, ...]

_CLOSE_S = 1.0


class Span:
    """A recorded span, open until `end`."""

    def __init__(self, tracer: "trace.Tracer", span: "trace.Span") -> None:
        self._tracer = tracer
        self._span = span
        context = span.get_span_context()
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
        """W3C traceparent of this span; spans of other processes that get it are children of this span."""

    def set(self, **attributes: Value) -> None:
        """Adds attributes to the span; `__` in a name stands for a dot."""
        for name, value in attributes.items():
            self._span.set_attribute(name.replace("__", "."), value)

    def note(self, event: str, **attributes: Value) -> None:
        """Adds an event to the span, at this moment."""
        self._span.add_event(event, {name.replace("__", "."): value for name, value in attributes.items()})

    def child(self, name: str, began_s: float, ended_s: float, **attributes: Value) -> None:
        """Records a finished child span; its times are seconds of time.perf_counter."""
        from opentelemetry import trace

        span = self._tracer.start_span(
            name, trace.set_span_in_context(self._span), start_time=_wall_ns(began_s)
        )
        Span(self._tracer, span).set(**attributes)
        span.end(_wall_ns(ended_s))

    def end(self, error: str = "") -> None:
        """Ends the span; a non-empty `error` marks it as failed, with this reason."""
        if error:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()


class Tracing:
    """Makes spans. Without a provider every span is None and costs one comparison."""

    def __init__(self, provider: "TracerProvider | None" = None) -> None:
        self._provider = provider
        self._tracer = None if provider is None else provider.get_tracer("outrider")

    def request(self, name: str, traceparent: str = "", **attributes: Value) -> Span | None:
        """The span of a request at the front door, in the client's trace or in a new trace.

        None where the trace is not sampled: the client's traceparent decides, or for a new trace the ratio.
        """
        if self._tracer is None:
            return None
        return self._start(self._tracer, name, traceparent, attributes)

    def part(self, name: str, traceparent: str, **attributes: Value) -> Span | None:
        """A span of work for another process's request; None unless that process records its span."""
        if self._tracer is None or not is_sampled(traceparent):
            return None
        return self._start(self._tracer, name, traceparent, attributes)

    def close(self) -> None:
        """Sends the remaining spans, for a second at most. Blocks."""
        if self._provider is not None:
            # The library would retry an absent collector for several seconds.
            sending = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
            sending.start()
            sending.join(_CLOSE_S)

    @staticmethod
    def _start(
        tracer: "trace.Tracer", name: str, traceparent: str, attributes: dict[str, Value]
    ) -> Span | None:
        from opentelemetry.trace import SpanKind

        span = tracer.start_span(name, _parent(traceparent), SpanKind.SERVER)
        if not span.is_recording():
            return None
        made = Span(tracer, span)
        made.set(**attributes)
        return made


def open_tracing(role: str, endpoint: str | None, sample: float) -> Tracing:
    """Tracing as the settings say; without an endpoint it makes no spans.

    Args:
        endpoint: URL of a collector that takes OTLP over gRPC: http://host:port, or https.
        sample: share of the requests without a trace of their own for which a trace is begun.

    Raises InvalidRequest where OpenTelemetry is not installed.
    """
    if endpoint is None:
        return Tracing()
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise InvalidRequest(
            f"trace_endpoint is {endpoint}, but OpenTelemetry is not installed: install outrider[otel], or "
            "leave trace_endpoint out"
        ) from error
    return traced(role, BatchSpanProcessor(OTLPSpanExporter(endpoint)), sample)


def traced(role: str, processor: "SpanProcessor", sample: float) -> Tracing:
    """Tracing that hands its spans to this processor."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    resource = Resource.create({"service.name": f"outrider-{role}"})
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(sample)), resource=resource, shutdown_on_exit=False
    )
    provider.add_span_processor(processor)
    return Tracing(provider)


def _parent(traceparent: str) -> "Context":
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = {"traceparent": traceparent} if traceparent else {}
    return TraceContextTextMapPropagator().extract(carrier, Context())


def _wall_ns(moment_s: float) -> int:
    """A moment of time.perf_counter as nanoseconds since 1970."""
    return time.time_ns() - int((time.perf_counter() - moment_s) * 1e9)
