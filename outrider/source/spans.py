"""A span for each session that a source follows, where its trace is recorded; knows nothing of drafting."""

from dataclasses import dataclass

from outrider.runtime.tracing import Span, Tracing
from outrider.source.events import Outgoing
from outrider.v1 import draft_source_pb2

SPAN = "outrider.follow"


@dataclass(slots=True)
class _Followed:
    span: Span
    drafts: int = 0
    nodes: int = 0


class FollowSpans:
    """Of all streams of a source, by stream and alias. Belongs to the event loop."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._followed: dict[tuple[int, int], _Followed] = {}

    def told(self, stream: int, message: draft_source_pb2.AttachRequest) -> None:
        """A verifier says what is to be followed, and what no longer."""
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
                self._followed[stream, follow.alias] = _Followed(span)

    def drafted(self, stream: int, outgoing: Outgoing) -> None:
        """These drafts are on their way."""
        if not self._followed:
            return
        for alias, fragment in outgoing.drafts:
            if (followed := self._followed.get((stream, alias))) is not None:
                followed.drafts += 1
                followed.nodes += len(fragment)
        for alias, _ in outgoing.refusals:
            self._end((stream, alias), "refused")

    def broken(self, stream: int) -> None:
        """The stream is gone."""
        for name in [name for name in self._followed if name[0] == stream]:
            self._end(name, "the stream broke")

    def _end(self, name: tuple[int, int], error: str = "") -> None:
        if (followed := self._followed.pop(name, None)) is not None:
            followed.span.set(specdec__drafts=followed.drafts, specdec__nodes=followed.nodes)
            followed.span.end(error)
