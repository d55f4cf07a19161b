"""A verifier on a real socket in this process, and what a client of it does."""

import asyncio
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from outrider.runtime.metrics import Metrics
from outrider.runtime.tracing import Tracing
from outrider.v1 import common_pb2, verifier_pb2
from outrider.v1.verifier_pb2_grpc import VerifierStub
from outrider.wire.channel import open_channel, server_options
from outrider.wire.codec import sampling_to_wire
from speculative.params import SamplingParams
from tests.in_time import in_time
from verifier_service.engine.step_cost import StepCostModel
from verifier_service.remote_sources.stream import LinkLimits
from verifier_service.server import VerifierServer
from verifier_service.settings import VerifierSettings

GREEDY = SamplingParams(temperature=0.0)
QUICK = LinkLimits(dial_s=1.0, write_s=0.5, redial_first_s=0.02, redial_most_s=0.1, mute_first_s=0.2)


@dataclass
class Answer:
    """A whole request as its reader saw it."""

    ids: list[int] = field(default_factory=list)
    token_sources: bytes = b""
    finished: int = common_pb2.FINISH_REASON_UNSPECIFIED
    usage: common_pb2.Usage = field(default_factory=common_pb2.Usage)
    message: str = ""
    code: int = 0
    logprobs: list[common_pb2.TokenLogprob] = field(default_factory=list)

    def take(self, committed: verifier_pb2.Committed, expected_position: int) -> None:
        assert committed.position == expected_position or committed.code, "no gap and no repeat"
        self.ids.extend(committed.ids)
        self.token_sources += committed.token_sources
        self.logprobs.extend(committed.logprobs)
        self.finished = committed.finished
        self.message, self.code = committed.message, committed.code
        self.usage.CopyFrom(committed.usage)


@dataclass
class Client:
    """Opens sessions and reads them."""

    stub: Any
    model: str

    def request(
        self,
        ids: Sequence[int],
        *,
        new: int = 24,
        params: SamplingParams = GREEDY,
        seed: int = 7,
        sources: Sequence[tuple[str, str]] = (),
        session: str = "",
        epoch: int = 1 << 20,
        **others: Any,
    ) -> verifier_pb2.OpenRequest:
        fields: dict[str, Any] = {
            "key": common_pb2.SessionKey(session=session or secrets.token_hex(8)),
            "epoch": epoch,
            "model": self.model,
            "ids": ids,
            "prompt_length": len(ids),
            "limit": len(ids) + new,
            "sampling": sampling_to_wire(params),
            "seed": seed,
            "speculate": bool(sources),
            "sources": [verifier_pb2.Source(name=name, address=address) for name, address in sources],
        }
        return verifier_pb2.OpenRequest(**fields | others)

    async def open(self, request: verifier_pb2.OpenRequest) -> verifier_pb2.OpenResponse:
        answer: verifier_pb2.OpenResponse = await self.stub.Open(request, timeout=100)
        return answer

    async def read(
        self, request: verifier_pb2.OpenRequest, position: int | None = None, into: Answer | None = None
    ) -> Answer:
        """What the session's reader gets, to its end; meanwhile it is in `into`."""
        start = len(request.ids) if position is None else position
        cursor = verifier_pb2.Cursor(alias=3, key=request.key, epoch=request.epoch, position=start)
        answer = Answer() if into is None else into
        call = self.stub.Watch()
        try:
            await call.write(verifier_pb2.WatchRequest(add=[cursor]))
            async with asyncio.timeout(60):
                async for response in call:
                    for committed in response.committed:
                        answer.take(committed, start + len(answer.ids))
                    if answer.finished:
                        break
        finally:
            call.cancel()  # gRPC does not, where this task is cancelled before the call is up
        return answer

    async def generate(self, ids: Sequence[int], **asked: Any) -> Answer:
        request = self.request(ids, **asked)
        await self.open(request)
        return await self.read(request)

    async def cancel(self, request: verifier_pb2.OpenRequest) -> bool:
        message = verifier_pb2.VerifierCancelRequest(key=request.key, epoch=request.epoch)
        answer: verifier_pb2.VerifierCancelResponse = await self.stub.Cancel(message, timeout=100)
        return answer.found


