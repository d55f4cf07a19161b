"""The devices of this orchestrator's running requests: who may draft, and what becomes of what they send.

Decides and counts; connections are the fronts', verifiers the source's. A request whose device is refused,
muted or gone goes on without it.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from orchestrator.admitted_request import AdmittedRequest
from orchestrator.edge.account import Credits, DraftAccount, Dropped
from orchestrator.edge.source import EdgeSession, EdgeSource
from orchestrator.edge.tenants import TenantDevices
from orchestrator.fleet.target_model import TargetModel
from outrider.v1 import generation_pb2
from outrider.wire.codec import sampling_to_wire
from speculative.draft import MAX_DRAFT_NODES
from speculative.errors import MalformedDraft

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EdgeLimits:
    """Limits on devices and their drafts."""

    credits: Credits
    most_wait_ms: int
    """The longest time in ms that a round may wait for a device's drafts."""
    devices_per_tenant: int
    """The most devices of one tenant at once; further requests are decoded without their devices."""
    nodes_per_s: int
    """Nodes per second that one tenant's devices together may send, as a mean over a minute."""


class DeviceFlow:
    """What goes to and comes from the device of one running request.

    Args:
        may_send: whether the tenant's devices may send this many nodes now.
        forwarded: called with the nodes that are sent on to a verifier.
        dropped: called with the nodes that are not sent on.
    """

    def __init__(
        self,
        source: EdgeSource,
        request: AdmittedRequest,
        target: TargetModel,
        limits: EdgeLimits,
        may_send: Callable[[int], bool],
        forwarded: Callable[[int], None],
        dropped: Callable[[Dropped, int], None],
    ) -> None:
        self._source = source
        self._most_wait_ms = limits.most_wait_ms
        self._may_send = may_send
        self._forwarded = forwarded
        self._muted = False
        self._first_epoch = self._epoch = 0
        """The epoch of `started`, and the latest epoch sent to the client."""
        self._device_epoch = 0
        """The latest epoch that the device named; 0: none yet, which stands for the epoch of `started`."""
        self._accounts: dict[int, DraftAccount] = {}
        self._sessions: dict[int, EdgeSession] = {}
        have = request.have or ((),) * request.choices
        for choice, key in enumerate(request.keys):
            if choice not in request.ended:
                ids = (*request.ids, *have[choice])
                account = DraftAccount(ids, target.vocabulary_size, limits.credits, dropped)
                self._accounts[choice] = account
                self._sessions[choice] = EdgeSession(key, account.unplaced)

    def open(self, wait_ms: int) -> None:
        """Lets verifiers that open the request's sessions find the device."""
        for session in self._sessions.values():
            self._source.add(session)
            self._source.wait(session, min(wait_ms, self._most_wait_ms))

    def told(self, epoch: int) -> None:
        """Notes that the client learns the epoch under which its sessions are decoded."""
        self._first_epoch = self._first_epoch or epoch
        self._epoch = max(self._epoch, epoch)

    def delivered(self, choice: int, ids: tuple[int, ...]) -> int:
        """Notes ids that are sent to the client; returns the prefix hash over all ids so far."""
        return self._accounts[choice].committed(ids)

    def take(self, drafts: generation_pb2.DeviceDrafts) -> None:
        """Takes a message of the device. A fault in the message affects only the device's drafts."""
        try:
            self._take(drafts)
        except MalformedDraft as error:
            self.mute(str(error))

    def mute(self, why: str) -> None:
        """Takes no further drafts of the device; its request continues."""
        if not self._muted:
            fields = next((session.key.fields for session in self._sessions.values()), {})
            log.info("device muted: %s", why, extra={"fields": fields})
        self._muted = True
        self.gone()

    def gone(self) -> None:
        """Notes that the device sends no more drafts, so that no round waits for them."""
        for session in self._sessions.values():
            self._source.wait(session, 0)

    def ended(self, choice: int) -> generation_pb2.DeviceUsage:
        """Notes that the choice has ended; returns the counts of its device's drafts."""
        self._source.remove(self._sessions[choice])
        return self._accounts[choice].counts.to_wire()

    def close(self) -> None:
        """Notes that the request's stream has ended."""
        for session in self._sessions.values():
            self._source.remove(session)

    def _take(self, drafts: generation_pb2.DeviceDrafts) -> None:
        account, session = self._accounts.get(drafts.choice), self._sessions.get(drafts.choice)
        if account is None or session is None:
            raise MalformedDraft(f"a draft is for choice {drafts.choice}, which is not decoded here")
        if self._muted:
            account.refuse(len(drafts.ids))
            return
        self._note_epoch(drafts.epoch)
        if drafts.HasField("wait_ms"):
            self._source.wait(session, min(drafts.wait_ms, self._most_wait_ms))
            if not drafts.ids:
                return
        stale = (self._device_epoch or self._first_epoch) < self._epoch
        fragment = account.take(drafts, self._epoch, stale=stale)
        if fragment is None:
            return
        if not self._may_send(len(fragment)):
            account.drop(len(fragment), Dropped.RATE)
            return
        account.counts.forwarded += len(fragment)
        self._forwarded(len(fragment))
        self._source.send(session, fragment)

    def _note_epoch(self, epoch: int) -> None:
        """Raises MalformedDraft for an epoch that the client was never told of on this stream."""
        if epoch and not self._first_epoch <= epoch <= self._epoch:
            raise MalformedDraft(f"a draft names epoch {epoch:016x}, which this stream never had")
        self._device_epoch = max(self._device_epoch, epoch)


