"""Two different drafters on one session, each shared by two verifiers, through separate processes."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from outrider.cli.local.up_settings import embedded
from outrider.client import Client
from tests.in_time import in_time
from tests.integration.live import sample, until
from tests.integration.services import Services

PROMPT = "def add(left, right):\n    return left + right\n\n\ndef subtract("
WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "max_tokens": 64},
    {"temperature": 0.8, "seed": 3, "max_tokens": 64},
)


@pytest.fixture
def services() -> Iterator[Services]:
    started = Services(embedded("target"), embedded("drafter"))
    yield started
    started.close()


@pytest.mark.slow
def test_two_drafters_and_two_verifiers_give_the_ids_of_plain_decoding_and_one_drafter_may_die(
    services: Services,
) -> None:
    verifiers = [services.verifier() for _ in range(2)]
    small = services.drafter()
    early = services.drafter("--model", str(embedded("target")), "--exit-layer", "3", "--name", "early")
    front = services.orchestrator(verifiers, "--drafter", f"{small.address},{early.address}")

    def follows(drafter: Any) -> float:
        return sample(drafter.metrics, "outrider_drafter_passes_total")

    with Client(front.address) as client:
        until(lambda: any({"drafter", "early"} <= set(model.sources) for model in client.models()))
        plain = [client.generate(PROMPT, **way, speculation=False).ids for way in WAYS]
        # Requests of one prompt go where its prefix is cached, so each request has a prompt of its own.
        prompts = [f"# {number}\n{PROMPT}" for number in range(6)]
        for way in WAYS:
            alone = [client.generate(prompt, **way, speculation=False).ids for prompt in prompts]
            with ThreadPoolExecutor(len(prompts)) as pool:
                asked = [pool.submit(client.generate, prompt, **way) for prompt in prompts]
            assert [one.result().ids for one in asked] == alone, way
        until(lambda: min(follows(small), follows(early)) > 0)
        for verifier in verifiers:
            rounds = sample(verifier.metrics, "outrider_verifier_rounds_total")
            in_time(rounds > 0, "of sessions at once some go to each")
        stream = client.stream(PROMPT, **WAYS[1])
        next(stream)
        os.kill(early.pid, signal.SIGKILL)
        assert stream.completion().ids == plain[1]
        in_time(stream.completion().usage.recoveries == 0, "a verifier was taken for dead")
