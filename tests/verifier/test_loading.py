"""A worker that is still loading says so, and shows that it lives."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from harness import Client
from ngram_lm import NgramLM

from outrider.lm.autotune.threads import ThreadBounds
from outrider.lm.parallel.rank_group import RankInfo
from outrider.runtime.metrics import Metrics
from outrider.runtime.threads import most_helped_threads, most_threads
from outrider.v1 import verifier_pb2
from outrider.v1.verifier_pb2_grpc import VerifierStub
from outrider.wire.channel import open_channel, server_options
from speculative.errors import InvalidRequest, ModelRefused
from verifier_service.engine.step_cost import StepCostModel
from verifier_service.loading import description_of, thread_bounds
from verifier_service.parallel import settings_of_rank
from verifier_service.server import VerifierServer
from verifier_service.sessions.request import ServedModel
from verifier_service.settings import VerifierSettings


async def test_beats_go_out_while_the_model_loads_and_nothing_is_opened() -> None:
    loaded = threading.Event()

    def load() -> Any:
        loaded.wait(60)
        return NgramLM()

    server = grpc.aio.server(options=server_options())
    port = server.add_insecure_port("127.0.0.1:0")
    service = VerifierServer(
        VerifierSettings(model="unused", passes="eager"), load, Metrics("verifier"), print
    )
    service.register(server)
    await server.start()
    starting = asyncio.create_task(service.start())
    async with open_channel(f"127.0.0.1:{port}") as channel:
        client = Client(VerifierStub(channel), "ngram")
        call = client.stub.Watch()
        for _ in range(3):
            assert (await call.read()).beat == verifier_pb2.Beat()
        with pytest.raises(grpc.aio.AioRpcError, match="still loading"):
            await client.open(client.request([1, 2]))
        with pytest.raises(grpc.aio.AioRpcError, match="still loading"):
            await client.stub.Describe(verifier_pb2.VerifierDescribeRequest())
        loaded.set()
        await starting
        assert len((await client.generate([1, 2], new=5)).ids) == 5
    await service.stop(0.0)
    await server.stop(0.0)


def test_a_measurement_chooses_threads_unless_a_number_is_given() -> None:
    def asked(**given: Any) -> int | ThreadBounds:
        return thread_bounds(VerifierSettings(model="unused", **given))

    assert asked() == ThreadBounds(most_threads(), most_helped_threads())
    assert asked(deterministic=True) == ThreadBounds(1, most_helped_threads())
    assert asked(threads=3) == 3


class _NoPool(ThreadPoolExecutor):
    """An executor for threads that stay, which a load must not use."""

    def submit(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"{args[0]} was about to run in a thread that stays")


def test_a_rank_of_torchrun_keeps_its_threads_and_refuses_what_ranks_do_not_serve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("verifier_service.loading.most_threads", lambda: 6)
    rank = RankInfo(0, 2, 0)
    found = settings_of_rank(VerifierSettings(model="m", heads="a,b=c"), rank)
    assert (found.ranks, found.threads, found.heads) == (2, 6, ("a", "b=c"))
    assert settings_of_rank(VerifierSettings(model="m", ranks=2), rank).threads == 3
    with pytest.raises(InvalidRequest, match=r"^weight_dtype = int8 beside ranks = 2: .* rank alone"):
        settings_of_rank(VerifierSettings(model="m", weight_dtype="int8"), rank)


async def test_no_thread_that_loads_stays_with_compute_threads_of_its_own() -> None:
    """Compute threads spin at barriers only while the engine's thread alone has some."""
    loop = asyncio.get_running_loop()
    loop.set_default_executor(_NoPool(1))
    threads: list[threading.Thread] = []

    def load() -> Any:
        threads.append(threading.current_thread())
        return NgramLM()

    def measure(target: Any) -> StepCostModel:
        threads.append(threading.current_thread())
        return StepCostModel()

    settings = VerifierSettings(model="unused", passes="eager")
    service = VerifierServer(settings, load, Metrics("verifier"), print, measure=measure)
    try:
        await service.start()
        assert len(threads) == 2
        for thread in threads:
            thread.join(20.0)
            assert not thread.is_alive()
    finally:
        loop.set_default_executor(ThreadPoolExecutor(1))
        await service.stop(0.0)


class _Compiling(NgramLM):
    """A target that compiles its passes until it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.compiles = threading.Event()
        self.closed = threading.Event()

    def compile_passes(self, passes: str, cache_dir: Path | None) -> None:
        self.compiles.set()
        assert self.closed.wait(100)

    def close(self) -> None:
        self.closed.set()


async def test_a_stop_while_passes_compile_closes_the_target() -> None:
    target: Any = _Compiling()
    settings = VerifierSettings(model="unused", passes="compiled")
    service = VerifierServer(settings, lambda: target, Metrics("verifier"), print)
    starting = asyncio.create_task(service.start())
    assert await asyncio.to_thread(target.compiles.wait, 30)
    starting.cancel()
    await service.stop(0.0)
    assert target.closed.is_set()
    await asyncio.gather(starting, return_exceptions=True)


async def test_slots_for_less_than_one_session_are_refused() -> None:
    target: Any = NgramLM(slots=128)
    service = VerifierServer(
        VerifierSettings(model="unused", kv_mb=1, passes="eager"), lambda: target, Metrics("verifier"), print
    )
    with pytest.raises(ModelRefused, match="kv_mb = 1 gives 128 KV slots, too few"):
        await service.start()
    await service.stop(0.0)


async def test_a_message_limit_below_the_largest_open_of_the_context_is_refused() -> None:
    target: Any = NgramLM(slots=2**21 + 4096, max_length=2**20)
    service = VerifierServer(
        VerifierSettings(model="unused", max_message_mb=1, passes="eager"),
        lambda: target,
        Metrics("verifier"),
        print,
    )
    told = r"max_message_mb = 1 is too small for a context of 1048576 tokens; give 3 or more"
    with pytest.raises(ModelRefused, match=told):
        await service.start()
    await service.stop(0.0)


def test_the_generation_config_is_described_without_what_no_request_could_have() -> None:
    target: Any = NgramLM()
    target.sampling_defaults = {"temperature": 0.6, "top_k": 20, "top_p": 7.0, "min_p": "x"}
    served = ServedModel(target.name, target.vocabulary_size, 64, 16)
    sampling = description_of(VerifierSettings(model="unused"), target, served, "", "", 1).sampling_defaults
    assert (sampling.temperature, sampling.top_k) == (0.6, 20)
    assert len(sampling.ListFields()) == 2
