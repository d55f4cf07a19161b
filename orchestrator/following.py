"""One request from its first message to its end, as it is counted, traced and logged, whichever front it
came through. What is told never contains a prompt, an answer or an id of either.
"""

import logging
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from orchestrator.events import Delivered, Event, Finished, Recovered, Started
from orchestrator.metrics import RequestMeasure, RequestMetrics
from orchestrator.requests import Admitted, Target
from outrider.runtime.origin import Origin, bound, current
from outrider.runtime.tracing import Span, Tracing
from speculative.commit import FinishReason
from speculative.errors import OutriderError

log = logging.getLogger(__name__)

SPAN = "outrider.request"


class Requests:
    """Follows requests; `begin` for each of them, in the task that answers it."""

    def __init__(self, metrics: RequestMetrics, tracing: Tracing) -> None:
        self._metrics = metrics
        self._tracing = tracing

    def begin(self) -> "Following":
        """Of the request that this task has been bound to, if any; see `outrider.runtime.origin`."""
        return Following(self._metrics, self._tracing)


class Following:
    """A context manager: inside, calls and log lines are this request's; unless told, it was cancelled."""

    def __init__(self, metrics: RequestMetrics, tracing: Tracing) -> None:
        self._measure = RequestMeasure(metrics)
        self._outcome = FinishReason.CANCELLED.value
        self._tokens = 0
        self._bound = ExitStack()
        origin = current()
        self._span = tracing.request(SPAN, origin.traceparent)
        # A trace that is not recorded ends here: what workers would add to it belongs to nothing.
        self._origin = Origin(origin.request, "" if self._span is None else self._span.traceparent)

    def __enter__(self) -> Self:
        self._bound.enter_context(bound(self._origin))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failed = isinstance(error, Exception)
        if failed:
            self._outcome = type(error).__name__ if isinstance(error, OutriderError) else "internal"
        took = self._measure.end(self._outcome, failed=failed)
        if self._span is not None:
            self._span.set(outrider__outcome=self._outcome)
            self._span.end(self._outcome if failed else "")
        fields = {"outcome": self._outcome, "tokens": self._tokens, "seconds": round(took, 6)}
        log.info("request ended", extra={"fields": fields})
        self._bound.close()

    def admitted(self, request: Admitted, target: Target) -> None:
        """It can be decoded; from now on log lines name its session."""
        self._measure.admitted(target.name, len(request.ids))
        key = request.key
        self._bound.enter_context(bound(self._origin, tenant=key.tenant, session=key.session))
        if self._span is not None:
            _describe(self._span, request, target)

    def note(self, event: Event) -> None:
        """This is on its way to the client."""
        match event:
            case Delivered(choice, delta):
                if self._span is not None and not self._tokens:
                    self._span.note("first token")
                self._tokens += len(delta.ids)
                self._measure.delivered(choice, len(delta.ids))
            case Recovered(silent_s):
                self._measure.recovered(silent_s)
                if self._span is not None:
                    self._span.note("recovered", silent_s=silent_s)
            case Finished():
                self._outcome = event.reason.value
                if self._span is not None:
                    _conclude(self._span, event, self._tokens)
            case Started():
                if self._span is not None:
                    self._span.note("opened", epoch=str(event.epoch))


def _describe(span: Span, request: Admitted, target: Target) -> None:
    """By OpenTelemetry's names for requests of models, where there are some."""
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


def _conclude(span: Span, event: Finished, tokens: int) -> None:
    usage = event.usage
    span.set(
        gen_ai__usage__output_tokens=tokens,
        gen_ai__response__finish_reasons=(event.reason.value,),
        specdec__rounds=usage.rounds,
        specdec__admitted=usage.admitted,
        specdec__accepted=sum(usage.accepted_by_source.values()),
    )
