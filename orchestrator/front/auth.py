"""Who may use the fronts: API keys, the tenants they stand for, and what each caller may do at once.

The key file holds one JSON object per line; empty lines and lines that begin with # are skipped. It holds
only digests of keys, and no error message repeats a line, since somebody may have put a key there. Nothing
here knows of requests more than their number and the tokens that they cost.
"""

import hashlib
import json
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import grpc.aio
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from orchestrator.front.cluster_quotas import ClusterQuotas
from orchestrator.front.quota import Allowance, Quota
from orchestrator.front.web_tokens import KeySource, TokenRules, TokenUser, is_token
from orchestrator.relay.delivery import Delivered, Event
from outrider.wire.codec import checked_tenant
from outrider.wire.keys import HEADER, key_digest, key_of
from outrider.wire.origin import host_of
from outrider.wire.reloading import EVERY_S, Reloaded
from speculative.errors import InvalidRequest, OutriderError, Overloaded, PermissionDenied, Unauthenticated

SETTING = "api_keys_file"
DEFAULT_TENANT = "default"
"""The tenant of a request that names none."""
PEER_RETRY_S = 1.0
MOST_USERS = 65_536
"""Most JSON Web Token users whose use of quotas is remembered."""
Count = Annotated[int, Field(ge=1, le=10**12)]


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", repr=False)]
    tenant: Annotated[str, Field(min_length=1)]
    streams: Count | None = None
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None


@dataclass(frozen=True, slots=True)
class ApiKey:
    """The tenant and the quota of one API key of the key file, or of a token's user."""

    id: str
    """The beginning of the key's or the user's digest, which logs may contain."""
    tenant: str
    quota: Quota
    owns_sessions: bool = False
    """Whether sessions are the user's own, not the tenant's."""


class KeyTable:
    """The keys of a file. The time that a lookup takes reveals nothing of how much of a key was guessed.

    Args:
        keys: by digest.
    """

    def __init__(self, keys: Mapping[str, ApiKey]) -> None:
        # The table is indexed by digests under a secret of its own. So nobody can choose where a lookup would
        # land, and the time that it takes to find nothing there teaches nobody anything.
        self._secret = secrets.token_bytes(32)
        self._keys = {self._place(digest): key for digest, key in keys.items()}

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, key: str) -> ApiKey | None:
        """The entry of a key that a caller shows; None: the key is not in the file."""
        return self._keys.get(self._place(key_digest(key)))

    def _place(self, digest: str) -> bytes:
        return hashlib.blake2b(digest.encode(), key=self._secret, digest_size=32).digest()


