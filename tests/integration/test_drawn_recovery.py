"""Requests whose criterion judges draws outlive the processes that draw and judge: what was sent stands."""

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from outrider.client import Client
from speculative.acceptance.criterion import Promise
from tests.in_time import in_time
from tests.integration.live import until
from tests.integration.services import Services

REQUEST: dict[str, Any] = {
    "ids": [5, 9, 30],
    "max_tokens": 200,
    "ignore_eos": True,
    "criterion": {"block": {}},
    "sources": ["drafter"],
}


@pytest.fixture
def services(tiny_llama: Path, tiny_llama_b: Path) -> Iterator[Services]:
    with closing(Services(tiny_llama, tiny_llama_b)) as services:
        yield services


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_request_outlives_its_verifier_and_then_its_drafter(services: Services, temperature: float) -> None:
    verifier, drafter = services.verifier(), services.drafter()
    front = services.orchestrator([verifier], drafter=drafter)
    with Client(front.address) as client:
        until(lambda: client.models())
        request = {**REQUEST, "temperature": temperature, "seed": 3}
        with client.stream(**request) as stream:
            seen = [*next(stream).ids]
            os.kill(verifier.pid, signal.SIGKILL)
            until(lambda: verifier.poll() is not None)
            services.verifier(verifier.address)
            chunk = next(stream, None)
            in_time(chunk is not None, "the stream was over before")
            assert chunk is not None
            seen += chunk.ids
            os.kill(drafter.pid, signal.SIGKILL)
            for chunk in stream:
                seen += chunk.ids
            answer = stream.completion()
        assert len(seen) == 200
        assert list(answer.ids) == seen, "nothing that was sent is changed, repeated or skipped"
        if not temperature:
            plain = client.generate(
                ids=REQUEST["ids"], max_tokens=200, ignore_eos=True, temperature=0, speculation=False
            )
            assert answer.ids == plain.ids
        in_time(answer.usage.recoveries == 1, "the stream was over before, or lost again")
        assert answer.usage.promise is Promise.SAME_LAW
        assert not answer.usage.replay_identical
