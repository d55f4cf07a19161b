"""What is kept, traced and logged of a worker's sessions while they are decoded: on the event loop, after a
step's results have gone out. Nothing here is on a token's way.
"""

import logging
import time
from dataclasses import dataclass

from outrider.runtime.tracing import Span, Tracing
from outrider.v1 import explain_pb2
from outrider.wire.codec import SessionKey, finish_to_wire
from outrider.wire.origin import Origin
from speculative.commit import FinishReason
from speculative.stats import UsageCount
from verifier_service.engine.messages import Update
from verifier_service.journal import Entry, Journal, Record, Share
from verifier_service.registry import Mirror

log = logging.getLogger(__name__)

SPAN, ROUND = "outrider.decode", "outrider.round"


@dataclass(frozen=True, slots=True)
class _Open:
    """A running session: where it comes from, and its span if it has one."""

    request: str
    span: Span | None


class Chronicle:
    """Told of every session that begins, of every update, and of those that are gone."""

    def __init__(self, tracing: Tracing, journal: Journal | None = None) -> None:
        self.journal = journal or Journal()
        self._tracing = tracing
        self._open: dict[int, _Open] = {}

    def began(self, mirror: Mirror, origin: Origin, prompt: int) -> None:
        """A session is decoded from now on; `prompt` ids of it are the prompt."""
        request, key = mirror.request, mirror.key
        entry = Entry(key, mirror.epoch, prompt, request.node_limit, time.perf_counter(), mirror.source_names)
        self.journal.opened(entry)
        span = self._tracing.part(SPAN, origin.traceparent)
        if span is not None:
            mirror.traceparent = span.traceparent
            span.set(
                gen_ai__conversation__id=key.session,
                specdec__choice=key.choice,
                specdec__epoch=str(mirror.epoch),
                specdec__node_limit=request.node_limit,
                specdec__sources=mirror.source_names,
                gen_ai__usage__input_tokens=prompt,
            )
        self._open[mirror.handle] = _Open(origin.request, span)

    def absorb(self, mirror: Mirror, update: Update) -> None:
        """What a step did to a session."""
        reason = None if update.finish is None else update.finish.reason
        self.journal.add(mirror.key, mirror.epoch, update.record, mirror.source_names, reason)
        session = self._open.get(mirror.handle)
        if session is None:
            return
        if session.span is not None and update.record is not None:
            _trace(session.span, update.record)
        if update.finish is not None:
            self._ended(mirror, update.finish.reason, update.finish.usage)
        elif update.parked is not None:
            self._ended(mirror, None, update.parked)

    def gone(self, mirror: Mirror) -> None:
        """Another request took the session over, or it has left this worker."""
        if (session := self._open.pop(mirror.handle, None)) is not None and session.span is not None:
            session.span.end("superseded")

    def explained(self, key: SessionKey) -> explain_pb2.ExplainResponse:
        """All that is known of a session."""
        return explain_pb2.ExplainResponse(incarnations=[_told(entry) for entry in self.journal.find(key)])

    def _ended(self, mirror: Mirror, reason: FinishReason | None, usage: UsageCount) -> None:
        session = self._open.pop(mirror.handle)
        outcome = "parked" if reason is None else reason.value
        fields = {
            "request": session.request,
            **mirror.key.fields,
            "outcome": outcome,
            "tokens": usage.completion_tokens,
            "rounds": usage.rounds,
        }
        log.debug("session ended", extra={"fields": fields})
        if session.span is not None:
            session.span.set(
                outrider__outcome=outcome,
                gen_ai__usage__output_tokens=usage.completion_tokens,
                specdec__rounds=usage.rounds,
                specdec__admitted=usage.admitted,
            )
            session.span.end(outcome if reason is FinishReason.ERROR else "")


def _trace(span: Span, record: Record) -> None:
    step = record.step
    span.child(
        ROUND,
        step.began_s - step.waited_s,
        step.ended_s,
        specdec__step=step.number,
        specdec__position=record.position,
        specdec__candidates=record.candidates,
        specdec__admitted=len(record.admitted),
        specdec__committed=len(record.credits),
        specdec__waited_ms=step.waited_s * 1000,
        specdec__sessions=step.sessions,
    )


def _told(entry: Entry) -> explain_pb2.Incarnation:
    return explain_pb2.Incarnation(
        epoch=entry.epoch,
        prompt_tokens=entry.prompt_length,
        node_limit=entry.node_limit,
        source_names=entry.source_names,
        forgotten=entry.forgotten,
        rounds=[_round(entry, record, shares) for record, shares in entry.shares()],
        finished=finish_to_wire(entry.finished),
    )


def _round(entry: Entry, record: Record, shares: list[Share]) -> explain_pb2.Round:
    step = record.step
    return explain_pb2.Round(
        step=step.number,
        at_ms=(step.began_s - entry.opened_s) * 1000,
        position=record.position,
        pending=record.pending,
        prompt_passes=record.prompt_passes,
        candidates=record.candidates,
        admitted=len(record.admitted),
        committed=len(record.credits),
        by_source=[explain_pb2.SourceShare(**share._asdict()) for share in shares],
        sessions=step.sessions,
        rows=step.rows,
        waited_ms=step.waited_s * 1000,
        forward_ms=(step.ended_s - step.began_s) * 1000,
    )
