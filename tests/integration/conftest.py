"""One `outrider up` with tiny models and three processes for all tests of this folder."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.client import Client, Completion
from tests.integration.live import REQUEST, Up, start_up


@pytest.fixture(scope="session")
def up(tiny_llama: Path, tiny_llama_b: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    log = tmp_path_factory.mktemp("up") / "stderr"
    stack = start_up("--target", str(tiny_llama), "--drafter", str(tiny_llama_b), log=log)
    try:
        stack.wait_ready()
        yield stack
    finally:
        began = time.monotonic()
        status = _stop_amid_a_request(stack)
    assert status == 0, stack.log()
    assert time.monotonic() - began < 60


def _stop_amid_a_request(stack: Up) -> int:
    with Client(stack.address) as client, client.stream(ids=[5], max_tokens=255, nodes=0) as stream:
        next(stream, None)
        return stack.stop()


@pytest.fixture(scope="session")
def client(up: Up) -> Iterator[Client]:
    with Client(up.address) as client:
        yield client


@pytest.fixture(scope="session")
def plain_answer(client: Client) -> Completion:
    """The plain answer to `REQUEST`, with which tests compare later answers."""
    return client.generate(**REQUEST, speculation=False)


@pytest.fixture
def unmoved(client: Client, plain_answer: Completion) -> Iterator[None]:
    """Checks after the test that `REQUEST` still gives its plain answer."""
    yield
    again = client.generate(**REQUEST)
    assert again.ids == plain_answer.ids
    assert again.text == plain_answer.text


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Restores the interpreter's switch interval, which a verifier sets for the process of the tests."""
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)
