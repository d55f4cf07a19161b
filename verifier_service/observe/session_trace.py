"""Keeps, traces and logs a worker's sessions while they decode.

Runs on the event loop, after a step's tokens have gone out: no token waits for it.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from outrider.runtime.tracing import Span, Tracing
from outrider.v1 import explain_pb2
from outrider.wire.codec import SessionKey, finish_to_wire
from outrider.wire.origin import Origin
from speculative.stats import UsageCount
from speculative.stop import FinishReason
from verifier_service.engine.messages import Update
from verifier_service.observe.round_log import (
    Rest,
    RoundLog,
    RoundRecord,
    SessionLog,
    SourceShare,
    SourceState,
)
from verifier_service.sessions.table import SessionView

log = logging.getLogger(__name__)

SPAN, ROUND = "outrider.decode", "outrider.round"
"""Names of the spans of a session and of each of its rounds."""
_NONE: Mapping[int, int] = MappingProxyType({})
_RESTS = {
    Rest.NONE: explain_pb2.SourceState.REST_NONE,
    Rest.GAINS_TOO_LITTLE: explain_pb2.SourceState.REST_GAINS_TOO_LITTLE,
    Rest.NOT_ADMITTED: explain_pb2.SourceState.REST_NOT_ADMITTED,
    Rest.COMPARED: explain_pb2.SourceState.REST_COMPARED,
}


@dataclass(frozen=True, slots=True)
class _Traced:
    """A session that the engine has."""

    request: str
    """Id of the request that opened the session."""
    span: Span | None
    """None: the session is not traced."""


class SessionTracer:
    """Follows every session from its start to its end, and answers Explain."""

    def __init__(self, tracing: Tracing) -> None:
        self._rounds = RoundLog()
        self._tracing = tracing
        self._traced: dict[int, _Traced] = {}
        """By session handle."""

    def open(self, view: SessionView, origin: Origin) -> None:
        """Begins the log and the span of a session that starts to decode."""
        request, key = view.request, view.key
        prompt, opened_s = request.prompt_length, time.perf_counter()
        entry = SessionLog(key, view.epoch, prompt, request.node_limit, opened_s, view.source_names)
        self._rounds.open(entry)
        span = self._tracing.part(SPAN, origin.traceparent)
        if span is not None:
            view.traceparent = span.traceparent
            span.set(
                gen_ai__conversation__id=key.session,
                specdec__choice=key.choice,
                specdec__epoch=str(view.epoch),
                specdec__node_limit=request.node_limit,
                specdec__sources=view.source_names,
                gen_ai__usage__input_tokens=prompt,
            )
        self._traced[view.handle] = _Traced(origin.request, span)

    def absorb(self, view: SessionView, update: Update, versions: Mapping[int, int] = _NONE) -> None:
        """Records what a step did to a session; `versions` are its sources' learnt weights, by index."""
        reason = None if update.finish is None else update.finish.reason
        record = update.record
        if record is not None and versions:
            record = record._replace(versions=versions)
        self._rounds.add(view.key, view.epoch, record, view.source_names, reason)
        traced = self._traced.get(view.handle)
        if traced is None:
            return
        if traced.span is not None and update.record is not None:
            _add_round(traced.span, update.record)
        if update.finish is not None:
            self._end(view, update.finish.reason, update.finish.usage)
        elif update.parked is not None:
            self._end(view, None, update.parked)

    def supersede(self, view: SessionView) -> None:
        """Ends the span of a session that another request took over or that left this worker."""
        if (traced := self._traced.pop(view.handle, None)) is not None and traced.span is not None:
            traced.span.end("superseded")

    def explain(self, key: SessionKey, nodes: bool) -> explain_pb2.ExplainResponse:
        """The rounds of a session that are kept, under each of its epochs; with their trees if `nodes`."""
        return explain_pb2.ExplainResponse(
            incarnations=[_incarnation(kept, nodes) for kept in self._rounds.find(key)]
        )

    def _end(self, view: SessionView, reason: FinishReason | None, usage: UsageCount) -> None:
        traced = self._traced.pop(view.handle)
        outcome = "parked" if reason is None else reason.value
        fields = {
            "request": traced.request,
            **view.key.fields,
            "outcome": outcome,
            "tokens": usage.completion_tokens,
            "rounds": usage.rounds,
        }
        log.debug("session ended", extra={"fields": fields})
        if traced.span is not None:
            traced.span.set(
                outrider__outcome=outcome,
                gen_ai__usage__output_tokens=usage.completion_tokens,
                specdec__rounds=usage.rounds,
                specdec__admitted=usage.admitted,
            )
            traced.span.end(outcome if reason is FinishReason.ERROR else "")


def _add_round(span: Span, record: RoundRecord) -> None:
    step = record.step
    span.child(
        ROUND,
        step.began_s - step.waited_s,
        step.ended_s,
        specdec__step=step.number,
        specdec__position=record.position,
        specdec__candidates=record.candidates,
        specdec__admitted=len(record.admitted),
        specdec__committed=len(record.token_sources),
        specdec__waited_ms=step.waited_s * 1000,
        specdec__sessions=step.sessions,
    )


def _incarnation(kept: SessionLog, nodes: bool) -> explain_pb2.Incarnation:
    return explain_pb2.Incarnation(
        epoch=kept.epoch,
        prompt_tokens=kept.prompt_length,
        node_limit=kept.node_limit,
        source_names=kept.source_names,
        forgotten=kept.forgotten,
        rounds=[_round(kept, record, shares, nodes) for record, shares in kept.shares()],
        finished=finish_to_wire(kept.finished),
    )


def _round(
    kept: SessionLog, record: RoundRecord, shares: list[SourceShare], nodes: bool
) -> explain_pb2.Round:
    step = record.step
    found = explain_pb2.Round(
        step=step.number,
        at_ms=(step.began_s - kept.opened_s) * 1000,
        position=record.position,
        pending=record.uncomputed,
        prompt_passes=record.prompt_passes,
        candidates=record.candidates,
        admitted=len(record.admitted),
        committed=len(record.token_sources),
        by_source=[explain_pb2.SourceShare(**share._asdict()) for share in shares],
        sessions=step.sessions,
        rows=step.rows,
        waited_ms=step.waited_s * 1000,
        forward_ms=(step.ended_s - step.began_s) * 1000,
        source_states=[_state(state, record.versions) for state in record.states],
    )
    if nodes:
        _add_tree(found, record)
    return found


def _state(state: SourceState, versions: Mapping[int, int]) -> explain_pb2.SourceState:
    return explain_pb2.SourceState(
        source=state.source,
        rest=_RESTS[state.rest],
        slowdown=state.slowdown,
        weights_version=versions.get(state.source, 0),
    )


def _add_tree(found: explain_pb2.Round, record: RoundRecord) -> None:
    if (tree := record.tree) is None:
        return
    accepted = record.accepted_nodes()
    columns = zip(tree.tokens, tree.parents, tree.sources, tree.survival, strict=True)
    for node, (id_, parent, source, survival) in enumerate(columns):
        found.nodes.add(
            id=id_, parent=parent + 1, source=source, survival=survival, accepted=node in accepted
        )
    for id_, source in zip(record.tokens, record.token_sources, strict=True):
        found.tokens.add(id=id_, source=source)