@dataclass
class Verifier(Client):
    """The same with what only a test in the server's own process sees."""

    target: Any = None
    metrics: Metrics = field(default_factory=lambda: Metrics("verifier"))
    failures: list[BaseException] = field(default_factory=list)
    server: Any = None
    address: str = ""

    def metric(self, name: str, **labels: str) -> float:
        """Of the verifier's own, or of those that all servers have, summed over what labels leave open."""
        names = (f"outrider_verifier_{name}", f"outrider_{name}")
        return sum(
            sample.value
            for family in self.metrics.registry.collect()
            for sample in family.samples
            if sample.name in names and labels.items() <= sample.labels.items()
        )

    def nodes(self, source: str, outcome: str) -> float:
        if outcome == "admitted":
            return self.metric("spec_decode_num_draft_tokens_total", source=source)
        if outcome == "accepted":
            return self.metric("spec_decode_num_accepted_tokens_total", source=source)
        return self.metric("source_nodes_total", source=source, outcome=outcome)


@asynccontextmanager
async def serving(
    target: Any, *, tracing: Tracing | None = None, costs: StepCostModel | None = None, **settings: Any
) -> AsyncIterator[Verifier]:
    """A verifier that serves `target` on a free port; `costs` is its model of what steps take."""
    metrics = Metrics("verifier")
    failures: list[BaseException] = []
    server = grpc.aio.server(options=server_options())
    port = server.add_insecure_port("127.0.0.1:0")
    defaults = {"model": "unused", "orphan_grace_s": 30.0, "prefix_cache": False, "passes": "eager"}
    options = VerifierSettings(**defaults | settings)
    known = costs or StepCostModel()
    service = VerifierServer(options, lambda: target, metrics, failures.append, QUICK, lambda _: known)
    service.tracing = tracing or service.tracing
    service.register(server)
    await server.start()
    try:
        await service.start()
        async with open_channel(f"127.0.0.1:{port}") as channel:
            yield Verifier(
                VerifierStub(channel),
                target.name,
                target=target,
                metrics=metrics,
                failures=failures,
                server=service,
                address=f"127.0.0.1:{port}",
            )
    finally:
        await service.stop(0.0)
        await server.stop(0.0)


def hold_steps_for_drafts(verifier: Verifier) -> None:
    """From now on a forward takes until a draft has come, at most 50 ms, however busy this machine is."""
    counts = verifier.server._engine.core.counts

    def offered() -> int:
        return sum(source.offered for source in list(counts.values()))

    def until_a_draft_is_there() -> None:
        before, deadline = offered(), time.monotonic() + 0.05
        while offered() == before and time.monotonic() < deadline:
            time.sleep(0.001)

    verifier.target.before_forward = until_a_draft_is_there


def hold_steps_until(verifier: Verifier, happened: Callable[[], object]) -> None:
    """From now on a forward takes until something has happened, and then as long as before.

    A source that rests hears of nothing meanwhile; with the fixed budget none does.
    """
    before = verifier.target.before_forward

    def until_it_has_happened() -> None:
        deadline = time.monotonic() + 100
        while not happened() and time.monotonic() < deadline:
            time.sleep(0.001)
        before()

    verifier.target.before_forward = until_it_has_happened


async def open_together(verifier: Verifier, requests: Sequence[verifier_pb2.OpenRequest]) -> None:
    """Opens all requests while the target's forward waits: all are there at once, on a busy machine too."""
    target, opened = verifier.target, threading.Event()
    before = target.before_forward

    def until_all_are_open() -> None:
        opened.wait(100)
        before()

    target.before_forward = until_all_are_open
    try:
        await asyncio.gather(*(verifier.open(request) for request in requests))
    finally:
        target.before_forward = before
        opened.set()


async def eventually(condition: Any, timeout_s: float = 100.0) -> None:
    """Waits until `condition()` holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to be"
        await asyncio.sleep(0.005)


async def until_parked(verifier: Verifier) -> None:
    """Waits until the only session, which nobody reads, is parked."""
    await eventually(lambda: not verifier.server._table.running)
    in_time(verifier.metric("sessions_parked") == 1, "it was over before it was parked, or is forgotten")
