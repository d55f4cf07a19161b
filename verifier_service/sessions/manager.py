"""Opens, changes and ends the sessions of a loaded worker, and spreads what each step committed.

Lives on the event loop; the engine is an inbox to it. Knows nothing of gRPC servers.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from outrider.tokens import TokenTable
from outrider.wire.codec import SessionKey
from outrider.wire.epochs import wall_clock_ms
from outrider.wire.origin import Origin
from speculative.errors import InvalidRequest, Overloaded
from speculative.grammar import Matcher
from speculative.stats import UsageCount
from speculative.stop import FinishReason, StopChecker
from verifier_service.engine.messages import Cancel, Command, Finish, Open, Park, Sources, StepReport
from verifier_service.engine.session import Session
from verifier_service.engine.source_policy import Reputations
from verifier_service.observe.session_trace import SessionTracer
from verifier_service.remote_sources.pool import SourcePool
from verifier_service.remote_sources.subscription import Subscription
from verifier_service.sessions.request import ServedModel, SessionRequest, SourceAddress, SourceSet
from verifier_service.sessions.table import SessionTable, SessionView
from verifier_service.sessions.watch import WatchReaders

_MOST_SOURCE_NAMES = 255
_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class Capacity:
    """How many sessions and tokens this worker has room for."""

    sessions: int
    """The most sessions that may be open."""
    slots: int
    """KV slots in all, one per token."""
    block: int
    """Slots are allocated in multiples of this."""

    def longest(self, nodes: int) -> int:
        """The most tokens of a session that has all slots to itself, `nodes` of them for drafted nodes."""
        return self.slots // self.block * self.block - nodes


@dataclass(frozen=True, slots=True)
class OpenResult:
    """The answer to an Open."""

    source_names: tuple[str, ...]
    """Names of the sources: source index k is source_names[k - 1]."""
    finished: FinishReason | None
    """Why the session has ended already; None: it has not."""


class SessionManager:
    """All sessions of this worker, as the event loop sees them.

    Args:
        served: the loaded model.
        tokens: of the model's tokenizer; None where the model has none.
        capacity: of this worker.
        table: of the sessions.
        readers: of committed tokens.
        sources: links to the sources outside this worker.
        put: hands a command to the engine.
        tracer: keeps and traces the sessions' rounds.
        private: the only tenant that a source inside this worker drafts for, by the source's name.
        stopped: called with each session that has ended or was parked.
    """

    def __init__(
        self,
        served: ServedModel,
        tokens: TokenTable | None,
        capacity: Capacity,
        table: SessionTable,
        readers: WatchReaders,
        sources: SourcePool,
        put: Callable[[Command], None],
        tracer: SessionTracer,
        private: Mapping[str, str] = MappingProxyType({}),
        stopped: Callable[[SessionView], None] = lambda _: None,
    ) -> None:
        self._served = served
        self._tokens = tokens
        self._capacity = capacity
        self._table = table
        self._readers = readers
        self._sources = sources
        self._put = put
        self._private = private
        self._stopped = stopped
        self.tracer = tracer
        """The sessions' rounds, for Explain."""
        self.reputations = Reputations(served.policy)
        """What sessions teach about the sources."""
        readers.on_read = self._resume

    def open(
        self, request: SessionRequest, grammar: Matcher | None = None, origin: Origin | None = None
    ) -> OpenResult:
        """Starts a session, takes a session over, or changes a session's sources.

        `grammar` is the request's, after its last token; `origin` is where the call came from.

        Raises StaleEpoch, InvalidRequest (stop strings without a tokenizer, an epoch from the future) or
        Overloaded.
        """
        stop_checker = self._stop_checker(request)
        self._table.fence(request.key, request.epoch, wall_clock_ms())
        view = self._table.find(request.key)
        if view is not None and view.epoch == request.epoch:
            if view.finish is None:
                self._change_sources(view, request)
        else:
            view = self._start(request, stop_checker, view, grammar, origin or Origin())
            for other in self._table.older_choices(request.key, request.epoch):
                self._drop(other)  # a later request ends all choices of an earlier one
        return OpenResult(view.source_names, view.finish.reason if view.finish else None)

    def cancel(self, key: SessionKey, epoch: int) -> bool:
        """Ends a session after the step in flight; returns whether the session was open.

        The session's Open may still be under way: an Open under this epoch then ends at once. A Cancel under
        a later epoch means that the session was taken over, which is what its readers are sent.

        Raises StaleEpoch, or InvalidRequest for an epoch from the future.
        """
        self._table.fence(key, epoch, wall_clock_ms())
        view = self._table.find(key)
        if view is None or epoch > view.epoch:
            self._table.cancel_unopened(key)
        if view is None or view.finish is not None:
            return False
        if epoch > view.epoch:
            self._drop(view)
        elif view.parked is not None:
            self._table.finish(view, Finish(FinishReason.CANCELLED, view.parked), time.monotonic())
        else:
            view.cancelled = True
            self._put(Cancel(view.handle))
        return True

    def absorb(self, report: StepReport) -> None:
        """Takes over what a step did: first into the table, then out to sources and readers."""
        now = time.monotonic()
        moved = [
            (view, update)
            for update in report.updates
            if (view := self._table.absorb(update, now)) is not None
        ]
        # Before the end of a session takes its sources away.
        versions = {view.handle: self._sources.weights_versions(view.handle) for view, _ in moved}
        self._sources.absorb(report)
        for view, _ in moved:
            if view.cursors and view.parked:  # a reader came while the engine parked the session
                self._resume(view)
        self._readers.announce(report.step, report.expected_us)
        self._sources.finish(report)
        for view, update in moved:
            self.tracer.absorb(view, update, versions.get(view.handle, {}))
            if update.finish is not None or update.parked is not None:
                self._stopped(view)

    def sweep(self, grace_s: float, lease_s: float) -> None:
        """Parks sessions that lost their readers, and forgets sessions that are over.

        A session is parked when nobody has read it for `grace_s` seconds, and forgotten `lease_s` seconds
        after it was parked or finished.
        """
        now = time.monotonic()
        for view in self._table.orphans(now, grace_s):
            self._put(Park(view.handle))
        self._table.forget_kept(now, lease_s)

    def _stop_checker(self, request: SessionRequest) -> StopChecker:
        token_bytes = None if self._tokens is None else self._tokens.token_bytes
        return StopChecker(
            request.end_ids,
            request.limit,
            request.stops,
            token_bytes,
            request.ids,
            request.prompt_length,
            request.params.min_tokens,
        )

    def _start(
        self,
        request: SessionRequest,
        stop_checker: StopChecker,
        older: SessionView | None,
        grammar: Matcher | None,
        origin: Origin,
    ) -> SessionView:
        now = time.monotonic()
        sources = dict(enumerate(request.sources, start=1))
        names = tuple(source.name for source in request.sources)
        view = SessionView(self._table.new_handle(), request, names, sources, now, grammar)
        finished = stop_checker.finished
        if finished is None and self._table.is_cancelled_unopened(request.key):
            finished = FinishReason.CANCELLED
        if finished is not None:
            self._replace(older, view)
            usage = UsageCount(
                prompt_tokens=request.prompt_length,
                replay_identical=request.replay_identical,
                promise=request.promise,
            )
            self._table.finish(view, Finish(finished, usage), now)
            return view
        if not request.recovered:
            self._check_capacity(older)
        if request.time_left_s is not None:
            view.deadline_s = time.perf_counter() + request.time_left_s
        self._replace(older, view)
        self.tracer.open(view, origin)
        self._run(view, request, stop_checker)
        return view

    def _resume(self, view: SessionView) -> None:
        """Runs a parked session again because somebody reads it; the engine starts from its tokens alone."""
        if (usage := view.parked) is not None:
            request = replace(view.request, ids=tuple(view.ids), score_from=None)
            if len(view.ids) < request.prompt_length:
                request = replace(view.request, score_from=len(view.ids))
            self._table.resume(view)
            self._run(view, request, self._stop_checker(request), usage)

    def _run(
        self,
        view: SessionView,
        request: SessionRequest,
        stop_checker: StopChecker,
        usage: UsageCount | None = None,
    ) -> None:
        session = Session(
            view.handle,
            request,
            stop_checker,
            self._served.vocabulary_size,
            self._source_set(view),
            view.deadline_s,
            self.reputations,
            usage,
            view.grammar,
        )
        resting = session.sources.resting
        self._put(Open(session))
        for address, indices in _by_address(view.sources).items():
            self._subscribe(view, address, indices, resting.issuperset(indices))

    def _replace(self, older: SessionView | None, view: SessionView) -> None:
        if older is not None:
            self._drop(older)
        self._table.add(view)

    def _drop(self, older: SessionView) -> None:
        self._sources.end(older.handle)
        self._table.supersede(older)
        self.tracer.supersede(older)
        self._put(Cancel(older.handle))

    def _check_capacity(self, older: SessionView | None) -> None:
        others = self._table.running - (older is not None and older.runs)
        if others >= self._capacity.sessions:
            raise Overloaded(f"{others} sessions are open, as many as there may be", _RETRY_AFTER_S)

    def _change_sources(self, view: SessionView, request: SessionRequest) -> None:
        """Sources that the session had before keep their index; new ones are added behind them."""
        before = view.sources
        names = tuple(dict.fromkeys((*view.source_names, *(source.name for source in request.sources))))
        if len(names) > _MOST_SOURCE_NAMES:
            raise InvalidRequest(
                f"the session has had {len(names)} sources by name; at most {_MOST_SOURCE_NAMES}"
            )
        after = {names.index(source.name) + 1: source for source in request.sources}
        if before == after or view.request.node_limit == 0:
            return
        view.source_names, view.sources = names, after
        if not view.runs:
            return
        self._put(Sources(view.handle, self._source_set(view)))
        old, new = _by_address(before), _by_address(after)
        for address, indices in old.items():
            if new.get(address) != indices:
                self._sources.unsubscribe(view.handle, indices)
        for address, indices in new.items():
            if old.get(address) != indices:
                self._subscribe(view, address, indices)

    def _source_set(self, view: SessionView) -> SourceSet:
        tenant = view.key.tenant
        remote, own = set(), set()
        for index, source in view.sources.items():
            if source.address:
                remote.add(index)
            elif self._private.get(source.name, tenant) == tenant:
                own.add(index)
        together = tuple(frozenset(indices) for indices in _by_address(view.sources).values())
        return SourceSet(view.source_names, frozenset(own), frozenset(remote), together)

    def _subscribe(
        self, view: SessionView, address: str, source_indices: tuple[int, ...], resting: bool = False
    ) -> None:
        names = tuple(view.sources[index].name for index in source_indices)
        subscription = Subscription(
            view,
            source_indices,
            names,
            self._served.model,
            "" if self._tokens is None else self._tokens.digest,
            self._served.vocabulary_size,
            self.reputations.of_address(names, view.request.params).activity,
        )
        self._sources.subscribe(address, subscription, resting)


def _by_address(sources: Mapping[int, SourceAddress]) -> dict[str, tuple[int, ...]]:
    """The indices of the sources outside this worker, by the address that they share."""
    found: dict[str, tuple[int, ...]] = {}
    for index, source in sources.items():
        if source.address:
            found[source.address] = (*found.get(source.address, ()), index)
    return found
