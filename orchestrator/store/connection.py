"""Commands to a Redis server that may be slow, frozen, gone or empty: each ends soon, and none half-way.

redis-py's own defaults retry ten times and wait for seconds. Here a command has TIMEOUT_S at the socket, one
more attempt where a connection turns out to be closed, and a circuit breaker before it. It runs in a task of
its own: a caller that goes away does not take a connection with half an answer back to the pool.
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
Call = tuple[str, Sequence[Any]]
"""A key and the arguments of a script."""


class RedisConnection:
    """Holds the connections to one server; dials when first asked.

    Raises ValueError for a URL that is none.
    """

    def __init__(self, url: str) -> None:
        self._redis: Redis = Redis.from_url(
            url,
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=TIMEOUT_S,
            retry=Retry(NoBackoff(), 1, supported_errors=(Disconnected,)),
            max_connections=CONNECTIONS,
        )
        self.breaker = Breaker(time.monotonic)
        self._room = asyncio.Semaphore(CONNECTIONS)
        self._running: set[asyncio.Task[Any]] = set()

    async def ask(self, command: Callable[[Redis], Awaitable[Answer]]) -> Answer:
        """The answer of a command that can be repeated. Raises StoreUnavailable."""
        task = asyncio.create_task(self._attempt(command))
        self._running.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    async def run(self, script: str, calls: Sequence[Call]) -> list[Any]:
        """Each call's answer, or the ResponseError that says its key holds something of another kind."""
        return await self.ask(lambda redis: _run(redis, script, calls))

    async def close(self) -> None:
        """Ends commands, and hangs up."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._redis.aclose()

    async def _attempt(self, command: Callable[[Redis], Awaitable[Answer]]) -> Answer:
        async with self._room:  # the pool itself would fail where it has no connection left
            if not self.breaker.allows():
                raise StoreUnavailable("it did not answer lately, and is left alone for a while")
            return await self._judged(command)

    async def _judged(self, command: Callable[[Redis], Awaitable[Answer]]) -> Answer:
        try:
            answer = await command(self._redis)
        except (RedisError, OSError) as error:
            if isinstance(error, ReadOnlyError):  # a server that was demoted: the name leads elsewhere now
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
            task.exception()  # whoever asked may be gone


def is_wrong_kind(error: object) -> bool:
    """Whether a command failed for what its key holds, which is no fault of the server's."""
    return isinstance(error, ResponseError) and "WRONGTYPE" in str(error)


async def _run(redis: Redis, script: str, calls: Sequence[Call]) -> list[Any]:
    """All calls in one go. A server that does not know the script is told it, and asked again."""
    name = hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
    for told in (False, True):
        pipe = redis.pipeline(transaction=False)
        for key, arguments in calls:
            pipe.evalsha(name, 1, key, *arguments)
        answers: list[Any] = await pipe.execute(raise_on_error=False)
        errors = [it for it in answers if isinstance(it, Exception) and not is_wrong_kind(it)]
        if not errors:
            return answers
        if told or not any(isinstance(error, NoScriptError) for error in errors):
            raise errors[0]
        await redis.script_load(script)
    raise AssertionError("the second attempt returns or raises")


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:200]
