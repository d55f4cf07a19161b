"""A real Redis server for a test: one that all share, or one of its own."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

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
def redis_server(shared_redis: RedisServer) -> RedisServer:
    """The shared Redis server, running and empty."""
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