class Caller:
    """Who makes a call: the tenant, and what its key allows.

    Args:
        until: when the key expires, on the clock; None: never.
    """

    def __init__(
        self,
        key: ApiKey | None,
        allowance: Allowance | None,
        clock: Callable[[], float],
        refused: Callable[[OutriderError], None],
        cluster: ClusterQuotas | None = None,
        until: float | None = None,
    ) -> None:
        self._cluster = cluster
        self._until = until
        self._key = key
        self._allowance = allowance
        self._clock = clock
        self._refused = refused

    def tenant(self, named: str = "") -> str:
        """The tenant of a request; `named` is the one that the request names.

        Raises PermissionDenied, and Unauthenticated where the key expired since the call began.
        """
        if self._key is None:
            return named or DEFAULT_TENANT
        if self._until is not None and self._clock() > self._until:
            gone = Unauthenticated("the token has expired; connect with a new one")
            self._refused(gone)
            raise gone
        if named not in ("", self._key.tenant):
            error = PermissionDenied(f"tenant {named!r} is not this key's; leave it out, or use its own key")
            self._refused(error)
            raise error
        return self._key.tenant

    @property
    def owner(self) -> str:
        """What stands before the names of the caller's sessions inside: a token's user has sessions of their
        own, keys of a tenant share theirs."""
        return f"{self._key.id}/" if self._key is not None and self._key.owns_sessions else ""

    @contextmanager
    def within_quota(self, count: int = 1, *, held: int = 0) -> Iterator[None]:
        """Count this many requests against the key's quota while the context lasts.

        `held` is the number of requests that the same call counts already. Raises QuotaExceeded,
        InvalidRequest.
        """
        allowance = self._allowance
        if allowance is None:
            yield
            return
        try:
            allowance.begin(count, self._clock(), held=held)
        except OutriderError as error:
            self._refused(error)
            raise
        try:
            yield
        finally:
            allowance.end(count)

    async def charged(
        self, events: AsyncGenerator[Event, None], prompt_tokens: int
    ) -> AsyncGenerator[Event, None]:
        """The events of a request; its prompt and every delivered token are charged to the key's quota.

        Raises QuotaExceeded where requests at other orchestrators have used up the quota.
        """
        async with aclosing(events), self._running_in_cluster():
            self._spend(prompt_tokens)
            async for event in events:
                if isinstance(event, Delivered):
                    self._spend(len(event.delta.ids))
                yield event

    @asynccontextmanager
    async def _running_in_cluster(self) -> AsyncIterator[None]:
        cluster, key, allowance = self._cluster, self._key, self._allowance
        if cluster is None or key is None or allowance is None:
            yield
            return
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(cluster.running(key.id, key.quota, allowance))
            except OutriderError as error:
                self._refused(error)
                raise
            yield

    def _spend(self, tokens: int) -> None:
        if self._allowance is not None:
            self._allowance.spend(tokens, self._clock())
        if self._cluster is not None and self._key is not None:
            self._cluster.spent(self._key.id, tokens)


class Gate:
    """Lets callers in by their API keys, or all callers where there are no keys.

    Args:
        keys: the known keys; None: no key is needed, and each request names its tenant.
        most_per_peer: the most calls at once from one address; None: no bound.
        refused: is called with the reason for each caller that is not let in.
        clock: monotonic clock in seconds.
        cluster: counts quotas together with other orchestrators; None: each quota holds here alone.
        tokens: the keys and the required claims of JSON Web Tokens; None: no token is accepted.
    """

    def __init__(
        self,
        keys: Reloaded[KeyTable] | None,
        most_per_peer: int | None = None,
        refused: Callable[[OutriderError], None] = lambda error: None,
        clock: Callable[[], float] = time.monotonic,
        cluster: ClusterQuotas | None = None,
        tokens: tuple[KeySource, TokenRules] | None = None,
    ) -> None:
        self._cluster = cluster
        self._keys = keys
        self._tokens = tokens
        self._most_per_peer = most_per_peer
        self._refused = refused
        self._clock = clock
        self._peers: Counter[str] = Counter()
        self._allowances: dict[str, Allowance] = {}
        """Allowances by key. Keys that were taken back keep theirs: they may return, and what they used
        counts."""
        self._users: dict[str, Allowance] = {}
        """Allowances of the users of JSON Web Tokens by user id, the latest user last."""

    @contextmanager
    def entered(self, header: str | None, peer: str) -> Iterator[Caller]:
        """The caller of one call, while the call lasts.

        Raises Unauthenticated, Overloaded where the peer makes too many calls, and Unavailable while the
        key of a JSON Web Token may be on its way.

        Args:
            header: the authorization header, where the call has one.
            peer: the caller's address, without a port.
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
        if self._keys is None and self._tokens is None:
            return Caller(None, None, self._clock, self._refused)
        if header is None:
            raise Unauthenticated(f"no API key came; give one as `{HEADER}: Bearer KEY`")
        shown = key_of(header)
        if shown is None:
            raise Unauthenticated(f"{HEADER} holds no API key; give one as `{HEADER}: Bearer KEY`")
        if self._tokens is not None and is_token(shown):
            keys, rules = self._tokens
            return self._user(keys.current().user(shown, rules))
        key = None if self._keys is None else self._keys.current().find(shown)
        if key is None:
            raise Unauthenticated("the API key is not known here; ask the operator of this server for a key")
        return Caller(key, self._allowance(key), self._clock, self._refused, self._cluster)

    def _user(self, user: TokenUser) -> Caller:
        """The caller that a JSON Web Token names. A user's quota use is forgotten after very many other
        users."""
        key = ApiKey(user.id, user.tenant, user.quota, owns_sessions=True)
        allowance = self._users.pop(key.id, None) or Allowance(self._quota(key), self._clock())
        allowance.change(self._quota(key), self._clock())
        self._users[key.id] = allowance
        if len(self._users) > MOST_USERS:
            idle = next((id_ for id_, held in self._users.items() if not held.running), None)
            if idle is not None:
                del self._users[idle]
        until = self._clock() + user.left_s
        return Caller(key, allowance, self._clock, self._refused, self._cluster, until)

    def _quota(self, key: ApiKey) -> Quota:
        return key.quota if self._cluster is None else self._cluster.allowed_here(key.quota)

    def _allowance(self, key: ApiKey) -> Allowance:
        now = self._clock()
        quota = self._quota(key)
        allowance = self._allowances.get(key.id)
        if allowance is None:
            allowance = self._allowances[key.id] = Allowance(quota, now)
        else:
            allowance.change(quota, now)
        return allowance


def credentials_of(context: grpc.aio.ServicerContext[Any, Any]) -> tuple[str | None, str]:
    """The authorization header of a gRPC call, if any, and the caller's address."""
    metadata = context.invocation_metadata() or ()
    found = next((value for name, value in metadata if name == HEADER), None)
    return found if found is None or isinstance(found, str) else "", host_of(context.peer())


