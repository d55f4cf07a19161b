"""The verifier as a process of its own, with sources in others."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_source import FakeSource, Garbage, Oracle, running
from harness import Client

from outrider.runtime.children import ServiceFailed, ServiceProcess, stop_all
from outrider.v1.verifier_pb2_grpc import VerifierStub
from outrider.wire.channel import open_channel
from speculative.params import SamplingParams
from tests.in_time import PATIENCE_MS

SUPPORT = Path(__file__).parent / "support"
PROMPT = (5, 17, 40)
# The end-of-sequence id is kept away, so that requests are as long as they are asked to be.
ENDLESS = ((1, -100.0),)
GREEDY = SamplingParams(temperature=0.0, logit_bias=ENDLESS)
SAMPLED = SamplingParams(temperature=0.8, top_k=30, top_p=0.95, repetition_penalty=1.1, logit_bias=ENDLESS)


def start(model: Path | str, log_path: Path) -> ServiceProcess:
    return ServiceProcess.start(
        "verifier",
        "verifier_service",
        ["--model", str(model), "--threads", "1", "--passes", "eager"],
        log_path=log_path,
    )


@pytest.fixture(scope="module")
def children(
    tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ServiceProcess, ServiceProcess]]:
    """A verifier, and one whose model is not there; both import their libraries at the same time."""
    logs = tmp_path_factory.mktemp("verifier")
    pair = (start(tiny_llama, logs / "log"), start(logs / "nothing", logs / "other-log"))
    yield pair
    stop_all(pair, 10)


@pytest.fixture(scope="module")
def process(children: tuple[ServiceProcess, ServiceProcess]) -> ServiceProcess:
    children[0].wait_ready(250)
    return children[0]


@pytest.fixture
def frozen_source() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(
        [sys.executable, str(SUPPORT / "source_process.py")],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with child:
        yield child
        child.kill()


def client(process: ServiceProcess) -> Any:
    return open_channel(process.address, patience_ms=PATIENCE_MS)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_ids_are_equal_across_processes(process: ServiceProcess, params: SamplingParams) -> None:
    async with client(process) as channel:
        verifier = Client(VerifierStub(channel), "tiny")
        plain = await verifier.generate(PROMPT, new=60, params=params)
        assert plain.usage.rounds == 60
        for behaviour in (Oracle({PROMPT: plain.ids}), Garbage()):
            async with running(FakeSource(behaviour)) as source:
                sources = [("drafter", source.address), ("lookup", "")]
                drafted = 0
                # So small a target may be done before a busy machine has dialled the source.
                for _ in range(100):
                    answer = await verifier.generate(PROMPT, new=60, params=params, sources=sources)
                    assert answer.ids == plain.ids
                    if drafted := answer.usage.drafted_by_source["drafter"]:
                        break
            assert drafted > 0


async def test_a_source_that_is_frozen_holds_nobody_up(
    process: ServiceProcess, frozen_source: subprocess.Popen[bytes]
) -> None:
    assert frozen_source.stdout is not None
    address = (await asyncio.to_thread(frozen_source.stdout.readline)).decode().strip()
    async with client(process) as channel:
        verifier = Client(VerifierStub(channel), "tiny")
        plain = await verifier.generate(PROMPT, new=200, params=GREEDY)
        asked: dict[str, Any] = {"new": 200, "params": GREEDY}
        request = verifier.request(PROMPT, **asked, sources=[("drafter", address)])
        await verifier.open(request)
        frozen_source.send_signal(signal.SIGSTOP)
        async with running(FakeSource(Oracle({PROMPT: plain.ids}))) as other:
            beside = verifier.generate(PROMPT, **asked, sources=[("other", other.address)])
            answers = await asyncio.gather(verifier.read(request), beside)
        assert [answer.ids for answer in answers] == [plain.ids, plain.ids]


async def test_a_client_that_goes_away_harms_nobody(process: ServiceProcess) -> None:
    async with client(process) as channel:
        verifier = Client(VerifierStub(channel), "tiny")
        request = verifier.request(PROMPT, new=200, params=GREEDY)
        await verifier.open(request)
        reading = asyncio.create_task(verifier.read(request))
        await asyncio.sleep(0.05)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    async with client(process) as channel:
        again = Client(VerifierStub(channel), "tiny")
        assert len((await again.generate(PROMPT, new=20, params=GREEDY)).ids) == 20


def test_a_model_that_is_not_there_is_an_error_and_exit_status_1(
    children: tuple[ServiceProcess, ServiceProcess],
) -> None:
    child = children[1]
    with pytest.raises(ServiceFailed, match="no model folder"):
        child.wait_ready(250)
    deadline = time.monotonic() + 100
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert child.stop(10) == 1