class Devices:
    """Admits devices and holds them to their tenants' limits.

    Args:
        source: the source to which verifiers attach; None: this orchestrator accepts no devices.
        forwarded: called with the nodes that are sent on to a verifier.
        dropped: called with the nodes that are not sent on.
        clock: monotonic clock in seconds.
    """

    def __init__(
        self,
        source: EdgeSource | None,
        limits: EdgeLimits,
        forwarded: Callable[[int], None],
        dropped: Callable[[Dropped, int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._limits = limits
        self._forwarded = forwarded
        self._dropped = dropped
        self._clock = clock
        self._tenants = TenantDevices(limits.devices_per_tenant, limits.nodes_per_s)

    @contextmanager
    def attached(
        self, offer: generation_pb2.DeviceOffer, request: AdmittedRequest, target: TargetModel
    ) -> Iterator[tuple[DeviceFlow | None, generation_pb2.DeviceTerms]]:
        """The request's device while the context lasts, None if the device is refused; and the terms for the
        client."""
        terms = terms_of(request, target, self._limits)
        source, tenant = self._source, request.key.tenant
        if offer.tokenizer_digest not in ("", target.tokenizer_digest):
            terms.refused = (
                f"the device's vocabulary has digest {offer.tokenizer_digest[:64]}, {target.name} has "
                f"{target.tokenizer_digest or 'none'}: their ids mean different tokens"
            )
        elif source is None:
            terms.refused = "this orchestrator takes no devices' drafts: it was started without edge_bind"
        elif not self._tenants.enter(tenant, self._clock()):
            most = self._limits.devices_per_tenant
            terms.refused = f"{most} devices of tenant {tenant!r} draft already; that is its limit here"
        else:
            flow = DeviceFlow(
                source,
                request,
                target,
                self._limits,
                lambda nodes: self._tenants.may_send(tenant, nodes, self._clock()),
                self._forwarded,
                self._dropped,
            )
            try:
                flow.open(offer.wait_ms)
                yield flow, terms
            finally:
                flow.close()
                self._tenants.leave(tenant)
            return
        yield None, terms


def terms_of(request: AdmittedRequest, target: TargetModel, limits: EdgeLimits) -> generation_pb2.DeviceTerms:
    """What a device has to know to draft for this request."""
    nodes = request.speculation.node_limit
    return generation_pb2.DeviceTerms(
        tokenizer_digest=target.tokenizer_digest,
        vocabulary_size=target.vocabulary_size,
        sampling=sampling_to_wire(request.params.holding_back(target.eos_ids)),
        end_ids=sorted(request.params.end_ids(target.eos_ids)),
        limit=request.limit,
        node_limit=MAX_DRAFT_NODES if nodes is None else min(2 * nodes, MAX_DRAFT_NODES),
        credits=limits.credits.first,
        credits_per_token=limits.credits.per_token,
        most_wait_ms=limits.most_wait_ms,
    )
