"""The JSON Web Key Set (RFC 7517) of a sign-in service, fetched from the service's URL.

The check of a token never waits for a fetch. A fetch runs in a thread of its own; until the thread is done,
tokens are checked with the keys of the fetch before. If the URL stops answering, those keys stay in use.
"""

import contextlib
import http.client
import ipaddress
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from urllib.parse import SplitResult, urlsplit

from orchestrator.front.web_tokens import SigningKeys, parse_key_set, require_jwt
from speculative.errors import InvalidRequest, Unavailable

log = logging.getLogger(__name__)

SETTING = "jwt_keys_url"
EVERY_S = 300.0
"""Age in seconds at which the next token has the keys fetched again."""
UNKNOWN_EVERY_S = 30.0
"""Shortest time in seconds between two fetches for unknown keys: anyone can make up the name of a key."""
RETRY_S, LONGEST_RETRY_S = 1.0, 60.0
"""Seconds until a failed fetch is repeated: doubled for each further failure, up to the second number."""
STALL_S, FETCH_S = 5.0, 10.0
"""The most seconds to connect, to shake hands and without a byte of the answer; for the whole answer."""
MOST_BYTES = 1 << 18
"""The longest key set that is read; real key sets have a few KiB."""


class FetchPlan:
    """Decides when the keys are fetched; pure. All times are monotonic seconds."""

    def __init__(self) -> None:
        self._fetching = False
        self._failures = 0
        self._next_s = -float("inf")
        self._next_unknown_s = -float("inf")

    def is_due(self, now_s: float) -> bool:
        """Whether to fetch because the keys are old, or because the fetch before failed."""
        return not self._fetching and now_s >= self._next_s

    def may_be_new(self, now_s: float) -> bool:
        """Whether an unknown key may be new: keys are being fetched, or may be fetched now."""
        return self._fetching or now_s >= self._next_unknown_s

    def began(self, now_s: float) -> None:
        """Notes the beginning of a fetch."""
        self._fetching = True
        self._next_unknown_s = now_s + UNKNOWN_EVERY_S

    def ended(self, now_s: float, *, succeeded: bool) -> None:
        """Notes the end of a fetch."""
        self._fetching = False
        self._failures = 0 if succeeded else self._failures + 1
        retry_s = min(LONGEST_RETRY_S, RETRY_S * 2.0 ** min(self._failures - 1, 16))
        self._next_s = now_s + (EVERY_S if succeeded else retry_s)


class FetchedKeys:
    """The signing keys at a URL; safe in any thread, and never blocks.

    Args:
        url: https, or http on this machine's loopback interface.
        clock: monotonic seconds.

    Raises InvalidRequest where the URL is of another kind, or PyJWT is not installed.
    """

    def __init__(self, url: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._url = checked_url(url)
        require_jwt(SETTING)
        self._clock = clock
        self._plan = FetchPlan()
        self._lock = threading.Lock()
        self._keys = SigningKeys({}, self._unknown)
        self._has_keys = False
        self._thread: threading.Thread | None = None
        self._fetch_if(self._plan.is_due)

    def current(self) -> SigningKeys:
        """The keys of the latest fetch that succeeded; has old keys fetched again."""
        self._fetch_if(self._plan.is_due)
        return self._keys

    def wait_fetched(self) -> None:
        """Returns once no fetch is under way."""
        if (thread := self._thread) is not None:
            thread.join()

    def _unknown(self) -> None:
        """Handles a token with an unknown key. Raises Unavailable if the next fetch may bring the key."""
        with self._lock:
            may_be_new = self._plan.may_be_new(self._clock())
        if may_be_new:
            self._fetch_if(self._plan.may_be_new)
            raise Unavailable("the key of your token is being fetched; try again in a second")
        if not self._has_keys:
            raise Unavailable("the keys of tokens cannot be fetched at the moment; try again in a minute")

    def _fetch_if(self, wanted: Callable[[float], bool]) -> None:
        """Starts a fetch if one is wanted and none is under way."""
        with self._lock:
            running = self._thread is not None and self._thread.is_alive()
            if running or not wanted(self._clock()):
                return
            self._plan.began(self._clock())
            self._thread = threading.Thread(target=self._fetch, name="outrider-jwks", daemon=True)
            self._thread.start()

    def _fetch(self) -> None:
        """Fetches the keys once; the thread's function."""
        succeeded = False
        try:
            self._keys = parse_key_set(read_url(self._url), SETTING, self._unknown)
            self._has_keys = succeeded = True
        except (OSError, http.client.HTTPException, InvalidRequest) as error:
            log.error("%s: %s; the keys fetched before stay in use", SETTING, error or type(error).__name__)
        finally:
            with self._lock:
                self._plan.ended(self._clock(), succeeded=succeeded)


def checked_url(url: str) -> SplitResult:
    """The parts of a URL from which keys may be fetched. Raises InvalidRequest for any other URL."""
    try:
        split = urlsplit(url)
        host, _ = split.hostname or "", split.port
    except ValueError as error:
        raise InvalidRequest(f"{SETTING}: {url!r} is not a URL: {error}") from None
    if not host or split.username is not None or split.scheme not in ("https", "http"):
        raise InvalidRequest(f"{SETTING}: {url!r} is not the URL of a key set; give https://HOST/PATH")
    if split.scheme == "http" and not _is_loopback(host):
        raise InvalidRequest(
            f"{SETTING}: {url!r} is not encrypted, so anyone on the way could insert keys; give https://HOST/PATH"
        )
    return split


def read_url(split: SplitResult) -> bytes:
    """The body at a URL. Follows no redirect: another host could be anyone's.

    Raises:
        OSError, HTTPException: the server cannot be reached, or takes longer than STALL_S and FETCH_S allow.
        InvalidRequest: the server refuses, or the body is longer than MOST_BYTES.
    """
    host = split.hostname or ""
    connection = (
        http.client.HTTPSConnection(host, split.port, timeout=STALL_S, context=ssl.create_default_context())
        if split.scheme == "https"
        else http.client.HTTPConnection(host, split.port, timeout=STALL_S)
    )
    with contextlib.closing(connection):
        connection.connect()
        with _ended_after(connection.sock, FETCH_S):
            path = (split.path or "/") + (f"?{split.query}" if split.query else "")
            connection.request("GET", path, headers={"Accept": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise InvalidRequest(f"{split.geturl()} answered {response.status} {response.reason}")
            body = response.read(MOST_BYTES + 1)
    if len(body) > MOST_BYTES:
        raise InvalidRequest(f"{split.geturl()} sent more than {MOST_BYTES} bytes, which no key set has")
    return body


@contextlib.contextmanager
def _ended_after(connection: socket.socket, seconds: float) -> Iterator[None]:
    """Cuts a connection after a time: a timeout between bytes alone lets a server drip for ever."""

    def cut() -> None:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
