"""A source's spans last as long as it follows a session, and count what it drafted."""

from typing import Any

import pytest

from outrider.runtime.tracing import Tracing
from outrider.source.events import Outgoing
from outrider.source.spans import FollowSpans
from outrider.v1 import common_pb2, draft_source_pb2
from speculative.fragment import Fragment

TRACED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def recorded() -> tuple[FollowSpans, Any]:
    pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from outrider.runtime.tracing import traced

    spans = InMemorySpanExporter()
    return FollowSpans(traced("drafter", SimpleSpanProcessor(spans), 0.0)), spans


def follow(alias: int, traceparent: str = TRACED) -> draft_source_pb2.AttachRequest:
    key = common_pb2.SessionKey(session=f"s{alias}")
    one = draft_source_pb2.Follow(alias=alias, key=key, sources=["drafter"], traceparent=traceparent)
    return draft_source_pb2.AttachRequest(follow=[one])


def drafts(alias: int, nodes: int) -> Outgoing:
    chain = tuple(range(-1, nodes - 1))
    fragment = Fragment(
        source=1,
        epoch=1,
        base=4,
        prefix_hash=7,
        tokens=tuple(range(nodes)),
        parents=chain,
        survival=(0.5,) * nodes,
    )
    return Outgoing([(alias, fragment)])


def test_a_followed_session_is_a_span_with_what_was_drafted(recorded: tuple[FollowSpans, Any]) -> None:
    follows, spans = recorded
    follows.received(0, follow(3))
    follows.sent(0, drafts(3, 4))
    follows.sent(0, drafts(3, 2))
    follows.sent(1, drafts(3, 9))
    assert spans.get_finished_spans() == ()
    follows.received(0, draft_source_pb2.AttachRequest(end=[3]))
    (span,) = spans.get_finished_spans()
    assert (span.attributes["specdec.drafts"], span.attributes["specdec.nodes"]) == (2, 6)
    assert span.attributes["gen_ai.conversation.id"] == "s3"
    assert f"{span.parent.span_id:016x}" == "b7ad6b7169203331"


def test_a_broken_stream_ends_its_spans_and_no_others(recorded: tuple[FollowSpans, Any]) -> None:
    follows, spans = recorded
    follows.received(0, follow(1))
    follows.received(1, follow(1))
    follows.stream_closed(0)
    (span,) = spans.get_finished_spans()
    assert span.status.description == "the stream broke"
    follows.sent(1, Outgoing(refusals=[(1, "no")]))
    assert spans.get_finished_spans()[1].status.description == "refused"


@pytest.mark.parametrize("traceparent", ["", TRACED[:-2] + "00", "junk", "é" * 55])
def test_what_is_not_recorded_elsewhere_is_not_recorded_here(
    recorded: tuple[FollowSpans, Any], traceparent: str
) -> None:
    follows, spans = recorded
    follows.received(0, follow(1, traceparent))
    follows.sent(0, drafts(1, 2))
    follows.received(0, draft_source_pb2.AttachRequest(end=[1]))
    assert spans.get_finished_spans() == ()


def test_without_tracing_nothing_happens() -> None:
    follows = FollowSpans(Tracing())
    follows.received(0, follow(1))
    follows.sent(0, drafts(1, 2))
    follows.stream_closed(0)
