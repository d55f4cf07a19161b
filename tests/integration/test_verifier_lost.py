"""Real verifiers are killed, frozen or stopped amid requests: clients get the same tokens as without."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from outrider.client import Client, Completion
from tests.in_time import in_time
from tests.integration.live import sample, until
from tests.integration.services import Services
from tests.integration.together import ASKED, ids_of, together


@pytest.fixture
def services(tiny_llama: Path, tiny_llama_b: Path) -> Iterator[Services]:
    with closing(Services(tiny_llama, tiny_llama_b)) as services:
        yield services


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM], ids=lambda how: how.name)
def test_streams_go_on_token_for_token(services: Services, how: signal.Signals) -> None:
    first, second = services.verifier(), services.verifier()
    with Client(services.orchestrator([first, second], drafter=services.drafter()).address) as client:
        until(lambda: client.models())
        whole = ids_of(together(client))
        both = threading.Barrier(len(ASKED) + 1, action=lambda: os.kill(first.pid, how))
        answers = together(client, both)
        assert ids_of(answers) == whole
        recoveries = sum(answer.usage.recoveries for answer in answers)
        in_time(recoveries > 0 or how is signal.SIGTERM, "the streams were over before")
        assert all(answer.usage.completion_tokens == 200 * len(answer.choices) for answer in answers)
        logprobs = answers[3].logprobs
        assert [one.id for one in logprobs] == list(answers[3].ids)


@pytest.mark.slow
def test_the_only_verifier_is_killed_and_started_anew_at_its_address(services: Services) -> None:
    verifier = services.verifier()
    front = services.orchestrator([verifier], drafter=services.drafter())
    with Client(front.address) as client:
        until(lambda: client.models())
        whole = ids_of(together(client))
        barrier = threading.Barrier(len(ASKED) + 1, action=lambda: os.kill(verifier.pid, signal.SIGKILL))
        asking: list[list[Completion]] = []
        thread = threading.Thread(target=lambda: asking.append(together(client, barrier)))
        thread.start()
        until(lambda: verifier.poll() is not None)
        services.verifier(verifier.address)
        thread.join(60)
        assert ids_of(asking[0]) == whole


@pytest.mark.slow
def test_what_a_verifier_that_wakes_has_still_to_say_meets_nobody(services: Services) -> None:
    first, second = services.verifier(), services.verifier()
    front = services.orchestrator([first, second], drafter=services.drafter())

    def wake_when_given_up() -> None:
        up = "outrider_orchestrator_peer_up"
        until(lambda: not sample(front.metrics, up, peer=first.address))
        os.kill(first.pid, signal.SIGCONT)
        until(lambda: sample(front.metrics, up, peer=first.address))

    with Client(front.address) as client:
        until(lambda: client.models())
        whole = ids_of(together(client))
        both = threading.Barrier(len(ASKED) + 1, action=lambda: os.kill(first.pid, signal.SIGSTOP))
        waking = threading.Thread(target=wake_when_given_up)
        waking.start()
        answers = together(client, both)
        waking.join(60)
        assert ids_of(answers) == whole
        in_time(sum(answer.usage.recoveries for answer in answers) > 0, "the streams were over before")
        assert ids_of(together(client)) == whole, "and it serves again"
        until(lambda: not sample(first.metrics, "outrider_num_requests_running"))
