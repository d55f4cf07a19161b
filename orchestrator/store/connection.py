"""Sends commands to a Redis server that may be slow, frozen, gone or empty.

Each command ends soon and completely.

redis-py's own defaults retry ten times and wait for seconds. Here a command has TIMEOUT_S at the socket, one
more attempt where its connection turns out to be closed, and a circuit breaker before it. A command runs in a
task of its own, so that a caller that goes away does not return a connection with half an answer to the pool.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as Disconnected
from redis.exceptions import NoScriptError, ReadOnlyError, RedisError, ResponseError

from orchestrator.store import StoreUnavailable
from orchestrator.store.breaker import Breaker

log = logging.getLogger(__name__)

TIMEOUT_S = 0.5
CONNECTIONS = 32

Answer = TypeVar("Answer")
ScriptCall = tuple[str, Sequence[Any]]
"""The key of a script, and its arguments."""


class RedisConnection:
    """Holds the connections to one server; dials with the first command. Raises ValueError for a bad URL.

    ``ca``, ``cert`` and ``key`` are the paths of PEM files for a rediss:// URL, or empty.
    """

    def __init__(self, url: str, ca: str = "", cert: str = "", key: str = "") -> None:
        files: dict[str, Any] = {"ssl_ca_certs": ca, "ssl_certfile": cert, "ssl_keyfile": key}
        self._redis: Redis = Redis.from_url(
            url,
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=TIMEOUT_S,
            retry=Retry(NoBackoff(), 1, supported_errors=(Disconnected,)),
            max_connections=CONNECTIONS,
            **{name: path for name, path in files.items() if path},
        )
        self.breaker = Breaker(time.monotonic)
        self._free = asyncio.Semaphore(CONNECTIONS)
        self._running: set[asyncio.Task[Any]] = set()

    async def ask(self, command: Callable[[Redis], Awaitable[Answer]]) -> Answer:
        """The answer to a command that can be repeated. Raises StoreUnavailable."""
        task = asyncio.create_task(self._attempt(command))
        self._running.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    async def run(self, script: str, calls: Sequence[ScriptCall]) -> list[Any]:
        """The answer to each call, or the ResponseError that its key holds an entry of another type."""
        return await self.ask(lambda redis: _run(redis, script, calls))

    async def close(self) -> None:
        """Cancel all commands and close the connections."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._redis.aclose()

    async def _attempt(self, command: Callable[[Redis], Awaitable[Answer]]) -> Answer:
        async with self._free:  # the pool itself would fail where it has no connection left
            if not self.breaker.allows():
                raise StoreUnavailable("it did not answer lately, and is left alone for a while")
            return await self._judged(command)

    async def _judged(self, command: Callable[[Redis], Awaitable[Answer]]) -> Answer:
        try:
            answer = await command(self._redis)
        except (RedisError, OSError) as error:
            if _is_demotion(error):  # the server's name leads elsewhere now
                await self._redis.connection_pool.disconnect(inuse_connections=False)
            if self.breaker.failed():
                log.warning("store lost; sessions go on without it", extra={"fields": {"why": _text(error)}})
            raise StoreUnavailable(_text(error)) from error
        if self.breaker.succeeded():
            log.warning("store found again", extra={"fields": {}})
        return answer

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # the caller may be gone


def is_wrong_kind(error: object) -> bool:
    """Whether a command failed because its key holds another type of entry; the server is well then."""
    return isinstance(error, ResponseError) and "WRONGTYPE" in str(error)


def _is_demotion(error: Exception) -> bool:
    """Whether a command failed because its server has become a replica.

    Before version 7 a server wraps the error of a script's command into one of another code.
    """
    return isinstance(error, ReadOnlyError) or (
        isinstance(error, ResponseError) and "-READONLY" in str(error)
    )


async def _run(redis: Redis, script: str, calls: Sequence[ScriptCall]) -> list[Any]:
    """Send all calls at once; load the script and send them again where the server does not know it."""
    name = hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
    for loaded in (False, True):
        pipe = redis.pipeline(transaction=False)
        for key, arguments in calls:
            pipe.evalsha(name, 1, key, *arguments)
        answers: list[Any] = await pipe.execute(raise_on_error=False)
        errors = [it for it in answers if isinstance(it, Exception) and not is_wrong_kind(it)]
        if not errors:
            return answers
        if loaded or not any(isinstance(error, NoScriptError) for error in errors):
            raise errors[0]
        await redis.script_load(script)
    raise AssertionError("the second attempt returns or raises")


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:200]
