"""The event loop's side of a loaded worker: opens, changes and ends sessions, and spreads what the engine
says.

Knows nothing of gRPC servers; the engine is an inbox to it.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from outrider.runtime.tracing import Tracing
from outrider.tokens import TokenTable
from outrider.v1 import explain_pb2
from outrider.wire.codec import SessionKey
from outrider.wire.epochs import wall_clock_ms
from outrider.wire.origin import Origin
from speculative.commit import Ending, FinishReason
from speculative.errors import InvalidRequest, Overloaded
from speculative.grammar import Matcher
from speculative.stats import UsageCount
from verifier_service.chronicle import Chronicle
from verifier_service.engine.messages import Batch, Cancel, Command, Finish, Open, Park, Sources
from verifier_service.engine.session import Session
from verifier_service.engine.source_policy import Reputations
from verifier_service.registry import Mirror, Registry
from verifier_service.request import Request, Served, SourceAddress
from verifier_service.sources import SourceSet
from verifier_service.sources.following import Following
from verifier_service.sources.links import Links
from verifier_service.watch import Watchers

log = logging.getLogger(__name__)

_MOST_CREDITS = 255
_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class Room:
    """What running sessions share."""

    sessions: int
    slots: int
    """KV slots in all."""
    block: int
    """Slots are taken in multiples of this."""

    def longest(self, nodes: int) -> int:
        """The most ids of a session with so many drafted nodes that has all slots to itself."""
        return self.slots // self.block * self.block - nodes


@dataclass(frozen=True, slots=True)
class Opened:
    """The answer to an Open."""

    source_names: tuple[str, ...]
    finished: FinishReason | None


class Hub:
    """All sessions of this worker, as the event loop sees them."""

    def __init__(
        self,
        served: Served,
        tokens: TokenTable | None,
        room: Room,
        registry: Registry,
        watchers: Watchers,
        links: Links,
        put: Callable[[Command], None],
        chronicle: Chronicle | None = None,
    ) -> None:
        self._served = served
        self._tokens = tokens
        self._room = room
        self._registry = registry
        self._watchers = watchers
        self._links = links
        self._put = put
        self._chronicle = chronicle or Chronicle(Tracing())
        self._reputations = Reputations()
        watchers.returned = self._returned

    def open(self, request: Request, grammar: Matcher | None = None, origin: Origin | None = None) -> Opened:
        """Starts a session, takes one over, or changes the sources of one.

        `grammar` is the request's, after its ids; `origin` is what came with the call.

        Raises StaleEpoch, InvalidRequest (stop strings without a tokenizer, an epoch from the future) or
        Overloaded.
        """
        ending = self._ending(request)
        self._registry.fence(request.key, request.epoch, wall_clock_ms())
        mirror = self._registry.find(request.key)
        if mirror is not None and mirror.epoch == request.epoch:
            if mirror.finish is None:
                self._change_sources(mirror, request)
        else:
            mirror = self._start(request, ending, mirror, grammar, origin or Origin())
            for other in self._registry.left_over(request.key, request.epoch):
                self._drop(other)  # a later request ends all choices of an earlier one
        return Opened(mirror.source_names, mirror.finish.reason if mirror.finish else None)

    def cancel(self, key: SessionKey, epoch: int) -> bool:
        """Ends a session when the step in flight ends; returns whether one was running.

        Its Open may still be under way: what is opened under this epoch later ends at once. Under a later one
        somebody else has taken it over: its readers are told that, and not that it was cancelled. Raises
        StaleEpoch, or InvalidRequest for an epoch from the future.
        """
        self._registry.fence(key, epoch, wall_clock_ms())
        mirror = self._registry.find(key)
        if mirror is None or epoch > mirror.epoch:
            self._registry.cancel_unopened(key)
        if mirror is None or mirror.finish is not None:
            return False
        if epoch > mirror.epoch:
            self._drop(mirror)
        elif mirror.parked is not None:
            self._registry.finished(mirror, Finish(FinishReason.CANCELLED, mirror.parked), time.monotonic())
        else:
            self._put(Cancel(mirror.handle))
        return True

    def absorb(self, batch: Batch) -> None:
        """Takes over what a step did: mirrors first, then sources and readers hear of it."""
        now = time.monotonic()
        moved = [
            (mirror, update)
            for update in batch.updates
            if (mirror := self._registry.absorb(update, now)) is not None
        ]
        self._links.absorb(batch)
        for mirror, _ in moved:
            if mirror.subscribers and mirror.parked:  # a reader came while it was being parked
                self._returned(mirror)
        self._watchers.announce(batch.step, batch.expected_us)
        for mirror, update in moved:
            self._chronicle.absorb(mirror, update)

    def explained(self, key: SessionKey) -> explain_pb2.ExplainResponse:
        """What is known of a session's rounds."""
        return self._chronicle.explained(key)

    def sweep(self, grace_s: float, lease_s: float) -> None:
        """Parks sessions that nobody has read for `grace_s`; forgets what has rested for `lease_s`."""
        now = time.monotonic()
        for mirror in self._registry.orphans(now, grace_s):
            self._put(Park(mirror.handle))
        self._registry.forget_kept(now, lease_s)

    def _ending(self, request: Request) -> Ending:
        token_bytes = None if self._tokens is None else self._tokens.token_bytes
        return Ending(
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
        request: Request,
        ending: Ending,
        older: Mirror | None,
        grammar: Matcher | None,
        origin: Origin,
    ) -> Mirror:
        now = time.monotonic()
        sources = dict(enumerate(request.sources, start=1))
        names = tuple(source.name for source in request.sources)
        mirror = Mirror(self._registry.new_handle(), request, names, sources, now, grammar)
        finished = ending.finished
        if finished is None and self._registry.is_cancelled_unopened(request.key):
            finished = FinishReason.CANCELLED
        if finished is not None:
            self._replace(older, mirror)
            usage = UsageCount(prompt_tokens=request.prompt_length, replay_identical=request.replay_identical)
            self._registry.finished(mirror, Finish(finished, usage), now)
            return mirror
        if not request.recovered:
            self._check_room(older)
        if request.time_left_s is not None:
            mirror.deadline_s = time.perf_counter() + request.time_left_s
        self._replace(older, mirror)
        self._chronicle.began(mirror, origin, request.prompt_length)
        self._run(mirror, request, ending)
        return mirror

    def _returned(self, mirror: Mirror) -> None:
        """Somebody reads a session: one that was parked goes on, with nothing but its ids to start from."""
        if (usage := mirror.parked) is not None:
            request = replace(mirror.request, ids=tuple(mirror.ids))
            self._registry.resumed(mirror)
            self._run(mirror, request, self._ending(request), usage)

    def _run(self, mirror: Mirror, request: Request, ending: Ending, usage: UsageCount | None = None) -> None:
        session = Session(
            mirror.handle,
            request,
            ending,
            self._served.vocabulary_size,
            _source_set(mirror),
            mirror.deadline_s,
            self._reputations,
            usage,
            mirror.grammar,
        )
        resting = session.resting
        self._put(Open(session))
        for address, credits in _by_address(mirror.sources).items():
            self._follow(mirror, address, credits, resting.issuperset(credits))

    def _replace(self, older: Mirror | None, mirror: Mirror) -> None:
        if older is not None:
            self._drop(older)
        self._registry.add(mirror)

    def _drop(self, older: Mirror) -> None:
        self._links.end(older.handle)
        self._registry.supersede(older)
        self._chronicle.gone(older)
        self._put(Cancel(older.handle))

    def _check_room(self, older: Mirror | None) -> None:
        others = self._registry.running - (older is not None and older.runs)
        if others >= self._room.sessions:
            raise Overloaded(f"{others} sessions are open, as many as there may be", _RETRY_AFTER_S)

    def _change_sources(self, mirror: Mirror, request: Request) -> None:
        """Names that were there keep their credit index; new ones are added behind."""
        before = mirror.sources
        names = tuple(dict.fromkeys((*mirror.source_names, *(source.name for source in request.sources))))
        if len(names) > _MOST_CREDITS:
            raise InvalidRequest(f"the session has had {len(names)} sources by name; at most {_MOST_CREDITS}")
        after = {names.index(source.name) + 1: source for source in request.sources}
        if before == after or mirror.request.node_limit == 0:
            return
        mirror.source_names, mirror.sources = names, after
        if not mirror.runs:
            return
        self._put(Sources(mirror.handle, _source_set(mirror)))
        old, new = _by_address(before), _by_address(after)
        for address, credits in old.items():
            if new.get(address) != credits:
                self._links.unfollow(mirror.handle, credits)
        for address, credits in new.items():
            if old.get(address) != credits:
                self._follow(mirror, address, credits)

    def _follow(self, mirror: Mirror, address: str, credits: tuple[int, ...], resting: bool = False) -> None:
        digest = "" if self._tokens is None else self._tokens.digest
        names = tuple(mirror.sources[credit].name for credit in credits)
        records = tuple(self._reputations.of(name, mirror.request.params).activity for name in names)
        served = self._served
        following = Following(mirror, credits, names, served.model, digest, served.vocabulary_size, records)
        self._links.follow(address, following, resting)


def _by_address(sources: Mapping[int, SourceAddress]) -> dict[str, tuple[int, ...]]:
    """Credits of the sources outside this worker, by the address that they share."""
    found: dict[str, tuple[int, ...]] = {}
    for credit, source in sources.items():
        if source.address:
            found[source.address] = (*found.get(source.address, ()), credit)
    return found


def _source_set(mirror: Mirror) -> SourceSet:
    remote = frozenset(credit for credit, source in mirror.sources.items() if source.address)
    return SourceSet(mirror.source_names, local=frozenset(mirror.sources) - remote, remote=remote)
