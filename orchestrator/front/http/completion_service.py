"""Requests of the HTTP front on their way: the same room, counters and relay that those over gRPC have."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from orchestrator.fleet.fleet import Fleet
from orchestrator.front.admission import Admitted, Target, check_text, choose_target
from orchestrator.front.concurrency import Room
from orchestrator.front.gate import Caller
from orchestrator.front.http import translate
from orchestrator.front.http.accumulator import Answers
from orchestrator.front.http.chat import conversation
from orchestrator.front.http.fields import ChatRequest, CompletionRequest, Generation
from orchestrator.front.http.merge_streams import merged
from orchestrator.front.http.openai_format import ChatShape, Shape, TextShape
from orchestrator.front.prediction import prediction_ids
from orchestrator.metrics import RequestMetrics
from orchestrator.relay.events import Event
from orchestrator.relay.relay import Relay
from speculative.errors import InvalidRequest

SEED_BITS = 53
"""Of seeds that are drawn here: whole numbers of which every JSON reader keeps all digits."""


@dataclass(frozen=True, slots=True)
class Job:
    """A body that can be answered."""

    asked: Generation
    caller: Caller
    target: Target
    shape: Shape
    requests: tuple[Admitted, ...]
    """One for each prompt."""
    answers: Answers
    seed: int
    id: str


class Desk:
    """Takes bodies in, and answers them."""

    def __init__(
        self,
        fleet: Fleet,
        relay: Relay,
        metrics: RequestMetrics,
        room: Room,
        default_max_tokens: int,
    ) -> None:
        self._fleet = fleet
        self._relay = relay
        self._metrics = metrics
        self._room = room
        self._default_max_tokens = default_max_tokens

    def served(self) -> list[Target]:
        """Models that a request can be opened for now."""
        return self._fleet.served()

    def target(self, name: str | None) -> Target:
        """See choose_target."""
        return choose_target(name or "", self._fleet.targets(), self._fleet.unreached())

    async def job(self, asked: CompletionRequest | ChatRequest, caller: Caller) -> Job:
        """The body, checked, its prompts tokenized. Raises OutriderError."""
        try:
            return await self._job(asked, caller)
        except Exception as error:
            with self._metrics.begin():  # a request that is refused is one, too
                if isinstance(error, InvalidRequest):
                    raise translate.blamed(error, asked) from error
                raise

    async def events(self, job: Job) -> AsyncGenerator[tuple[int, Event], None]:
        """What becomes of each of its requests, by place. Closing it ends them. Raises OutriderError."""
        count = len(job.requests)
        with self._room.enter(count), job.caller.asking(count):
            streams = [self._answer(request, job) for request in job.requests]
            async with aclosing(merged(streams)) as events:
                try:
                    async for event in events:
                        yield event
                except InvalidRequest as error:
                    raise translate.blamed(error, job.asked) from error

    async def encode(self, text: str, target: Target, *, add_special: bool = True) -> list[int]:
        """In a thread, as a long text takes a while. Raises InvalidRequest where it cannot be a prompt."""
        tokens = check_text(text, target)
        return await asyncio.to_thread(tokens.encode, text, add_special=add_special)

    async def _job(self, asked: CompletionRequest | ChatRequest, caller: Caller) -> Job:
        translate.check_together(asked)
        target = self.target(asked.model)
        shape: Shape
        if isinstance(asked, ChatRequest):
            shape = ChatShape(target.tokens)
            plain = [message.plain() for message in asked.messages]
            text = await conversation(target, plain)
            prompts: Sequence[Sequence[int]] = [await self.encode(text, target, add_special=False)]
        else:
            shape = TextShape(target.tokens)
            given = translate.prompts_of(asked)
            prompts = [p if isinstance(p, list) else await self.encode(p, target) for p in given]
        seed = secrets.randbits(SEED_BITS) if asked.seed is None else asked.seed % 2**64
        name = f"{shape.id_prefix}-{secrets.token_hex(12)}"
        told = "" if asked.prediction is None else asked.prediction.plain()
        prediction = await prediction_ids(told, target)
        default, tenant = self._default_max_tokens, caller.tenant()
        requests = translate.admitted(asked, prompts, target, seed, tenant, name, default, prediction)
        return Job(asked, caller, target, shape, tuple(requests), Answers(requests), seed, name)

    async def _answer(self, request: Admitted, job: Job) -> AsyncGenerator[Event, None]:
        with self._metrics.begin() as measure:
            measure.admitted(request, job.target)
            answer = self._relay.answer(request, job.target, None)
            async with aclosing(job.caller.paying(answer, len(request.ids))) as events:
                async for event in events:
                    measure.note(event)
                    yield event
