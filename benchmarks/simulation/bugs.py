"""Faults that somebody could make in the services, each a small substitution of a real function.

A simulation that would not find them proves nothing: tests and `--bug` plant them one at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from orchestrator.admitted_request import AdmittedRequest
from orchestrator.edge.account import DraftAccount, Dropped
from orchestrator.edge.devices import DeviceFlow
from orchestrator.edge.source import EdgeSession, EdgeSource
from orchestrator.fleet.liveness import LivenessJudge, Verdict
from orchestrator.fleet.verifier_link import VerifierLink
from orchestrator.relay.delivery import Delivery, PlacementCost
from orchestrator.relay.epochs import Epochs
from orchestrator.relay.opener import OpenPlan
from orchestrator.relay.relayed_request import RelayedRequest
from orchestrator.store.memory import MemoryStore
from outrider.v1 import verifier_pb2
from outrider.wire.codec import key_to_wire
from outrider.wire.epochs import RANDOM_BITS
from speculative.fragment import Fragment
from speculative.tree import TokenTree
from verifier_service.engine.core import EngineCore
from verifier_service.engine.kv_cache import KVCache
from verifier_service.engine.messages import Cancel
from verifier_service.engine.scheduler import MemoryFit
from verifier_service.engine.session import Session
from verifier_service.engine.step import StepRows
from verifier_service.sessions import watch
from verifier_service.sessions.manager import OpenResult, SessionManager
from verifier_service.sessions.table import SessionTable

Substitute = tuple[Any, str, Any]


def epoch_check_removed() -> list[Substitute]:
    """A verifier takes an Open of any epoch."""

    def fence(self: SessionTable, key: Any, epoch: int, now_ms: int) -> None:
        self._epochs[key] = epoch

    return [(SessionTable, "fence", fence)]


def cancel_unfenced() -> list[Substitute]:
    """A verifier ends a session whatever the epoch of the Cancel."""

    def cancel(self: SessionManager, key: Any, epoch: int) -> bool:
        view = self._table.find(key)
        if view is None or view.finish is not None:
            return False
        self._put(Cancel(view.handle))
        return True

    return [(SessionManager, "cancel", cancel)]


def cursor_off_by_one() -> list[Substitute]:
    """A Watch that is opened, or opened again, goes on one id too far."""

    def cursor(reader: Any) -> verifier_pb2.Cursor:
        return verifier_pb2.Cursor(
            alias=reader.alias,
            key=key_to_wire(reader.key),
            epoch=reader.epoch,
            position=reader.position + 1,
        )

    return [("orchestrator.fleet.verifier_link", "_cursor", cursor)]


def repeated_delivery_kept() -> list[Substitute]:
    """What a verifier sends twice goes to the client twice."""
    real = Delivery.take

    def take(self: Delivery, position: int, ids: Any, *rest: Any) -> Any:
        return real(self, self.position if position < self.position else position, ids, *rest)

    return [(Delivery, "take", take)]


def have_ignored() -> list[Substitute]:
    """A request that is gone on with begins again."""

    def have(start: Any, *rest: Any) -> Any:
        return tuple(() for _ in start.have) if start.have else None

    return [("orchestrator.front.admission", "_have", have)]


def end_forgotten() -> list[Substitute]:
    """A choice whose end its client has is gone on with."""

    def ended(start: Any) -> frozenset[int]:
        return frozenset()

    return [("orchestrator.front.admission", "_ended", ended)]


def woken_verifier_goes_on() -> list[Substitute]:
    """A verifier that still has a session takes the Open of a later epoch for one of the same."""
    real = SessionManager.open

    def opened(self: SessionManager, request: Any, *rest: Any) -> OpenResult:
        view = self._table.find(request.key)
        if view is None or request.epoch < view.epoch:
            return real(self, request, *rest)
        return OpenResult(view.source_names, view.finish.reason if view.finish else None)

    return [(SessionManager, "open", opened)]


def superseded_readers_not_notified() -> list[Substitute]:
    """The readers of a session that is taken over are not notified, and wait."""

    def supersede(self: SessionTable, view: Any) -> None:
        self.forget(view)

    return [(SessionTable, "supersede", supersede)]


def append_unconditional() -> list[Substitute]:
    """A store adds ids whatever it has."""

    def append(self: MemoryStore, it: Any) -> int:
        _, ids = self._tokens.get(it.key) or (0, [])
        ids.extend(it.ids)
        self._tokens.put(it.key, (it.epoch, ids))
        return len(ids)

    return [(MemoryStore, "_append", append)]


def takeover_loses_an_id() -> list[Substitute]:
    """When a verifier is lost, the last id that was delivered is taken for undelivered."""
    real = Delivery.lost

    def lost(self: Delivery) -> None:
        real(self)
        if self.ids:
            self.ids.pop()

    return [(Delivery, "lost", lost)]


def finish_lost() -> list[Substitute]:
    """An end that comes without ids is taken for nothing new."""
    real = watch._SessionCursor.collect

    def collect(self: Any, now: float) -> Any:
        return real(self, now) if len(self.view.ids) > self.position else None

    return [(watch._SessionCursor, "collect", collect)]


def usage_lost() -> list[Substitute]:
    """What a lost verifier cost is forgotten."""

    def lost(self: Delivery) -> None:
        self._here = PlacementCost()
        self._recoveries += 1

    return [(Delivery, "lost", lost)]


def epoch_reissued() -> list[Substitute]:
    """Epochs are counted, from 1 in each process, in place of being drawn from clock and chance."""

    def following(self: Epochs) -> int:
        self._last_ms += 1
        return self._last_ms << RANDOM_BITS

    def above(self: Epochs, highest: int) -> int:
        return max(highest, self.next())

    return [(Epochs, "next", following), (Epochs, "above", above)]


def seen_epoch_ignored() -> list[Substitute]:
    """A request that is gone on with is given an epoch as if it were new, by a clock that may be behind."""
    real = OpenPlan

    def plan(ids: Any, epoch: int, *rest: Any, **named: Any) -> OpenPlan:
        return real(ids, 0, *rest, **named)

    def fence(self: SessionTable, key: Any, epoch: int, now_ms: int) -> None:
        """The verifiers would notice; this is about the client."""

    return [("orchestrator.relay.relayed_request", "OpenPlan", plan), (SessionTable, "fence", fence)]


def frozen_verifier_trusted() -> list[Substitute]:
    """A verifier is never given up, however long it shows no sign of life."""

    def verdict(self: LivenessJudge, now: float, lone: bool = False) -> Verdict:
        return Verdict.ALIVE

    return [(LivenessJudge, "verdict", verdict)]


def orphans_kept() -> list[Substitute]:
    """A session that nobody reads stays for good."""

    def forget_kept(self: SessionTable, now: float, lease_s: float) -> None:
        """Nothing is ever forgotten."""

    return [(SessionTable, "forget_kept", forget_kept)]


def seeds_confused() -> list[Substitute]:
    """All choices draw from the request's own seed."""

    def seed_of(self: AdmittedRequest, choice: int) -> int:
        return self.seed

    return [(AdmittedRequest, "seed_of", seed_of)]


