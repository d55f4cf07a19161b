"""Workers that no setting names: they register, serve, and are replaced amid requests."""

import os
import re
import signal
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from outrider.client import Client
from outrider.runtime.children import ServiceProcess, stop_all
from tests.in_time import in_time
from tests.integration.live import ROOT, until
from tests.integration.together import ASKED, ids_of, together

QUIET = {"OUTRIDER_VERIFIER__LOG_LEVEL": "warning", "OUTRIDER_DRAFTER__LOG_LEVEL": "warning"}
TWO = ASKED[:2]
LONG: dict[str, Any] = {"max_tokens": 900, "ignore_eos": True}
MODELS = ROOT / "models"


class Services:
    """An orchestrator whose settings name no worker, and workers that know its address."""

    def __init__(self) -> None:
        self.processes: list[ServiceProcess] = []
        self.front = self.start("orchestrator", "orchestrator", "--registry-bind", "127.0.0.1:0")

    def start(self, role: str, module: str, *flags: str) -> ServiceProcess:
        process = ServiceProcess.start(role, module, ["--bind", "127.0.0.1:0", *flags], env=QUIET)
        self.processes.append(process)
        process.wait_ready(250.0)
        return process

    def worker(self, role: str, model: Path, *flags: str) -> ServiceProcess:
        registered = (
            "--register-with",
            self.front.registry,
            "--model",
            str(model),
            "--threads",
            "1",
            "--passes",
            "eager",
        )
        return self.start(role, f"{role}_service", *registered, *flags)


@pytest.fixture
def services() -> Iterator[Services]:
    with ExitStack() as held:
        services = Services()
        held.callback(lambda: stop_all(services.processes, 5.0))
        yield services


def has_sources(client: Client, *names: str) -> bool:
    models = client.models()
    return bool(models) and set(names) <= set(models[0].sources)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_verifier_that_is_told_to_end_hands_its_streams_over(services: Services) -> None:
    first = services.worker("verifier", MODELS / "target", "--grace-s", "60")
    with Client(services.front.address) as client:
        until(lambda: client.models())
        plain = ids_of(together(client, asked=TWO, **LONG))
        services.worker("verifier", MODELS / "target")
        until(lambda: len(metric(services.front, "peer_up", 1.0)) == 2)
        barrier = threading.Barrier(len(TWO) + 1, action=lambda: os.kill(first.pid, signal.SIGTERM))
        answers = together(client, barrier, TWO, **LONG)
        assert ids_of(answers) == plain
        moved = [choice.usage.recoveries for answer in answers for choice in answer.choices]
        assert set(moved) <= {0, 1}
        in_time(sum(moved) > 0, "the streams were over before")
        until(lambda: first.poll() is not None, 50)  # long before its grace is over
        assert first.poll() == 0
        until(lambda: first.address not in metric(services.front, "peer_up"))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_request_whose_drafter_is_told_to_end_gets_another_one(services: Services) -> None:
    services.worker("verifier", MODELS / "target")
    drafters = [services.worker("drafter", MODELS / "drafter", "--grace-s", "20") for _ in range(2)]
    asked: dict[str, Any] = {"prompt": "def read(path):\n", "temperature": 0.8, "seed": 5, **LONG}
    with Client(services.front.address) as client:
        until(lambda: len(metric(services.front, "peer_up", 1.0)) == 3)
        until(lambda: has_sources(client, "drafter"))
        plain = client.generate(**asked, speculation=False)
        with client.stream(**asked, sources=["drafter"]) as stream:
            next(stream)
            (had,) = {one.address for one in drafters} & metric(services.front, "peer_sessions", 1.0).keys()
            lost, other = sorted(drafters, key=lambda one: one.address != had)
            os.kill(lost.pid, signal.SIGTERM)
            attributed: list[str] = []
            for chunk in stream:
                attributed += [source for source in chunk.sources if source and lost.poll() is not None]
        assert stream.completion().ids == plain.ids
        in_time("drafter" in attributed, "the other one drafts for this request once the first has ended")
        assert lost.poll() == 0
        assert other.poll() is None


def metric(process: ServiceProcess, name: str, value: float | None = None) -> dict[str, float]:
    """Values of a metric by peer; with `value`, only the peers that have it."""
    with urllib.request.urlopen(f"http://{process.metrics}/metrics", timeout=100) as reply:
        text = reply.read().decode()
    found = re.findall(rf'^outrider_orchestrator_{name}{{peer="([^"]+)"}} (\S+)$', text, flags=re.MULTILINE)
    return {peer: float(number) for peer, number in found if value is None or float(number) == value}
