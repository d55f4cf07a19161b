"""What a committed token costs the verifier, with clients' devices that draft and without."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.chaos.device import DeviceCall
from benchmarks.shared.process_time import processor_s
from benchmarks.shared.services import UpServices
from outrider.client.options import Options, build_request
from outrider.v1 import generation_pb2
from outrider.v1.generation_pb2_grpc import GenerationStub
from outrider.wire.channel import open_channel


@dataclass(frozen=True, slots=True)
class Request:
    """One request of the load; the seed makes its answer the same in every run."""

    prompt: tuple[int, ...]
    tokens: int
    seed: int
    temperature: float

    def message(self, *, with_device: bool) -> generation_pb2.GenerateRequest:
        """The stream's first message."""
        options = Options(
            ids=self.prompt,
            max_tokens=self.tokens,
            seed=self.seed,
            temperature=self.temperature,
            ignore_eos=True,
            learn=False,
            speculation=with_device,
        )
        if with_device:
            options["sources"] = ["edge"]
        return build_request(None, options)


@dataclass(frozen=True, slots=True)
class Counters:
    """The verifier's counters at one time."""

    steps: float
    rows: float
    rounds: float
    cpu_s: float

    @classmethod
    def read(cls, services: UpServices) -> "Counters":
        """The counters now."""
        (pid,) = services.pids("verifier")
        steps, rows, rounds = (
            services.metric_sum("verifier", f"outrider_verifier_{name}_total")
            for name in ("steps", "rows", "rounds")
        )
        return cls(steps, rows, rounds, processor_s(pid))


@dataclass(frozen=True, slots=True)
class LoadRun:
    """One run of all requests at once."""

    ids: tuple[tuple[int, ...], ...]
    work: dict[str, float]


async def run_load(
    services: UpServices, requests: Sequence[Request], golden: Sequence[Sequence[int]] | None
) -> LoadRun:
    """Sends all requests at once.

    Args:
        golden: ids of prompt and answer by request, which the devices draft from; None: no devices.
    """
    before = await asyncio.to_thread(Counters.read, services)
    async with open_channel(services.address) as channel:
        stub: Any = GenerationStub(channel)
        whole = [None] * len(requests) if golden is None else golden
        asked = zip(requests, whole, strict=True)
        ids = await asyncio.gather(*(_answer(stub, request, draft) for request, draft in asked))
    after = await asyncio.to_thread(Counters.read, services)
    tokens = sum(map(len, ids))
    rows = after.rows - before.rows - sum(len(request.prompt) for request in requests)
    return LoadRun(
        tuple(ids),
        {
            "passes_per_token": (after.steps - before.steps) / tokens,
            "rounds_per_token": (after.rounds - before.rounds) / tokens,
            "rows_per_token": rows / tokens,
            "cpu_ms_per_token": 1000 * (after.cpu_s - before.cpu_s) / tokens,
        },
    )


async def _answer(stub: Any, request: Request, golden: Sequence[int] | None) -> tuple[int, ...]:
    """The ids of one answer."""
    message, found = request.message(with_device=golden is not None), []
    if golden is None:
        responses = stub.Generate(iter((message,)))
    else:
        responses = DeviceCall(stub.Generate(), message, golden)
    async for response in responses:
        if response.HasField("tokens"):
            found.extend(response.tokens.ids)
    return tuple(found)