def prompt_lost() -> list[Substitute]:
    """A recovery opens a session with what was generated alone, of all choices the first one's."""

    def generated(self: RelayedRequest) -> dict[int, Sequence[int]]:
        first = next(iter(self._unfinished.values())).ids
        return dict.fromkeys(self._unfinished, first)

    return [(RelayedRequest, "_generated", generated)]


def readers_kept() -> list[Substitute]:
    """A link keeps the readers of requests that have ended."""

    def leave(self: VerifierLink, reader: Any) -> None:
        """Nothing is dropped."""

    return [(VerifierLink, "leave", leave)]


def node_admitted_twice() -> list[Substitute]:
    """A step computes its likeliest drafted node twice."""
    real = Session.step_rows

    def step_rows(self: Session, rows: int, nodes: int, scouts: int = 0) -> StepRows:
        planned = real(self, rows, nodes, scouts)
        tree = planned.tree
        columns: list[tuple[Any, ...]] = [tree.tokens, tree.parents, tree.survival, tree.sources]
        return planned._replace(tree=TokenTree(*[column + column[:1] for column in columns]))

    return [(Session, "step_rows", step_rows)]


def wrong_row_committed() -> list[Substitute]:
    """Of a pass's rows the first ones are kept, whichever were accepted."""
    real = KVCache.keep_rows

    def keep_rows(self: KVCache, session: Session, path: Sequence[int]) -> None:
        real(self, session, range(len(path)))

    return [(KVCache, "keep_rows", keep_rows)]


