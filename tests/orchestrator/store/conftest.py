"""A real Redis server for a test: one that all share, or one of its own."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.store import connection, ledger
from tests.redis_server import RedisServer


@pytest.fixture(scope="session")
def shared_redis() -> Iterator[RedisServer]:
    """A Redis server for tests that leave it running; `redis_server` empties it."""
    with tempfile.TemporaryDirectory(prefix="redis-") as folder:
        server = RedisServer(Path(folder))
        server.start()
        yield server
        server.kill()


@pytest.fixture
def redis_server(shared_redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> RedisServer:
    """The shared Redis server, running and empty; it is given as long as a busy machine takes."""
    monkeypatch.setattr(connection, "TIMEOUT_S", 30.0)
    for patience in ("HINT_S", "CANCEL_S"):  # a lookup without an answer is no error: the request goes on
        monkeypatch.setattr(ledger, patience, 30.0)
    shared_redis.say("FLUSHALL")
    return shared_redis


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """A Redis server for one test, which may freeze or kill it."""
    with tempfile.TemporaryDirectory(prefix="redis-") as folder:
        server = RedisServer(Path(folder))
        server.start()
        yield server
        server.kill()
