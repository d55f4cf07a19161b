"""What a worker's process does about registration, around whatever the worker is."""

import asyncio
from typing import Any

import pytest

from outrider.announcing import AnnouncedWorker, announced
from outrider.runtime.metrics import Metrics
from outrider.runtime.serve import ServiceContext
from outrider.runtime.settings import WorkerSettings, read_settings
from outrider.wire.workers import WorkerState
from speculative.errors import InvalidRequest
from tests.orchestrator.fleet.test_registry import ANY, used


class Toy:
    """A worker that counts the calls of its methods."""

    def __init__(self, sessions: int = 0) -> None:
        self.sessions = sessions
        self.did: list[str] = []
        self.grace = -1.0

    def register(self, server: Any) -> tuple[str, ...]:
        self.did.append("register")
        return ("toy",)

    async def start(self) -> None:
        self.did.append("start")

    async def stop(self, grace: float) -> None:
        self.did.append("stop")
        self.grace = grace

    def state(self) -> WorkerState:
        return WorkerState(model="toy", sessions=self.sessions, capacity=8)


def context(*flags: str, address: str = "127.0.0.1:5") -> ServiceContext[WorkerSettings]:
    settings = read_settings(WorkerSettings, flags, {})
    return ServiceContext(settings, address, Metrics("drafter"), fail=lambda error: None)


def test_who_is_told_of_no_registry_is_as_it_was() -> None:
    toy = Toy()
    assert announced(toy, context()) is toy


@pytest.mark.parametrize("bound", ["0.0.0.0:50051", "[::]:50051"])
async def test_an_address_that_nobody_can_dial_is_refused(bound: str) -> None:
    with pytest.raises(InvalidRequest, match="--advertise"):
        announced(Toy(), context("--register-with", "o:1", address=bound))
    known = context("--register-with", "o:1", "--advertise", "pod:50051", address=bound)
    assert isinstance(announced(Toy(), known), AnnouncedWorker)


@pytest.mark.parametrize("flag", ["pod", "pod:0", "dns:pod:1"])
def test_what_is_advertised_is_one_address(flag: str) -> None:
    with pytest.raises(ValueError, match="advertise"):
        read_settings(WorkerSettings, ["--advertise", flag], {})


async def test_it_is_announced_once_it_can_serve_and_waits_for_its_sessions_to_leave(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    front = await world.front([], registry_bind=ANY)
    address = await world.source()
    monkeypatch.setattr(WorkerSettings, "role", "drafter")
    toy = Toy(sessions=2)
    worker_context = context("--register-with", front.registry, address=address)
    worker = announced(toy, worker_context, waits=True)
    assert not front.sample("peer_registered", peer=address)
    await worker.start()
    await world.until(lambda: used(front, address))
    stopping = asyncio.create_task(worker.stop(100.0))
    await world.until(lambda: front.sample("peer_draining", peer=address))
    assert toy.did == ["start"]
    toy.sessions = 0
    await asyncio.wait_for(stopping, 90)
    assert toy.did == ["start", "stop"]
    assert 50 < toy.grace < 100


async def test_one_that_never_started_stops_at_once() -> None:
    toy = Toy(sessions=2)
    worker = announced(toy, context("--register-with", "127.0.0.1:1"), waits=True)
    await asyncio.wait_for(worker.stop(10.0), 9)
    assert toy.did == ["stop"]
