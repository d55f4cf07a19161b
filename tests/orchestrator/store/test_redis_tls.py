"""A Redis server behind TLS: its authority, and the certificate that it asks for."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from orchestrator.settings import OrchestratorSettings
from orchestrator.store import SessionRecord, StoreUnavailable, open_store
from outrider.runtime.settings import read_settings
from outrider.wire.codec import SessionKey
from outrider.wire.epochs import RANDOM_BITS, wall_clock_ms
from speculative.errors import InvalidRequest
from tests.certificates import Authority
from tests.redis_server import RedisServer

KEY = SessionKey("tenant", "session", 0)
EPOCH = wall_clock_ms() << RANDOM_BITS


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


@asynccontextmanager
async def behind_tls(server: RedisServer, authority: Authority) -> AsyncIterator[str]:
    """The URL at which the server is reached by TLS alone, by those with a certificate of the authority."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(authority.ca))
    context.load_cert_chain(*authority.issue("redis", ["localhost", "127.0.0.1"]))
    context.verify_mode = ssl.CERT_REQUIRED
    dialogues: list[asyncio.Task[Any]] = []

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (dialogue := asyncio.current_task()) is not None:
            dialogues.append(dialogue)
        answers, asks = await asyncio.open_unix_connection(server.url.removeprefix("unix://"))
        ways = [asyncio.create_task(way) for way in (copy(reader, asks), copy(answers, writer))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for end in (asks, writer):
                end.close()
                with suppress(OSError):
                    await end.wait_closed()

    listener = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=context)
    try:
        yield f"rediss://127.0.0.1:{listener.sockets[0].getsockname()[1]}/0"
    finally:
        listener.close()
        for dialogue in dialogues:
            dialogue.cancel()
        await asyncio.gather(*dialogues, return_exceptions=True)


async def test_sessions_are_recorded_over_tls_of_a_private_authority(
    world: Any, redis_server: RedisServer, authority: Authority
) -> None:
    cert, key = authority.issue("orchestrator", ["orchestrator"])
    verifier = await world.verifier()
    async with behind_tls(redis_server, authority) as url:
        front = await world.ready(
            await world.front(
                [verifier.address],
                store="redis",
                redis_url=url,
                redis_ca=authority.ca,
                redis_cert=cert,
                redis_key=key,
            )
        )
        await front.client.generate(ids=[5], session="mine", max_tokens=4)
        await world.until(lambda: front.sample("store_sessions") == 0)
        assert front.sample("store_failures_total") == 0


@pytest.mark.parametrize("lacking", ["the authority", "a certificate"])
async def test_a_server_is_left_alone_without(
    lacking: str, redis_server: RedisServer, authority: Authority, tmp_path: Path
) -> None:
    other = Authority(tmp_path / "other")
    cert, key = map(str, authority.issue("orchestrator", ["orchestrator"]))
    files = (str(other.ca), cert, key) if lacking == "the authority" else (str(authority.ca),)
    async with behind_tls(redis_server, authority) as url:
        store = open_store("redis", url, *files)
        with pytest.raises(StoreUnavailable):
            await store.put([(SessionRecord(KEY, EPOCH, "a:1"), EPOCH)])
        await store.close()


@pytest.mark.parametrize(
    ("url", "given", "what"),
    [
        ("redis://h:1", {"redis_ca": "ca"}, "begin it with rediss://"),
        ("rediss://h:1", {"redis_cert": "cert"}, "redis_cert .* is given without redis_key"),
        ("rediss://h:1", {"redis_ca": "key"}, "redis_ca: .* has no certificate in PEM"),
    ],
)
async def test_what_could_never_work_is_refused_at_the_start(
    world: Any, authority: Authority, url: str, given: dict[str, str], what: str
) -> None:
    cert, key = authority.issue("orchestrator", ["orchestrator"])
    files = {"ca": authority.ca, "cert": cert, "key": key}
    with pytest.raises(InvalidRequest, match=what):
        await world.front(
            ["127.0.0.1:1"],
            store="redis",
            redis_url=url,
            **{name: files[file] for name, file in given.items()},
        )


def test_a_file_for_tls_beside_a_url_without_it_is_a_fault_of_the_settings() -> None:
    flags = ["--verifier", "h:1", "--store", "redis", "--redis-url", "redis://h:1", "--redis-ca", "/ca.crt"]
    with pytest.raises(ValueError, match="begin it with rediss://"):
        read_settings(OrchestratorSettings, flags, {})


def test_a_file_for_tls_without_a_redis_is_a_fault_of_the_settings() -> None:
    with pytest.raises(ValueError, match="redis_cert is given, but store is memory; give --store redis"):
        read_settings(OrchestratorSettings, ["--verifier", "h:1", "--redis-ca", "/ca.crt"], {})
