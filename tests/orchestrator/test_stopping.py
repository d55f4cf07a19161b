"""How an orchestrator stops: the record before what can wait, and all the rest behind a fault too."""

import asyncio
from typing import Any

import pytest

from orchestrator.fleet.registry import RegistryServer
from orchestrator.front.http.connections.server import HttpServer
from orchestrator.store.ledger import Ledger


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Is set once a ledger has stopped."""
    stop, stopped = Ledger.stop, asyncio.Event()

    async def noted(ledger: Ledger) -> None:
        await stop(ledger)
        stopped.set()

    monkeypatch.setattr(Ledger, "stop", noted)
    return stopped


async def test_a_front_that_takes_long_to_stop_does_not_hold_up_the_ledger(
    world: Any, monkeypatch: pytest.MonkeyPatch, written: asyncio.Event
) -> None:
    front = await world.front(["127.0.0.1:1"], http_bind="127.0.0.1:0")

    async def endless(server: HttpServer) -> None:
        await asyncio.Event().wait()

    with monkeypatch.context() as now:
        now.setattr(HttpServer, "stop", endless)
        stopping = asyncio.create_task(front.service.stop(0.0))
        await asyncio.wait_for(written.wait(), 20)
        stopping.cancel()
        await asyncio.gather(stopping, return_exceptions=True)


async def test_a_part_that_fails_to_stop_is_told_and_the_others_stop(
    world: Any, monkeypatch: pytest.MonkeyPatch, written: asyncio.Event, caplog: pytest.LogCaptureFixture
) -> None:
    front = await world.front([], registry_bind="127.0.0.1:0")

    async def failing(server: RegistryServer) -> None:
        raise RuntimeError("a fault")

    with monkeypatch.context() as now:
        now.setattr(RegistryServer, "stop", failing)
        await front.service.stop(0.0)
    assert written.is_set()
    assert "RegistryServer did not stop" in caplog.messages
