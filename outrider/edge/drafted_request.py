"""A request that a device drafts for, as the drafting thread and the reader of its answer both see it."""

from collections.abc import Callable
from dataclasses import dataclass, field

from outrider.edge.controller import Controller
from outrider.edge.device_report import DeviceReport
from outrider.edge.device_session import DraftingCounts
from outrider.v1 import generation_pb2

Send = Callable[[generation_pb2.GenerateRequest], None]
Ping = Callable[[Callable[[float], None]], None]


@dataclass(slots=True)
class DraftedRequest:
    """A request that a device drafts for, over all its streams: it may be resumed.

    Attributes:
        controller: decides how the device is used.
        ping: asks for a measurement of the round trip; None: round trips are not measured.
        offered_wait_ms: how long rounds wait for drafts from the beginning of each stream.
        send: sends on the stream that the drafting thread saw start last; set by that thread, never blocks.
        trouble: why the device stopped drafting; empty if the device did not stop.
        failure: why the model failed last, until the model answers again.
    """

    controller: Controller
    ping: Ping | None = None
    offered_wait_ms: int = 0
    send: Send = field(default=lambda message: None)
    trouble: str = ""
    failure: str = ""
    counts: DraftingCounts = field(default_factory=DraftingCounts)
    bytes_up: int = 0
    bytes_down: int = 0

    def report(self) -> DeviceReport:
        """The device's contribution so far."""
        decision, counts = self.controller.decision, self.counts
        return DeviceReport(
            mode=decision.mode.value,
            why=decision.why,
            trouble=self.trouble or self.failure,
            drafted=counts.drafted,
            sent=counts.sent,
            windows=counts.windows,
            equal=counts.equal,
            wrong=counts.wrong,
            bytes_up=self.bytes_up,
            bytes_down=self.bytes_down,
            changes=tuple((token, change.mode.value) for token, change in self.controller.history),
        )


class DeviceControls:
    """How the reader of a stream sees and directs the device; both kinds of streams have these."""

    _request: DraftedRequest

    @property
    def device(self) -> DeviceReport:
        """The device's contribution so far, and the reason for its mode."""
        return self._request.report()

    def explain(self) -> dict[str, object]:
        """Measurements of the connection and the device, and the expected cost of each mode."""
        return self._request.controller.explain()

    def use_device(self, enabled: bool) -> None:
        """Turns drafting off or on for the rest of the answer, for example when the battery is low."""
        self._request.controller.enabled = enabled
