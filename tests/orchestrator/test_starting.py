"""An orchestrator that says that it is ready answers the next request: balancers send it one at once."""

import asyncio
import socket
from typing import Any

import pytest

from orchestrator import service
from speculative.errors import Unavailable


@pytest.mark.parametrize("named", [False, True])
async def test_the_first_request_finds_the_verifier(world: Any, named: bool) -> None:
    fake = await world.verifier()
    port = fake.address.rpartition(":")[2]
    front = await world.front([f"dns:localhost:{port}" if named else fake.address])
    done = await front.client.generate(ids=[5, 6], max_tokens=2)
    assert len(done.ids) == 2


async def test_a_start_waits_for_no_verifier_that_refuses_its_call(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "VERIFIERS_WAIT_S", 600.0)
    async with asyncio.timeout(60):
        front = await world.front(["127.0.0.1:1", "dns:nowhere.invalid:1"])
    with pytest.raises(Unavailable):
        await front.client.generate(ids=[5, 6], max_tokens=2)


async def test_a_start_waits_a_while_at_most_for_a_verifier_that_does_not_answer(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "VERIFIERS_WAIT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with asyncio.timeout(60):
            await world.front([f"127.0.0.1:{silent.getsockname()[1]}"])
