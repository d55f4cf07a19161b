"""Who is let in at the front, as which tenant, and how much at once; the same for both fronts.

Knows nothing of requests but how many they are and what ids they cost.
"""

import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import grpc.aio

from orchestrator.front.keys import ApiKey, KeyTable
from orchestrator.front.quota import Allowance
from orchestrator.relay.events import Delivered, Event
from outrider.wire.keys import HEADER, key_of
from outrider.wire.reloading import Reloaded
from speculative.errors import OutriderError, Overloaded, PermissionDenied, Unauthenticated

DEFAULT_TENANT = "default"
"""Who asks without saying so."""
PEER_RETRY_S = 1.0


class Caller:
    """Whoever made one call."""

    def __init__(
        self,
        key: ApiKey | None,
        allowance: Allowance | None,
        clock: Callable[[], float],
        refused: Callable[[OutriderError], None],
    ) -> None:
        self._key = key
        self._allowance = allowance
        self._clock = clock
        self._refused = refused

    def tenant(self, named: str = "") -> str:
        """Whose the request is; `named` is what it says itself. Raises PermissionDenied."""
        if self._key is None:
            return named or DEFAULT_TENANT
        if named not in ("", self._key.tenant):
            error = PermissionDenied(f"tenant {named!r} is not this key's; leave it out, or use its own key")
            self._refused(error)
            raise error
        return self._key.tenant

    @contextmanager
    def asking(self, count: int = 1) -> Iterator[None]:
        """So many requests are answered inside. Raises QuotaExceeded, InvalidRequest."""
        allowance = self._allowance
        if allowance is None:
            yield
            return
        try:
            allowance.begin(count, self._clock())
        except OutriderError as error:
            self._refused(error)
            raise
        try:
            yield
        finally:
            allowance.end(count)

    async def paying(self, events: AsyncGenerator[Event, None], prompt: int) -> AsyncGenerator[Event, None]:
        """The events of a request with so many ids in its prompt, all of it paid for."""
        self._spend(prompt)
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Delivered):
                    self._spend(len(event.delta.ids))
                yield event

    def _spend(self, tokens: int) -> None:
        if self._allowance is not None:
            self._allowance.spend(tokens, self._clock())


class Gate:
    """Lets callers in.

    Args:
        keys: those that are known; None: any is taken, or none, and whoever asks says as which tenant.
        most_per_peer: calls at once from one address; None: no bound of its own.
        refused: is told of each caller that is not let in, and why.
        clock: seconds that only rise.
    """

    def __init__(
        self,
        keys: Reloaded[KeyTable] | None,
        most_per_peer: int | None = None,
        refused: Callable[[OutriderError], None] = lambda error: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keys = keys
        self._most_per_peer = most_per_peer
        self._refused = refused
        self._clock = clock
        self._peers: Counter[str] = Counter()
        self._allowances: dict[str, Allowance] = {}
        """By key, those too that were taken back: they may return, and what they used stays used."""

    @contextmanager
    def entered(self, header: str | None, peer: str) -> Iterator[Caller]:
        """One call, by what it shows and where it comes from (the host alone).

        Raises Unauthenticated, and Overloaded where the peer has too many.
        """
        try:
            caller = self._caller(header)
            if self._most_per_peer is not None and self._peers[peer] >= self._most_per_peer:
                raise Overloaded(f"{self._peers[peer]} calls come from your address now", PEER_RETRY_S)
        except OutriderError as error:
            self._refused(error)
            raise
        self._peers[peer] += 1
        try:
            yield caller
        finally:
            self._peers[peer] -= 1
            if not self._peers[peer]:
                del self._peers[peer]

    def _caller(self, header: str | None) -> Caller:
        if self._keys is None:
            return Caller(None, None, self._clock, self._refused)
        if header is None:
            raise Unauthenticated(f"no API key came; give one as `{HEADER}: Bearer KEY`")
        shown = key_of(header)
        if shown is None:
            raise Unauthenticated(f"{HEADER} holds no API key; give one as `{HEADER}: Bearer KEY`")
        key = self._keys.current().find(shown)
        if key is None:
            raise Unauthenticated("the API key is not known here; ask whoever runs this for one")
        return Caller(key, self._allowance(key), self._clock, self._refused)

    def _allowance(self, key: ApiKey) -> Allowance:
        now = self._clock()
        allowance = self._allowances.get(key.id)
        if allowance is None:
            allowance = self._allowances[key.id] = Allowance(key.quota, now)
        else:
            allowance.change(key.quota, now)
        return allowance


def shown_by(context: grpc.aio.ServicerContext[Any, Any]) -> tuple[str | None, str]:
    """What a call over gRPC shows, and its host."""
    metadata = context.invocation_metadata() or ()
    found = next((value for name, value in metadata if name == HEADER), None)
    return found if found is None or isinstance(found, str) else "", host_of(context.peer())


def host_of(peer: str) -> str:
    """Of ipv4:HOST:PORT, without the port, which is another one each time."""
    return peer.rpartition(":")[0] or peer
