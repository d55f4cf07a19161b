"""Workers that register where certificates are asked for: who is let in, as what, and for how long."""

import contextlib
import logging
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from outrider.announcing import Announcer
from outrider.client import AsyncClient
from outrider.v1.draft_source_pb2_grpc import add_DraftSourceServicer_to_server
from outrider.v1.registry_pb2_grpc import RegistryStub
from outrider.v1.verifier_pb2_grpc import add_VerifierServicer_to_server
from outrider.wire.channel import open_channel
from outrider.wire.tls import Certificates, Files
from outrider.wire.workers import WorkerEntry, WorkerState, entry_to_wire
from tests.certificates import Authority
from tests.orchestrator.conftest import FakeSource, FakeVerifier
from tests.orchestrator.fleet.test_inside_tls import listen
from tests.orchestrator.fronts import orchestrator, soon


def shown(paths: dict[str, Path]) -> Certificates:
    return Certificates(Files(*paths.values(), own_ca=True))


@contextlib.asynccontextmanager
async def announcing(
    role: str, address: str, registry: str, certificates: Certificates | None
) -> AsyncIterator[Announcer]:
    dial = partial(open_channel, certificates=certificates, role="orchestrator")
    announcer = Announcer([registry], role, address, WorkerState, every_s=0.1, dial=dial)
    announcer.start()
    try:
        yield announcer
    finally:
        await announcer.stop()


@contextlib.asynccontextmanager
async def registering(ours: Authority) -> AsyncIterator[tuple[str, AsyncClient]]:
    """The registry of an orchestrator whose settings name no worker, and a client of it."""
    settings: dict[str, Any] = ours.role("orchestrator")
    async with (
        orchestrator(registry_bind="127.0.0.1:0", **settings) as said,
        AsyncClient(said["address"]) as client,
    ):
        yield said["registry"], client


async def announce(registry: str, role: str, address: str, certificates: Certificates | None) -> None:
    entry = entry_to_wire(WorkerEntry(role, address, WorkerState()))
    async with open_channel(registry, certificates=certificates, role="orchestrator") as channel:
        await RegistryStub(channel).Announce(entry, timeout=100)


async def test_who_registers_with_a_certificate_of_its_role_is_used_and_goes_on_with_a_new_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours, verifier = Authority(tmp_path), FakeVerifier()
    caplog.set_level(logging.INFO)
    roles = {"verifier": ours.role("verifier"), "drafter": ours.role("drafter", "source")}
    async with contextlib.AsyncExitStack() as stack:
        one = await listen(stack, add_VerifierServicer_to_server, verifier, roles["verifier"])
        two = await listen(stack, add_DraftSourceServicer_to_server, FakeSource(), roles["drafter"])
        registry, client = await stack.enter_async_context(registering(ours))
        for role, address in (("verifier", one), ("drafter", two)):
            await stack.enter_async_context(announcing(role, address, registry, shown(roles[role])))

        async def known() -> bool:
            return any("drafter" in model.sources for model in await client.models())

        await soon(known)
        assert len((await client.generate(ids=[5], max_tokens=4)).ids) == 4
        for names in (("verifier",), ("drafter", "source"), ("orchestrator",)):
            ours.role(*names)
        caplog.clear()

        async def renewed() -> bool:
            return "a new certificate is shown from now on" in caplog.messages

        await soon(renewed)
        assert not [line for line in caplog.messages if "cannot register" in line]
        assert len((await client.generate(ids=[5], max_tokens=4)).ids) == 4


@pytest.mark.parametrize(
    ("certificate", "role"),
    [("orchestrator", "verifier"), ("front", "verifier"), ("drafter", "verifier"), ("operator", "verifier")],
)
async def test_a_certificate_of_another_role_registers_nobody(
    tmp_path: Path, certificate: str, role: str
) -> None:
    ours, verifier = Authority(tmp_path), FakeVerifier()
    async with contextlib.AsyncExitStack() as stack:
        address = await listen(stack, add_VerifierServicer_to_server, verifier, ours.role("verifier"))
        registry, client = await stack.enter_async_context(registering(ours))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await announce(registry, role, address, shown(ours.role(certificate)))
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert f"{role}.outrider.internal" in (refused.value.details() or "")
        assert await client.models() == []


async def test_without_a_certificate_of_the_authority_nobody_is_let_in(tmp_path: Path) -> None:
    ours, others = Authority(tmp_path / "ours"), Authority(tmp_path / "others")
    async with registering(ours) as (registry, client):
        for certificates in (None, shown(others.role("verifier"))):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await announce(registry, "verifier", "127.0.0.1:1", certificates)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await client.models() == []


async def test_a_worker_says_nothing_of_itself_to_a_registry_of_another_role(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours = Authority(tmp_path)
    async with contextlib.AsyncExitStack() as stack:
        impostor = await listen(stack, add_VerifierServicer_to_server, FakeVerifier(), ours.role("drafter"))
        certificates = shown(ours.role("verifier"))
        await stack.enter_async_context(announcing("verifier", "127.0.0.1:1", impostor, certificates))

        async def said() -> bool:
            return any("cannot register: UNAVAILABLE" in line for line in caplog.messages)

        await soon(said)
