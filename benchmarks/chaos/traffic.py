"""The streams of a chaos run: their requests, their golden output, and a client that records every message.

The client is the library's own. It knows all orchestrators and goes on by itself where one is lost. Knows
nothing of faults.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc

from benchmarks.chaos.device import DeviceCall, DeviceFault, first_difference_of
from benchmarks.chaos.stream_figures import StreamRecord
from outrider.client.async_client import AsyncClient, AsyncStream
from outrider.client.endpoints import addresses_in, ping_patience_ms
from outrider.client.options import Options, build_request
from outrider.client.resuming import Resuming
from outrider.v1 import common_pb2, explain_pb2, generation_pb2
from outrider.v1.generation_pb2_grpc import GenerationStub
from outrider.wire.channel import open_channel
from speculative.errors import OutriderError

if TYPE_CHECKING:
    from outrider.v1.generation_pb2_grpc import GenerationAsyncStub  # a name of the type stubs only

TWIN_S = 5.0
"""Seconds that the second of two streams of one request may outlive the first."""
RETRY_S = 60.0
"""Seconds for which the client retries a lost stream."""
LAST_STREAM_S = 90.0
"""Seconds after the last fault until a stream that still runs counts as lost."""
EXPLAIN_TIMEOUT_S = 2.0
USER_TOKENS = 24
"""Tokens that the user adds between two turns."""
REQUEST_KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "learn": True},
    {"temperature": 0.8, "turns": 3},
    {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.1, "device": True},
    {"temperature": 0.0, "turns": 3, "device": True},
    {"temperature": 0.8, "n": 2},
    {"temperature": 0.8, "speculation": False},
    {"temperature": 0.9, "top_k": 40, "presence_penalty": 0.3, "turns": 2},
)
"""Options of the streams, in turn; a stream with several turns is a conversation, one with a device has a
client that drafts for it.

Few streams learn: learnt outputs come back as drafts that are right throughout, and a stream that ends in a
moment is hard to hit."""


@dataclass(frozen=True, slots=True)
class GoldenConversation:
    """A conversation, or a single request, with its golden output."""

    prompts: tuple[tuple[int, ...], ...]
    """The whole prompt of each turn, earlier turns included."""
    golden: tuple[tuple[tuple[int, ...], ...], ...]
    """The golden ids by turn, then by choice."""
    options: Options
    device: bool
    """Whether the client's device drafts along."""


def scripts(
    prompts: Sequence[Sequence[int]], streams: int, tokens: int, *, devices: bool = True
) -> list[dict[str, Any]]:
    """The options of each stream and, in `said`, the tokens that its user adds in each turn. Pure.

    Args:
        devices: whether some clients have a device that drafts.
    """
    made = []
    for number in range(streams):
        kind = dict(REQUEST_KINDS[number % len(REQUEST_KINDS)])
        turns, device = kind.pop("turns", 1), kind.pop("device", False)
        first, *more = (prompts[(number + turn) % len(prompts)] for turn in range(turns))
        own = {"seed": 1000 + number, "max_tokens": tokens, "ignore_eos": True}
        options = {"learn": False} | kind | own
        said = [tuple(first), *(tuple(ids[:USER_TOKENS]) for ids in more)]
        made.append({"said": said, "options": options, "device": device and devices})
    return made


async def decode_golden(client: AsyncClient, script: dict[str, Any], repeats: int) -> GoldenConversation:
    """A script with its golden output, decoded plainly while no process is harmed.

    Raises RuntimeError where repeats differ, as no stream can be compared with such an output.
    """
    options = script["options"]
    prompts, golden = [], []
    so_far: tuple[int, ...] = ()
    for said in script["said"]:
        so_far += said
        request = options | {"ids": so_far, "speculation": False, "learn": False}
        answers = [await client.generate(**request) for _ in range(repeats)]
        ids = {tuple(choice.ids for choice in answer.choices) for answer in answers}
        if len(ids) > 1:
            raise RuntimeError(f"plain decoding gives other ids each time, with {options}")
        prompts.append(so_far)
        golden.append(ids.pop())
        so_far += golden[-1][0]
    return GoldenConversation(tuple(prompts), tuple(golden), options, script["device"])


async def decode_all_golden(
    addresses: str, requested: Sequence[dict[str, Any]], repeats: int
) -> list[GoldenConversation]:
    """The conversations with their golden output, decoded at once while no process is harmed.

    Args:
        addresses: those of all orchestrators.
        requested: what `scripts` returns.
    """
    async with AsyncClient(addresses) as client:
        return await asyncio.gather(*(decode_golden(client, script, repeats) for script in requested))


class RecordedCall:
    """A Generate call whose responses are recorded as they pass."""

    def __init__(self, call: Any, record: StreamRecord, now: Callable[[], float]) -> None:
        self._call = call
        self._record = record
        self._now = now

    async def __aiter__(self) -> AsyncIterator[generation_pb2.GenerateResponse]:
        async for response in self._call:
            if response.HasField("started"):
                self._record.record_epoch(response.started.epoch)
            elif response.HasField("tokens"):
                tokens = response.tokens
                self._record.record_tokens(
                    self._now(), tokens.choice, tokens.position, len(tokens.ids), tokens.epoch
                )
            yield response

    def cancel(self) -> None:
        """Cancels the call."""
        self._call.cancel()


