"""Prepares a client's request for the drafts of a device; both edge drafters use this module."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from outrider.client.options import Options, build_request
from outrider.edge.backends import DraftModel, open_model
from outrider.edge.controller import Controller, Preference
from outrider.edge.drafted_request import DraftedRequest, Send
from outrider.edge.drafting import DraftingThread
from outrider.edge.latency_model import Mode
from outrider.v1 import generation_pb2
from outrider.wire.names import EDGE
from speculative.errors import InvalidRequest

PATIENCE_S = 30.0
"""Seconds for which a request whose connection was lost is resumed: devices lose connections."""


@dataclass(frozen=True, slots=True)
class EdgeOptions:
    """How a device is used.

    Raises:
        InvalidRequest: there is no such preference or mode.
    """

    preference: str = Preference.BALANCED
    """latency, balanced or economy; see `Preference`."""
    mode: str | None = None
    """The mode to keep: cloud, hinting, waiting or pipelined. None: chosen by measurement."""

    def __post_init__(self) -> None:
        for name, value, words in (
            ("preference", self.preference, list(Preference)),
            ("mode", self.mode, [None, *Mode]),
        ):
            if value not in words:
                possible = ", ".join(str(word) for word in words if word is not None)
                raise InvalidRequest(f"{name} is {value!r}; it must be one of {possible}")


@dataclass(frozen=True, slots=True)
class DraftedOffer:
    """A request's first message, and the request as the drafting thread knows it."""

    message: generation_pb2.GenerateRequest
    request: DraftedRequest


def start_drafting(draft_with: str | DraftModel, vocabulary: str | Path | None) -> DraftingThread:
    """A thread that opens the model, and then drafts with it; see `EdgeDrafter` for the arguments."""
    if not isinstance(draft_with, str):
        return DraftingThread(lambda: draft_with)
    file = None if vocabulary is None else Path(vocabulary)
    return DraftingThread(functools.partial(open_model, draft_with, file))


def offer(
    drafting: DraftingThread, how: EdgeOptions, enabled: bool, prompt: str | None, options: Options
) -> DraftedOffer:
    """A client's request, for which the device drafts if it can; else its `trouble` says why not.

    Raises:
        InvalidRequest: as `build_request` does.
    """
    message = build_request(prompt, options)
    start = message.start
    start.return_prompt_ids = True
    controller = Controller(
        Preference(how.preference),
        drafting.measurements,
        enabled=enabled,
        fixed=None if how.mode is None else Mode(how.mode),
        trials=drafting.trials,
    )
    request = DraftedRequest(controller)
    if (options.get("n") or 1) > 1 or not start.speculation.enabled or options.get("nodes") == 0:
        request.trouble = "the device drafts for one answer of a request that allows speculation"
    elif drafting.claim(request):
        # Rounds that should wait for drafts do so from the first, not from a round trip later.
        request.offered_wait_ms = controller.decision.wait_ms
        start.device.SetInParent()
        start.ClearField("message_interval_ms")  # the device drafts from each round's tokens
        start.device.wait_ms = request.offered_wait_ms
        return DraftedOffer(message, request)
    _leave_out_the_device(start.speculation)
    return DraftedOffer(message, request)


def renew(drafting: DraftingThread, request: DraftedRequest, message: generation_pb2.GenerateRequest) -> None:
    """Prepares the message for one more stream of a request.

    A read that was cancelled has released the model, although the next read may resume the request. Without
    the model, no round is to wait for drafts.
    """
    start = message.start
    if start.HasField("device") and not drafting.claim(request):
        request.offered_wait_ms = 0
        start.ClearField("device")
        _leave_out_the_device(start.speculation)


def _leave_out_the_device(asked: generation_pb2.Speculation) -> None:
    """Takes the device out of the sources that a request names; a request of the device alone has none."""
    if EDGE in asked.sources:
        others = [name for name in asked.sources if name != EDGE]
        asked.ClearField("sources")
        asked.sources.extend(others)
        asked.enabled = bool(others)


def shown_to(
    drafting: DraftingThread, request: DraftedRequest, message: generation_pb2.GenerateRequest, send: Send
) -> Callable[[generation_pb2.GenerateResponse], None]:
    """The function that shows the drafting thread each response to a message; `send` sends on its stream."""
    have = tuple(message.start.have[0].ids) if message.start.have else ()
    return functools.partial(drafting.received, request, have=have, send=send)