def read_keys(contents: Mapping[str, bytes]) -> KeyTable:
    """The keys of the file. Raises InvalidRequest, with the line's number, for a line that is not valid."""
    try:
        lines = contents[SETTING].decode().splitlines()
    except UnicodeDecodeError:
        raise InvalidRequest(f"{SETTING}: it is no text in UTF-8; write it anew") from None
    keys: dict[str, ApiKey] = {}
    for number, text in enumerate(lines, start=1):
        if not text.strip() or text.lstrip().startswith("#"):
            continue
        line = _line(number, text)
        if line.sha256 in keys:
            raise _wrong(number, "has the same sha256 as an earlier line; leave one of them out")
        quota = Quota(line.streams, line.requests_per_minute, line.tokens_per_minute)
        keys[line.sha256] = ApiKey(line.sha256[:12], line.tenant, quota)
    if not keys:
        raise InvalidRequest(f"{SETTING}: it has no key; add one with `outrider keys new --tenant NAME`")
    return KeyTable(keys)


def watched_keys(path: Path, *, every_s: float = EVERY_S) -> Reloaded[KeyTable]:
    """The keys of the file, which is read again when it changes. Raises InvalidRequest."""
    return Reloaded({SETTING: path}, read_keys, every_s=every_s)


def _line(number: int, text: str) -> _Line:
    try:
        line = _Line.model_validate(json.loads(text, object_pairs_hook=_once))
        checked_tenant(line.tenant)
    except ValidationError as error:
        raise _wrong(number, _faults(error.errors(include_input=False))) from None
    except InvalidRequest as error:
        raise _wrong(number, str(error)) from None
    except (ValueError, RecursionError):
        raise _wrong(number, 'is no JSON object such as {"sha256": "...", "tenant": "..."}') from None
    return line


def _once(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    """A JSON object without repeated names, on whose value readers of JSON disagree. Raises ValueError."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name comes twice")
    return found


def _faults(faults: Sequence[Mapping[str, object]] | Sequence[object]) -> str:
    found = []
    for fault in faults:
        assert isinstance(fault, dict)
        known = [name for name in map(str, fault["loc"]) if name in _Line.model_fields]
        found.append(f"{'.'.join(known)}: {fault['msg']}" if known else "has a field that is not known")
    return "; ".join(found)


def _wrong(number: int, why: str) -> InvalidRequest:
    return InvalidRequest(f"{SETTING}: line {number}: {why}")
