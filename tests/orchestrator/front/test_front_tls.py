"""Certificates that clients see, over both fronts, and those that they show."""

import asyncio
import contextlib
import logging
import ssl
from pathlib import Path
from typing import Any

import grpc
import pytest

from orchestrator.front.tls import grpc_listening, is_loopback
from orchestrator.settings import OrchestratorSettings
from outrider.client import AsyncClient, Client
from speculative.errors import InvalidRequest, Unavailable
from tests.certificates import Authority
from tests.orchestrator.fronts import orchestrator, soon, write_keys

NOBODY = ["127.0.0.1:1"]


@pytest.fixture
def ours(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


async def serial(address: str, context: ssl.SSLContext, name: str | None) -> int:
    host, _, port = address.removeprefix("https://").rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=context, server_hostname=name)
    shown = writer.get_extra_info("ssl_object").getpeercert()
    writer.close()
    return int(shown["serialNumber"], 16)


async def get(address: str, context: ssl.SSLContext, path: str) -> bytes:
    host, _, port = address.removeprefix("https://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode())
    try:
        return await reader.read()
    finally:
        writer.close()


async def test_clients_talk_over_tls_to_whom_they_believe(ours: Authority, tmp_path: Path) -> None:
    (key,) = write_keys(tmp_path / "keys", ["ours"])
    async with orchestrator(verifier=NOBODY, api_keys_file=tmp_path / "keys", **ours.front()) as said:
        async with AsyncClient(said["address"], ca=ours.ca, api_key=key) as client:
            assert await client.models() == []
        blocking = Client(said["address"], ca=str(ours.ca), api_key=key)
        with blocking:
            assert await asyncio.to_thread(blocking.models) == []
        for wrong in ({}, {"ca": Authority(tmp_path / "theirs").ca}):
            async with AsyncClient(said["address"], api_key=key, **wrong) as client:
                with pytest.raises(Unavailable):
                    await client.models()
        assert said["http"].startswith("https://")
        context = ssl.create_default_context(cafile=str(ours.ca))
        assert b'"version"' in await get(said["http"], context, "/version")
        assert b" 401 " in await get(said["http"], context, "/v1/models")


async def test_clients_show_certificates_where_they_are_asked_to(ours: Authority, tmp_path: Path) -> None:
    devices = Authority(tmp_path / "devices")
    cert, key = devices.issue("client", ["client.example"])
    settings = ours.front() | {"front_client_ca": devices.ca}
    async with orchestrator(verifier=NOBODY, **settings) as said:
        async with AsyncClient(said["address"], ca=ours.ca, cert=cert, cert_key=key) as client:
            assert await client.models() == []
        async with AsyncClient(said["address"], ca=ours.ca) as client:
            with pytest.raises(Unavailable):
                await client.models()
        context = ssl.create_default_context(cafile=str(ours.ca))
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            assert await get(said["http"], context, "/version") == b"", "it is hung up on"
        context.load_cert_chain(cert, key)
        assert b'"version"' in await get(said["http"], context, "/version")


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1"])
async def test_a_new_certificate_is_shown_without_a_restart(ours: Authority, name: str) -> None:
    """Whether a name is sent in the handshake (a host's) or not (an address)."""
    files = ours.front()
    context = ssl.create_default_context(cafile=str(ours.ca))
    async with orchestrator(verifier=NOBODY, **files) as said:
        before = [await serial(said[front], context, name) for front in ("address", "http")]
        assert before[0] == before[1]
        ours.front()

        async def renewed() -> bool:
            shown = [await serial(said[front], context, name) for front in ("address", "http")]
            return not set(shown) & set(before)

        await soon(renewed)
        after = [await serial(said[front], context, name) for front in ("address", "http")]
        assert after[0] == after[1]
        files["front_cert"].write_text("rubbish")
        await asyncio.sleep(1.1)
        assert [await serial(said[front], context, name) for front in ("address", "http")] == after


@pytest.mark.parametrize("damage", ["front_cert", "front_key", "front_client_ca"])
async def test_a_file_that_holds_none_is_named_and_nothing_is_served(ours: Authority, damage: str) -> None:
    files: dict[str, Any] = ours.front() | {"front_client_ca": ours.folder / "clients.crt"}
    files["front_client_ca"].write_bytes(ours.ca.read_bytes())
    files[damage].write_text("rubbish")
    with pytest.raises(AssertionError, match=f"{damage}: '{files[damage]}'"):
        async with orchestrator(verifier=NOBODY, **files):
            pass


async def test_a_part_of_what_is_needed_is_refused(ours: Authority) -> None:
    files = ours.front()
    for part, says in (
        ({"front_cert": files["front_cert"]}, "is given without front_key: give"),
        ({"front_client_ca": ours.ca}, "is given without front_cert and front_key: give"),
    ):
        with pytest.raises(AssertionError, match=says):
            async with orchestrator(verifier=NOBODY, **part):
                pass


@pytest.mark.parametrize(
    "how",
    [{"cert": "a"}, {"cert_key": "a"}, {"cert": "a", "cert_key": "b"}, {"ca": "c", "cert": "a"}],
)
def test_a_client_needs_all_parts(how: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest, match="go together"):
        Client("127.0.0.1:1", **how)  # type: ignore[arg-type]


def test_a_client_names_the_file_that_is_missing() -> None:
    with pytest.raises(InvalidRequest, match="ca: '/no/such/file' cannot be read"):
        Client("127.0.0.1:1", ca="/no/such/file")


@pytest.mark.parametrize(
    ("bind", "is_it"),
    [
        ("127.0.0.1:0", True),
        ("127.8.8.8:80", True),
        ("localhost:1", True),
        ("[::1]:0", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("10.0.0.1:1", False),
        ("example.org:1", False),
    ],
)
def test_what_only_this_machine_reaches_is_known(bind: str, is_it: bool) -> None:
    assert is_loopback(bind) == is_it


async def test_open_doors_are_logged(
    ours: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_keys(tmp_path / "keys", ["ours"])

    async def warnings(**settings: Any) -> str:
        caplog.clear()
        async with orchestrator(verifier=NOBODY, **settings):
            records = [record for record in caplog.records if record.name == "orchestrator.front.tls"]
            assert all(record.levelno == logging.WARNING for record in records)
            return " ".join(record.getMessage() for record in records)

    keys, everywhere = tmp_path / "keys", {"bind": "0.0.0.0:0"}
    assert await warnings() == ""
    assert "anyone who can connect to 0.0.0.0:0 may send requests" in await warnings(**everywhere)
    assert "anyone who can connect" in await warnings(http_bind="0.0.0.0:0")
    assert "0.0.0.0:0 may register" in await warnings(registry_bind="0.0.0.0:0")
    assert await warnings(registry_bind="0.0.0.0:0", **ours.role("orchestrator")) == ""
    assert "in plain" in await warnings(**everywhere, api_keys_file=keys)
    assert await warnings(**everywhere, api_keys_file=keys, **ours.front()) == ""


async def test_requests_without_any_practical_bound_are_a_number_that_grpc_takes() -> None:
    settings = OrchestratorSettings(verifier=NOBODY, max_streams=2**31 - 1)
    server = grpc.aio.server(options=grpc_listening(settings).options)
    await server.stop(0)
