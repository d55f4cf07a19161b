"""Real verifiers are killed, frozen or told to stop amid requests: clients get what they would have got."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from outrider.client import Client, Completion
from outrider.runtime.children import ServiceProcess, stop_all
from tests.integration.live import until

QUIET = {"OUTRIDER_VERIFIER__LOG_LEVEL": "warning"}
ASKED: list[dict[str, Any]] = [
    {"ids": [5, 9, 30], "temperature": 0.0},
    {"ids": [5, 9, 30, 41], "temperature": 0.8, "seed": 11, "n": 2},
    {"ids": [7], "temperature": 1.1, "seed": 3, "presence_penalty": 0.7, "repetition_penalty": 1.2},
    {"ids": [8, 8], "temperature": 0.8, "seed": 4, "speculation": False, "logprobs": True},
]
LONG: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True}


class Services:
    """Verifiers and an orchestrator, each a process."""

    def __init__(self, model: Path, drafter: Path) -> None:
        self.model = model
        self.processes: list[ServiceProcess] = []
        self.drafter = self.start("drafter", "drafter_service", "--model", str(drafter), "--threads", "1")

    def start(self, role: str, module: str, *flags: str) -> ServiceProcess:
        process = ServiceProcess.start(role, module, ["--bind", "127.0.0.1:0", *flags], env=QUIET)
        self.processes.append(process)
        process.wait_ready(60.0)
        return process

    def verifier(self) -> ServiceProcess:
        return self.start("verifier", "verifier_service", "--model", str(self.model), "--threads", "1")

    def orchestrator(self, *verifiers: ServiceProcess) -> ServiceProcess:
        addresses = ",".join(verifier.address for verifier in verifiers)
        return self.start(
            "orchestrator", "orchestrator", "--verifier", addresses, "--drafter", self.drafter.address
        )


@pytest.fixture
def services(tiny_llama: Path, tiny_llama_b: Path) -> Iterator[Services]:
    with ExitStack() as held:
        services = Services(tiny_llama, tiny_llama_b)
        held.callback(lambda: stop_all(services.processes, 5.0))
        yield services


def together(client: Client, started: threading.Barrier | None = None) -> list[Completion]:
    """All requests at once; the barrier is passed when each has its first ids."""
    answers: list[Completion | BaseException] = [RuntimeError("never answered")] * len(ASKED)

    def ask(number: int) -> None:
        try:
            with client.stream(**LONG, **ASKED[number]) as stream:
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


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM], ids=lambda how: how.name)
def test_streams_go_on_token_for_token(services: Services, how: signal.Signals) -> None:
    first, second = services.verifier(), services.verifier()
    with Client(services.orchestrator(first, second).address) as client:
        until(lambda: client.models())
        whole = ids_of(together(client))
        both = threading.Barrier(len(ASKED) + 1, action=lambda: os.kill(first.pid, how))
        answers = together(client, both)
        assert ids_of(answers) == whole
        assert sum(answer.usage.recoveries for answer in answers) > 0 or how is signal.SIGTERM
        assert all(answer.usage.completion_tokens == 200 * len(answer.choices) for answer in answers)
        logprobs = answers[3].logprobs
        assert [told.id for told in logprobs] == list(answers[3].ids)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_only_verifier_is_killed_and_started_anew_at_its_address(services: Services) -> None:
    verifier = services.verifier()
    front = services.orchestrator(verifier)
    with Client(front.address) as client:
        until(lambda: client.models())
        whole = ids_of(together(client))
        barrier = threading.Barrier(len(ASKED) + 1, action=lambda: os.kill(verifier.pid, signal.SIGKILL))
        asking: list[list[Completion]] = []
        thread = threading.Thread(target=lambda: asking.append(together(client, barrier)))
        thread.start()
        until(lambda: verifier.poll() is not None)
        command = ["--bind", verifier.address, "--model", str(services.model), "--threads", "1"]
        anew = ServiceProcess.start("verifier", "verifier_service", command, env=QUIET)
        services.processes.append(anew)
        anew.wait_ready(60.0)
        thread.join(60)
        assert ids_of(asking[0]) == whole
