"""docs/request.md, replayed: a traced request reaches the functions that it names, in its order."""

import asyncio
import re
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import grpc.aio
import pytest

from drafter_service.service import build as build_drafter
from drafter_service.settings import DrafterSettings
from orchestrator.service import build as build_orchestrator
from orchestrator.settings import OrchestratorSettings
from outrider.cli.asking.generate import run_generate
from outrider.client import AsyncClient
from outrider.client.options import Options
from outrider.runtime.metrics import Metrics
from outrider.runtime.serve import ServiceContext
from outrider.wire.channel import server_options
from speculative.sampling_kernel import use_kernel
from tests.in_time import in_time
from verifier_service.service import build as build_verifier
from verifier_service.settings import VerifierSettings

ROOT = Path(__file__).resolve().parents[2]
STEP = re.compile(r"^\d+\. `([^`]+)` `([^`]+)`", re.MULTILINE)
DECISION = re.compile(r"^\| [^|]+ \| `([^`]+)` `([^`]+)`(?:, `([^`]+)`)? \|$", re.MULTILINE)

Step = tuple[str, str]


def documented() -> dict[str, list[Step]]:
    """The documented steps, by heading."""
    sections = re.split(r"^## ", (ROOT / "docs/request.md").read_text(), flags=re.MULTILINE)[1:]
    return {section.partition("\n")[0]: steps for section in sections if (steps := STEP.findall(section))}


def decisions() -> list[Step]:
    """Functions in the table of decisions."""
    rows = DECISION.findall((ROOT / "docs/request.md").read_text())
    return [(path, name) for path, *names in rows for name in names if name]


class Trace:
    """Which of these functions were entered, in order, by any thread that began while it was on."""

    def __init__(self, steps: set[Step]) -> None:
        self.reached: list[Step] = []
        self.on = False
        self._steps = steps
        self._known: dict[CodeType, Step | None] = {}

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if not self.on or event != "call":
            return
        code = frame.f_code
        if code not in self._known:
            path = Path(code.co_filename)
            step = (str(path.relative_to(ROOT)), code.co_qualname) if path.is_relative_to(ROOT) else None
            self._known[code] = step if step in self._steps else None
        if (found := self._known[code]) is not None:
            self.reached.append(found)


@contextmanager
def tracing(trace: Trace) -> Iterator[None]:
    before = sys.getprofile()
    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        yield
    finally:
        sys.setprofile(before)
        threading.setprofile(before)


@asynccontextmanager
async def running(build: Any, settings: Any) -> AsyncIterator[str]:
    """One service inside this process, on a port of its own."""
    server = grpc.aio.server(options=server_options())
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    service = await build(ServiceContext(settings, address, Metrics(settings.role), fail=lambda error: None))
    service.register(server)
    await server.start()
    try:
        await service.start()
        yield address
    finally:
        await service.stop(0.0)
        await server.stop(0)


async def joined(address: str) -> None:
    """Waits until the orchestrator has found the workers."""
    async with AsyncClient(address) as client, asyncio.timeout(60):
        while True:
            if any("drafter" in model.sources for model in await client.models()):
                return
            await asyncio.sleep(0.02)


@pytest.fixture
def numpy_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No kernel chooses tokens, so that the functions that decide without a kernel are reached, too."""
    monkeypatch.setattr("outrider.lm.compiled.kernel_builder.use_row_kernel", lambda *args, **named: None)
    monkeypatch.setattr("outrider.lm.compiled.kernel_builder.current_kernel", lambda: True)
    used = use_kernel(None)
    yield
    use_kernel(used)


@pytest.mark.usefixtures("quick_switches", "numpy_alone")
async def test_a_request_goes_the_way_that_the_documentation_describes(
    tiny_llama: Path, tiny_llama_b: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sections = documented()
    assert list(sections) == ["To the verifier", "In the engine", "Back to the client", "Drafts"]
    trace = Trace({step for steps in sections.values() for step in steps})
    options = Options(max_tokens=180, temperature=0.9, seed=8, logit_bias={1: -100.0})
    with tracing(trace):
        async with AsyncExitStack() as stack:
            target = VerifierSettings(model=str(tiny_llama), threads=1, passes="eager")
            verifier = await stack.enter_async_context(running(build_verifier, target))
            small = DrafterSettings(model=str(tiny_llama_b), threads=1, passes="eager")
            drafter = await stack.enter_async_context(running(build_drafter, small))
            front = OrchestratorSettings(verifier=(verifier,), drafter=(drafter,))
            address = await stack.enter_async_context(running(build_orchestrator, front))
            await joined(address)
            trace.on = True
            await asyncio.to_thread(run_generate, address, "import os\n", options, as_json=True)
            trace.on = False
    assert '"finish_reason": "length"' in capsys.readouterr().out
    for heading, steps in sections.items():
        rest = iter(trace.reached)
        missed = next((step for step in steps if step not in rest), None)
        # Drafts that come in time belong to the way; without any, their steps are missing.
        in_time(missed is None, f"{heading}: {missed} was not reached after the steps before it")


def test_every_file_of_the_way_is_there() -> None:
    steps = [step for steps in documented().values() for step in steps]
    assert len(steps) > 40
    assert not [path for path, _ in steps if not (ROOT / path).is_file()]


def test_every_decision_is_taken_on_the_way() -> None:
    steps = {step for steps in documented().values() for step in steps}
    assert len(decisions()) > 12
    assert not set(decisions()) - steps
