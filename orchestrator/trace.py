"""Traces one request, as a span and in the log, whichever front it came through.

Neither ever holds a prompt, an answer or their token ids.
"""

import logging
from contextlib import ExitStack

from orchestrator.admitted_request import AdmittedRequest
from orchestrator.fleet.target_model import TargetModel
from orchestrator.relay.delivery import Delivered, Event, Finished, Recovered, Started
from outrider.runtime.tracing import Span, Tracing
from outrider.wire.origin import Origin, bound, current

log = logging.getLogger(__name__)

SPAN = "outrider.request"


class RequestTrace:
    """Traces the request that this task is bound to: call `begin`, then `admitted` and `note`, then `end`."""

    def __init__(self, tracing: Tracing) -> None:
        self._bound = ExitStack()
        self._first = True
        origin = current()
        self._span = tracing.request(SPAN, origin.traceparent)
        # A trace that is not recorded ends here: spans of workers would belong to no trace.
        self._origin = Origin(origin.request, "" if self._span is None else self._span.traceparent)

    def begin(self) -> None:
        """Bind calls and log lines to this request from now on."""
        self._bound.enter_context(bound(self._origin))

    def admitted(self, request: AdmittedRequest, target: TargetModel) -> None:
        """The request passed every check; from now on log lines name its session."""
        key = request.key
        self._bound.enter_context(bound(self._origin, tenant=key.tenant, session=key.session))
        if self._span is not None:
            _describe(self._span, request, target)

    def note(self, event: Event) -> None:
        """An event of the request is on its way to the client."""
        if self._span is None:
            return
        match event:
            case Started(epoch):
                self._span.note("opened", epoch=str(epoch))
            case Delivered() if self._first:
                self._first = False
                self._span.note("first token")
            case Recovered(silent_s):
                self._span.note("recovered", silent_s=silent_s)
            case Finished():
                _conclude(self._span, event)

    def end(self, outcome: str, tokens: int, seconds: float, *, failed: bool) -> None:
        """End the trace; `outcome` is a finish reason or an error's name."""
        if self._span is not None:
            self._span.set(outrider__outcome=outcome, gen_ai__usage__output_tokens=tokens)
            self._span.end(outcome if failed else "")
        fields = {"outcome": outcome, "tokens": tokens, "seconds": round(seconds, 6)}
        log.info("request ended", extra={"fields": fields})
        self._bound.close()


def _describe(span: Span, request: AdmittedRequest, target: TargetModel) -> None:
    """Set the request's attributes, under OpenTelemetry's names for requests of models where it has names."""
    params, key = request.params, request.key
    span.set(
        gen_ai__provider__name="outrider",
        gen_ai__request__model=target.name,
        gen_ai__conversation__id=key.session,
        gen_ai__request__max_tokens=request.limit - len(request.ids),
        gen_ai__request__temperature=params.temperature,
        gen_ai__request__top_p=params.top_p,
        gen_ai__request__choice__count=request.choices,
        gen_ai__usage__input_tokens=len(request.ids),
        specdec__enabled=request.speculation.enabled,
    )


def _conclude(span: Span, event: Finished) -> None:
    usage = event.usage
    span.set(
        gen_ai__response__finish_reasons=(event.reason.value,),
        specdec__rounds=usage.rounds,
        specdec__admitted=usage.admitted,
        specdec__accepted=sum(usage.accepted_by_source.values()),
    )