class RepeatedStreams:
    """Streams that run side by side, each repeating its conversation until `finish` or `close`."""

    def __init__(self, addresses: str, conversations: Sequence[GoldenConversation]) -> None:
        """`addresses` names all orchestrators. Use in one event loop, and call `close` at the end."""
        several = addresses_in(addresses)
        self._channels = [open_channel(each, patience_ms=ping_patience_ms(several)) for each in several]
        self._stubs: list[GenerationAsyncStub] = [GenerationStub(channel) for channel in self._channels]
        self._conversations = conversations
        self._began = time.monotonic()
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.device_faults: Counter[str] = Counter()
        """How often each fault of a device happened."""
        self.records: list[StreamRecord] = []
        """A record of every stream that was requested."""

    def now(self) -> float:
        """Seconds since the streams began."""
        return time.monotonic() - self._began

    def golden(self) -> dict[str, Sequence[Sequence[int]]]:
        """The golden ids of every stream, by its name up to the slash."""
        return {
            f"{number}.{turn}": ids
            for number, conversation in enumerate(self._conversations)
            for turn, ids in enumerate(conversation.golden)
        }

    def start(self) -> None:
        """Starts all streams and returns at once."""
        self._began = time.monotonic()
        self._tasks = [
            asyncio.create_task(self._repeat(number)) for number in range(len(self._conversations))
        ]

    async def finish(self) -> None:
        """Begins no further stream and returns when all have ended, or after LAST_STREAM_S seconds."""
        self._stopping.set()
        _, late = await asyncio.wait(self._tasks, timeout=LAST_STREAM_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*self._tasks)

    async def close(self) -> None:
        """Cancels the streams that still run and closes the connections."""
        self._stopping.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for channel in self._channels:
            await channel.close()

    async def _repeat(self, number: int) -> None:
        conversation = self._conversations[number]
        lap = 0
        while not self._stopping.is_set():
            for turn, prompt in enumerate(conversation.prompts):
                if self._stopping.is_set():
                    return
                record = StreamRecord(f"{number}.{turn}/{lap}", len(prompt), self.now())
                self.records.append(record)
                request: Options = {**conversation.options, "ids": prompt, "session": f"chaos-{number}-{lap}"}
                drafted = (*prompt, *conversation.golden[turn][0]) if conversation.device else None
                await self._stream(record, request, number + lap, drafted)
            lap += 1

    async def _stream(
        self, record: StreamRecord, options: Options, first: int, drafted: Sequence[int] | None
    ) -> None:
        """Runs one stream to its end and records its outcome.

        Args:
            drafted: ids of prompt and answer that the client's device drafts; None: the client has no device.
        """
        request = build_request(None, options)
        fault = tuple(DeviceFault)[first % len(DeviceFault)]
        twins: list[asyncio.Task[None]] = []

        def happened() -> None:
            self.device_faults[fault] += 1
            record.has_slept = fault is DeviceFault.SLEEPS

        def ask(resuming: Resuming) -> Any:
            record.asked += 1
            stub = self._stubs[resuming.orchestrator]
            if drafted is None:
                return RecordedCall(stub.Generate(iter((resuming.request,))), record, self.now)
            if fault is DeviceFault.TWICE and record.asked == 2:
                twins.append(asyncio.create_task(self._twin(record, resuming, drafted)))
            wrong = fault if record.asked == 1 else DeviceFault.NONE
            device = DeviceCall(stub.Generate(), resuming.request, drafted, wrong, happened)
            return RecordedCall(device, record, self.now)

        try:
            resuming = Resuming(request, len(self._stubs), RETRY_S, first)
            async with AsyncStream(ask, resuming, options.get("n") or 1) as stream:
                completion = await stream.completion()
            record.completion = [choice.ids for choice in completion.choices]
            record.recoveries = completion.usage.recoveries
            await self._ask_reading_times(record, str(options["session"]), self._stubs[resuming.orchestrator])
        except asyncio.CancelledError:
            record.error = f"still running {LAST_STREAM_S:g} s after the last fault"
        except OutriderError as error:
            record.error = f"{type(error).__name__}: {error}"
        finally:
            await _ended(twins)

    async def _twin(self, record: StreamRecord, resuming: Resuming, drafted: Sequence[int]) -> None:
        """Resumes a request at another orchestrator, too; what comes there has to be golden as well."""
        stub = self._stubs[(resuming.orchestrator + 1) % len(self._stubs)]
        call = DeviceCall(stub.Generate(), resuming.request, drafted)
        try:
            if (found := await first_difference_of(call, drafted)) is not None:
                record.twin_error = f"resumed twice, and the second got {found[1]} at {found[0]}"
        finally:
            call.cancel()

    async def _ask_reading_times(
        self, record: StreamRecord, session: str, stub: "GenerationAsyncStub"
    ) -> None:
        """Records how long each verifier that took the stream over took to read its tokens."""
        for switch in record.switches:
            key = common_pb2.SessionKey(tenant="default", session=session, choice=switch.choice)
            with suppress(grpc.RpcError):
                explanation = await stub.Explain(
                    explain_pb2.ExplainRequest(key=key), timeout=EXPLAIN_TIMEOUT_S
                )
                for incarnation in explanation.incarnations:
                    if incarnation.epoch != switch.epoch or incarnation.forgotten:
                        continue
                    if incarnation.rounds:
                        first = incarnation.rounds[0]
                        read_s = (first.at_ms + first.forward_ms) / 1000
                        record.computed_s[switch.choice, switch.epoch] = read_s


async def _ended(twins: Sequence[asyncio.Task[None]]) -> None:
    """Returns once these tasks are over, after TWIN_S seconds at the latest."""
    if not twins:
        return
    _, late = await asyncio.wait(twins, timeout=TWIN_S)
    for twin in late:
        twin.cancel()
    await asyncio.gather(*twins, return_exceptions=True)