def memory_ignored() -> list[Substitute]:
    """A step takes drafts whether or not there are blocks for their rows, and nobody has to give way."""

    def fit(needs: Any, available: int) -> MemoryFit:
        return MemoryFit(True, ())

    return [("verifier_service.engine.session_pool", "fit", fit)]


def blocks_freed_in_use() -> list[Substitute]:
    """A Cancel that comes while the target computes frees the blocks that it computes in."""

    def apply(self: EngineCore, command: Any, now_s: float) -> None:
        self._carry_out(command, now_s)

    return [(EngineCore, "apply", apply)]


def credits_unlimited() -> list[Substitute]:
    """A device may send as many drafts as it likes."""
    real = DraftAccount.take

    def take(self: DraftAccount, drafts: Any, epoch: int, *, stale: bool) -> Fragment | None:
        self._left = 1 << 30
        return real(self, drafts, epoch, stale=stale)

    return [(DraftAccount, "take", take)]


def old_windows_cost_nothing() -> list[Substitute]:
    """A device's drafts that continue nothing are dropped without credits, and not counted."""
    real = DraftAccount.take

    def take(self: DraftAccount, drafts: Any, epoch: int, *, stale: bool) -> Fragment | None:
        taken = real(self, drafts, epoch, stale=stale)
        if taken is None:
            self.counts.dropped.pop(Dropped.STALE, None)
        return taken

    return [(DraftAccount, "take", take)]


def claims_believed() -> list[Substitute]:
    """A device's drafts go on to the verifier whatever text they continue."""

    def is_known(self: DraftAccount, fragment: Fragment) -> bool:
        return True

    return [(DraftAccount, "_is_known", is_known)]


def vanished_device_kept() -> list[Substitute]:
    """A device whose stream broke stays attached to its session."""

    def close(self: DeviceFlow) -> None:
        """Nothing is removed."""

    return [(DeviceFlow, "close", close)]


def later_device_removed() -> list[Substitute]:
    """The end of a stream removes its session's device, also that of a later stream."""

    def remove(self: EdgeSource, session: EdgeSession) -> None:
        self.wait(session, 0)
        self._drop(self._sessions[session.key])

    return [(EdgeSource, "remove", remove)]


BUGS: dict[str, Callable[[], list[Substitute]]] = {
    bug.__name__: bug
    for bug in (
        epoch_check_removed,
        cancel_unfenced,
        cursor_off_by_one,
        repeated_delivery_kept,
        have_ignored,
        end_forgotten,
        woken_verifier_goes_on,
        superseded_readers_not_notified,
        append_unconditional,
        takeover_loses_an_id,
        finish_lost,
        usage_lost,
        epoch_reissued,
        frozen_verifier_trusted,
        orphans_kept,
        seeds_confused,
        prompt_lost,
        readers_kept,
        seen_epoch_ignored,
        node_admitted_twice,
        wrong_row_committed,
        memory_ignored,
        blocks_freed_in_use,
        credits_unlimited,
        old_windows_cost_nothing,
        claims_believed,
        vanished_device_kept,
        later_device_removed,
    )
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Inside, the services have this bug; an empty name plants none."""
    with ExitStack() as stack:
        for where, what, instead in BUGS[name]() if name else ():
            target = f"{where}.{what}" if isinstance(where, str) else None
            stack.enter_context(patch(target, instead) if target else patch.object(where, what, instead))
        yield
