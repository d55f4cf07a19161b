"""A drafter that learns, behind real services: it changes no id, and belongs to its tenant alone."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from drafter_service.drafters import Drafter, load
from drafter_service.service import build as build_drafter
from drafter_service.settings import DrafterSettings
from orchestrator.service import build as build_orchestrator
from orchestrator.settings import OrchestratorSettings
from outrider.client import AsyncClient
from outrider.runtime.metrics import Metrics
from outrider.runtime.serve import ServiceContext
from outrider.wire.channel import server_options
from outrider.wire.codec import SessionKey
from speculative.errors import Unavailable
from verifier_service.service import build as build_verifier
from verifier_service.settings import VerifierSettings

ASKED: list[dict[str, Any]] = [
    {"ids": [5, 9, 30], "temperature": 0.0},
    {"ids": [5, 9, 30, 41], "temperature": 0.8, "seed": 11},
]


@asynccontextmanager
async def running(build: Any, settings: Any) -> AsyncIterator[tuple[str, Any]]:
    """One service inside this process, with its address."""
    server = grpc.aio.server(options=server_options())
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    service = await build(ServiceContext(settings, address, Metrics(settings.role), lambda error: None))
    service.register(server)
    await server.start()
    try:
        await service.start()
        yield address, service
    finally:
        await service.stop(5.0)
        await server.stop(0)


async def served(client: AsyncClient) -> None:
    """Waits until the orchestrator has reached the verifier."""
    async with asyncio.timeout(100):
        while True:
            with contextlib.suppress(Unavailable):
                if await client.models():
                    return
            await asyncio.sleep(0.01)


def followed_by(worker: Any, monkeypatch: pytest.MonkeyPatch) -> list[SessionKey]:
    """The sessions that the drafter follows from now on, in order."""
    followed, opened = list[SessionKey](), worker.opened

    def note(session: Any) -> None:
        followed.append(session.key)
        opened(session)

    monkeypatch.setattr(worker, "opened", note)
    return followed


@pytest.mark.usefixtures("quick_switches")
async def test_ids_are_plain_ones_before_during_and_after_swaps_and_other_tenants_stay_out(
    tiny_llama: Path, tiny_llama_b: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {"threads": 1, "passes": "eager"}
    learning = DrafterSettings(
        model=str(tiny_llama_b),
        learn="tenant:ann",
        learn_dir=tmp_path,
        learn_every=10**9,
        device="cpu",
        **given,
    )
    others = [load(DrafterSettings(model=str(model), **given)) for model in (tiny_llama, tiny_llama_b) * 3]
    async with AsyncExitStack() as stack:
        target = VerifierSettings(model=str(tiny_llama), **given)
        verifier, _ = await stack.enter_async_context(running(build_verifier, target))
        drafter, service = await stack.enter_async_context(running(build_drafter, learning))
        front = OrchestratorSettings(verifier=(verifier,), drafter=(drafter,))
        address, _ = await stack.enter_async_context(running(build_orchestrator, front))
        client = await stack.enter_async_context(AsyncClient(address))
        worker = service.worker
        followed = followed_by(worker, monkeypatch)

        async def ask(tenant: str, **options: Any) -> list[Any]:
            return await asyncio.gather(
                *(
                    client.generate(max_tokens=120, ignore_eos=True, tenant=tenant, **one, **options)
                    for one in ASKED
                )
            )

        async def swapping() -> None:
            for drafts in others:
                await asyncio.wrap_future(worker.call(lambda drafts=drafts: replaced(drafts)))
                await asyncio.sleep(0.02)

        def replaced(drafts: Drafter) -> None:
            worker.replace(drafts, "swapped")

        await served(client)
        plain = [one.ids for one in await ask("ann", speculation=False)]
        found = await ask("ann")
        async with asyncio.timeout(60):  # until what the target said has come, and is kept
            while not worker.gauges()["learning_bytes"]:
                found = await ask("ann")
        assert [one.ids for one in found] == plain

        during, _ = await asyncio.gather(ask("ann"), swapping())
        after = await ask("ann", learn=False)
        assert [[one.ids for one in answers] for answers in (during, after)] == [plain, plain]
        assert worker.counts.swaps == len(others)
        assert worker.counts.failed_sessions == worker.counts.failed_passes == 0

        foreign = await ask("bob")
        assert [one.ids for one in foreign] == plain
        assert all("drafter" not in one.usage.accepted_by_source for one in foreign)
        async with asyncio.timeout(60):  # until it has heard of a session behind those of the other tenant
            while not any(key.session == "last" for key in followed):
                await client.generate(max_tokens=120, tenant="ann", session="last", **ASKED[0])
        assert {key.tenant for key in followed} == {"ann"}, "of others it neither drafts nor keeps anything"
