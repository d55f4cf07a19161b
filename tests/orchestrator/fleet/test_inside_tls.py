"""The orchestrator's own calls, to verifiers and sources that ask for certificates."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from outrider.client import AsyncClient
from outrider.runtime.security import RoleCheck
from outrider.v1.draft_source_pb2_grpc import add_DraftSourceServicer_to_server
from outrider.v1.verifier_pb2_grpc import add_VerifierServicer_to_server
from outrider.wire.channel import server_options
from outrider.wire.tls import Certificates, Files, server_credentials
from tests.certificates import Authority
from tests.orchestrator.conftest import MAX_LENGTH, FakeSource, FakeVerifier, next_id
from tests.orchestrator.fronts import orchestrator, soon

Add = Callable[[Any, grpc.aio.Server], None]


async def listen(stack: contextlib.AsyncExitStack, add: Add, fake: Any, paths: dict[str, Path]) -> str:
    shown = Certificates(Files(*paths.values(), own_ca=True))
    server = grpc.aio.server(interceptors=(RoleCheck(("orchestrator",)),), options=server_options())
    add(fake, server)
    port = server.add_secure_port("127.0.0.1:0", server_credentials(shown, clients=True))
    await server.start()
    stack.push_async_callback(server.stop, 0)
    return f"127.0.0.1:{port}"


async def test_requests_are_answered_and_go_on_while_certificates_are_replaced(tmp_path: Path) -> None:
    ours, verifier = Authority(tmp_path), FakeVerifier(tick_s=0.1, per_tick=2)
    async with contextlib.AsyncExitStack() as stack:
        one = await listen(stack, add_VerifierServicer_to_server, verifier, ours.role("verifier"))
        two = await listen(
            stack, add_DraftSourceServicer_to_server, FakeSource(), ours.role("drafter", "source")
        )
        settings: dict[str, Any] = {"verifier": [one], "drafter": [two], **ours.role("orchestrator")}
        said = await stack.enter_async_context(orchestrator(**settings))
        client = await stack.enter_async_context(AsyncClient(said["address"]))

        async def known() -> bool:
            return any("drafter" in model.sources for model in await client.models())

        await soon(known)
        held = client.stream(ids=[5], max_tokens=MAX_LENGTH - 1)
        await anext(held)
        ours.role("orchestrator")
        for _ in range(12):  # longer than the files are not looked at
            assert (await client.generate(ids=[5], max_tokens=2)).ids == (next_id(1), next_id(2))
        answer = await held.completion()
    assert answer.ids == tuple(next_id(position) for position in range(1, MAX_LENGTH))
    assert answer.usage.recoveries == 0


@pytest.mark.parametrize("role", ["drafter", "front"])
async def test_a_verifier_of_another_role_is_not_used(tmp_path: Path, role: str) -> None:
    ours, verifier = Authority(tmp_path), FakeVerifier()
    async with contextlib.AsyncExitStack() as stack:
        address = await listen(stack, add_VerifierServicer_to_server, verifier, ours.role(role))
        settings: dict[str, Any] = {"verifier": [address], **ours.role("orchestrator")}
        said = await stack.enter_async_context(orchestrator(**settings))
        client = await stack.enter_async_context(AsyncClient(said["address"]))
        for _ in range(10):
            assert await client.models() == []
    assert verifier.opened == []
