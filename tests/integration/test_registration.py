"""Workers of which nobody told the orchestrator: they register, serve, and are replaced amid requests."""

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

from outrider.client import Client, Completion
from outrider.runtime.children import ServiceProcess, stop_all
from tests.integration.live import until

QUIET = {"OUTRIDER_VERIFIER__LOG_LEVEL": "warning", "OUTRIDER_DRAFTER__LOG_LEVEL": "warning"}
ASKED: list[dict[str, Any]] = [
    {"ids": [5, 9, 30], "temperature": 0.0},
    {"ids": [5, 9, 30, 41], "temperature": 0.8, "seed": 11, "n": 2},
    {"ids": [7], "temperature": 1.1, "seed": 3, "presence_penalty": 0.7, "repetition_penalty": 1.2},
    {"ids": [5, 9, 30, 41], "temperature": 0.8, "seed": 4, "session": "mine"},
]
LONG: dict[str, Any] = {"max_tokens": 230, "ignore_eos": True}


class Services:
    """An orchestrator that was told of nobody, and workers that know where it is."""

    def __init__(self) -> None:
        self.processes: list[ServiceProcess] = []
        self.front = self.start("orchestrator", "orchestrator", "--registry-bind", "127.0.0.1:0")

    def start(self, role: str, module: str, *flags: str) -> ServiceProcess:
        process = ServiceProcess.start(role, module, ["--bind", "127.0.0.1:0", *flags], env=QUIET)
        self.processes.append(process)
        process.wait_ready(60.0)
        return process

    def worker(self, role: str, model: Path, *flags: str) -> ServiceProcess:
        registered = ("--register-with", self.front.registry, "--model", str(model), "--threads", "1")
        return self.start(role, f"{role}_service", *registered, *flags)


@pytest.fixture
def services() -> Iterator[Services]:
    with ExitStack() as held:
        services = Services()
        held.callback(lambda: stop_all(services.processes, 5.0))
        yield services


def together(client: Client, started: threading.Barrier | None = None, **asked: Any) -> list[Completion]:
    """All requests at once; the barrier is passed when each has its first ids."""
    answers: list[Completion | BaseException] = [RuntimeError("never answered")] * len(ASKED)

    def ask(number: int) -> None:
        try:
            with client.stream(**LONG, **ASKED[number], **asked) as stream:
                next(stream)
                if started is not None:
                    started.wait(60)
                answers[number] = stream.completion()
        except BaseException as error:
            answers[number] = error

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(ASKED))]
    for thread in threads:
        thread.start()
    if started is not None:
        started.wait(60)
    for thread in threads:
        thread.join(60)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return [answer for answer in answers if isinstance(answer, Completion)]


def ids_of(answers: list[Completion]) -> list[tuple[tuple[int, ...], str]]:
    return [(choice.ids, choice.text) for answer in answers for choice in answer.choices]


def has_sources(client: Client, *names: str) -> bool:
    models = client.models()
    return bool(models) and set(names) <= set(models[0].sources)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_verifier_that_is_told_to_end_hands_its_streams_over(
    services: Services, tiny_llama: Path, tiny_llama_b: Path
) -> None:
    services.worker("drafter", tiny_llama_b)
    first = services.worker("verifier", tiny_llama, "--grace-s", "20")
    with Client(services.front.address) as client:
        until(lambda: has_sources(client, "lookup", "drafter"))
        plain = ids_of(together(client, speculation=False))
        assert ids_of(together(client)) == plain
        second = services.worker("verifier", tiny_llama)
        until(lambda: len(metric(services.front, "peer_up", 1.0)) == 3)
        barrier = threading.Barrier(len(ASKED) + 1, action=lambda: os.kill(first.pid, signal.SIGTERM))
        with_ids = [id_ for ids, _ in plain for id_ in ids]
        answers = together(client, barrier)
        assert [id_ for ids, _ in ids_of(answers) for id_ in ids] == with_ids
        assert ids_of(answers) == plain
        assert all(answer.usage.recoveries <= 1 for answer in answers)
        until(lambda: first.poll() is not None, 10)  # long before its grace is over
        assert first.poll() == 0
        until(lambda: first.address not in metric(services.front, "peer_up"))
        assert ids_of(together(client)) == plain
        assert second.poll() is None


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=lambda how: how.name)
def test_sessions_of_a_drafter_that_ends_get_another_one(
    services: Services, tiny_llama: Path, how: signal.Signals
) -> None:
    services.worker("verifier", tiny_llama)
    drafters = [services.worker("drafter", tiny_llama, "--grace-s", "5")]
    asked: dict[str, Any] = {"ids": [5, 9, 30], "temperature": 0.8, "seed": 5, "sources": ["drafter"], **LONG}
    with Client(services.front.address) as client:
        until(lambda: has_sources(client, "drafter"))
        plain = client.generate(**{**asked, "sources": [], "speculation": False})
        drafters.append(services.worker("drafter", tiny_llama))
        until(lambda: len(metric(services.front, "peer_up", 1.0)) == 3)
        with client.stream(**asked) as stream:
            next(stream)
            (had,) = metric(services.front, "peer_sessions", 1.0).keys() & {one.address for one in drafters}
            lost = next(one for one in drafters if one.address == had)
            os.kill(lost.pid, how)
            completion = stream.completion()
        assert completion.ids == plain.ids
        until(lambda: not metric(services.front, "peer_up").get(had))
        again = client.generate(**asked)
        assert again.ids == plain.ids
        assert again.usage.accepted_by_source.get("drafter"), "the other one drafts"


def metric(process: ServiceProcess, name: str, value: float | None = None) -> dict[str, float]:
    """Of each peer, or of those that have this value."""
    with urllib.request.urlopen(f"http://{process.metrics}/metrics", timeout=10) as reply:
        text = reply.read().decode()
    found = re.findall(rf'^outrider_orchestrator_{name}{{peer="([^"]+)"}} (\S+)$', text, flags=re.MULTILINE)
    return {peer: float(number) for peer, number in found if value is None or float(number) == value}
