"""A span for each followed session, if the session is traced; knows nothing of drafting."""

from dataclasses import dataclass

from outrider.runtime.tracing import Span, Tracing
from outrider.source.events import Outgoing
from outrider.v1 import draft_source_pb2

SPAN = "outrider.follow"


@dataclass(slots=True)
class _SessionSpan:
    span: Span
    drafts: int = 0
    nodes: int = 0


class FollowSpans:
    """Open spans of all streams of a source, by stream and alias. Belongs to the event loop."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._open: dict[tuple[int, int], _SessionSpan] = {}

    def received(self, stream: int, message: draft_source_pb2.AttachRequest) -> None:
        """Ends the spans of sessions that end in a verifier's message; begins those of its follows."""
        for alias in message.end:
            self._end((stream, alias))
        for follow in message.follow:
            span = self._tracing.part(SPAN, follow.traceparent)
            if span is not None:
                span.set(
                    gen_ai__conversation__id=follow.key.session,
                    specdec__choice=follow.key.choice,
                    specdec__sources=tuple(follow.sources),
                )
                self._end((stream, follow.alias))
                self._open[stream, follow.alias] = _SessionSpan(span)

    def sent(self, stream: int, outgoing: Outgoing) -> None:
        """Counts drafts in their sessions' spans; ends the spans of refused sessions."""
        if not self._open:
            return
        for alias, fragment in outgoing.drafts:
            if (session := self._open.get((stream, alias))) is not None:
                session.drafts += 1
                session.nodes += len(fragment)
        for alias, _ in outgoing.refusals:
            self._end((stream, alias), "refused")

    def stream_closed(self, stream: int) -> None:
        """Ends all spans of a stream."""
        for name in [name for name in self._open if name[0] == stream]:
            self._end(name, "the stream broke")

    def _end(self, name: tuple[int, int], error: str = "") -> None:
        if (session := self._open.pop(name, None)) is not None:
            session.span.set(specdec__drafts=session.drafts, specdec__nodes=session.nodes)
            session.span.end(error)
