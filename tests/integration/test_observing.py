"""One request through real services, as its trace, its metrics and its explanation report it."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from drafter_service.service import build as build_drafter
from drafter_service.settings import DrafterSettings
from orchestrator.service import build as build_orchestrator
from orchestrator.settings import OrchestratorSettings
from outrider.client import AsyncClient, Client
from outrider.runtime.metrics import Metrics
from outrider.runtime.serve import ServiceContext
from outrider.runtime.tracing import Tracing
from outrider.wire.channel import server_options
from tests.integration.live import ROOT, Up
from verifier_service.service import build as build_verifier
from verifier_service.settings import VerifierSettings


@asynccontextmanager
async def running(build: Any, settings: Any, tracing: Tracing) -> AsyncIterator[str]:
    """One service inside this process, on a port of its own."""
    server = grpc.aio.server(options=server_options())
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    metrics = Metrics(settings.role)
    service = await build(ServiceContext(settings, address, metrics, lambda error: None, tracing=tracing))
    service.register(server)
    await server.start()
    try:
        await service.start()
        yield address
    finally:
        await service.stop(0.0)
        await server.stop(0)


async def until(happened: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while True:
            if await happened():
                return
            await asyncio.sleep(0.02)


@pytest.mark.usefixtures("quick_switches")
async def test_a_request_is_one_trace_through_three_services(tiny_llama: Path, tiny_llama_b: Path) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from outrider.runtime.tracing import traced

    spans = InMemorySpanExporter()
    tracing = traced("all", SimpleSpanProcessor(spans), 1.0)
    async with AsyncExitStack() as stack:
        target = VerifierSettings(model=str(tiny_llama), threads=1, passes="eager")
        verifier = await stack.enter_async_context(running(build_verifier, target, tracing))
        small = DrafterSettings(model=str(tiny_llama_b), threads=1, passes="eager")
        drafter = await stack.enter_async_context(running(build_drafter, small, tracing))
        front = OrchestratorSettings(verifier=(verifier,), drafter=(drafter,))
        address = await stack.enter_async_context(running(build_orchestrator, front, tracing))
        async with AsyncClient(address) as client:

            async def joined() -> bool:
                return any("drafter" in model.sources for model in await client.models())

            async def reported() -> bool:
                return len({span.name for span in spans.get_finished_spans()}) == 4

            await until(joined)
            completion = await client.generate(ids=[5, 9, 30, 41], max_tokens=60, temperature=0.8, seed=3)
            await until(reported)
    found: dict[str, list[Any]] = {}
    for span in spans.get_finished_spans():
        found.setdefault(span.name, []).append(span)
    (request,), (decode,), (follow,) = (found[f"outrider.{name}"] for name in ("request", "decode", "follow"))
    assert len({span.context.trace_id for spans in found.values() for span in spans}) == 1
    assert request.parent is None
    assert decode.parent.span_id == request.context.span_id
    assert follow.parent.span_id == decode.context.span_id
    assert len(found["outrider.round"]) == completion.usage.rounds
    assert {span.parent.span_id for span in found["outrider.round"]} == {decode.context.span_id}
    assert request.start_time <= decode.start_time <= decode.end_time


OUTRIDER = (sys.executable, "-W", "error", "-m", "outrider.cli")


def ran(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [*OUTRIDER, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def test_top_tells_what_all_processes_of_up_do(up: Up, client: Client, tmp_path: Path) -> None:
    client.generate(ids=[5, 9, 30, 41], max_tokens=24, temperature=0.0)
    file = tmp_path / "up.json"
    file.write_text(json.dumps({"address": up.address, "processes": up.processes}))
    view = ran("top", str(file), "--once", "--json", "--interval", "0.2")
    roles = {process["role"]: process for process in view["processes"]}
    assert set(roles) == {process["role"] for process in up.processes}
    assert roles["orchestrator"]["store"] == "up"
    assert roles["orchestrator"]["peers_up"] == len(up.processes) - 1
    assert 0.0 <= roles["verifier"]["kv"] <= 1.0


def test_explain_adds_up_to_what_the_request_cost(up: Up, client: Client) -> None:
    done = client.generate(ids=[5, 9, 30, 41], max_tokens=60, temperature=0.8, seed=9, session="explained")
    explanation = ran("explain", "explained", "--address", up.address, "--tree", "--json")
    (one,) = explanation["incarnations"]
    assert sum(found["committed"] for found in one["rounds"]) == len(done.ids)
    assert len(one["rounds"]) == done.usage.rounds
    accepted = sum(count for found in one["rounds"] for count in found["accepted"].values())
    assert accepted == sum(done.usage.accepted_by_source.values())
    assert one["finished"] == done.finish_reason
    assert len(one["rounds"]) <= 64
    assert [token["id"] for found in one["rounds"] for token in found["tokens"]] == list(done.ids)
    assert "".join(token["text"] for found in one["rounds"] for token in found["tokens"]) == done.text
    assert [len(found["nodes"]) for found in one["rounds"]] == [found["admitted"] for found in one["rounds"]]
    refused = subprocess.run(
        [*OUTRIDER, "explain", "explained", "--address", up.address, "--tenant", "them", "--json"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=200,
        check=False,
    )
    assert refused.returncode == 1
    assert json.loads(refused.stdout)["error"]["code"] == "NOT_FOUND"
