"""Answers the bodies of HTTP requests, through the same limit, counters and relay as requests over gRPC."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from orchestrator.admitted_request import AdmittedRequest
from orchestrator.fleet.fleet import Fleet
from orchestrator.fleet.target_model import TargetModel
from orchestrator.front.admission import Admission, encode_prompt
from orchestrator.front.auth import Caller
from orchestrator.front.concurrency import ConcurrencyLimit
from orchestrator.front.copied_texts import encode_copied, with_document
from orchestrator.front.http import translate
from orchestrator.front.http.accumulator import AnswerAccumulator, Piece
from orchestrator.front.http.bodies.bounds import BodyKind
from orchestrator.front.http.bodies.fill_in_middle import fill_in_middle
from orchestrator.front.http.bodies.intake import BodyIntake
from orchestrator.front.http.bodies.reading import Prompt, ReadBody
from orchestrator.front.http.chat.chat_fields import ChatFields
from orchestrator.front.http.chat.plan import ChatPlan
from orchestrator.front.http.chat.reasoning_count import ReasoningCount
from orchestrator.front.http.field_faults import FieldRefused
from orchestrator.front.http.fields import CompletionFields, GenerationFields
from orchestrator.front.http.openai_format import ChatCompletionFormat, CompletionFormat, TextCompletionFormat
from orchestrator.front.http.templated.response_parsers import AnswerParsing, ResponseParsers
from orchestrator.front.reservation import Reservation, reserved
from orchestrator.metrics import RequestMetrics
from orchestrator.relay.delivery import Event
from orchestrator.relay.relay import Relay
from outrider.v1 import common_pb2
from speculative.errors import InvalidRequest
from speculative.params import SEED_BITS

ID_PREFIXES = {
    BodyKind.COMPLETION: "cmpl-",
    BodyKind.CHAT: "chatcmpl-",
    BodyKind.RESPONSES: "resp_",
    BodyKind.MESSAGES: "msg_",
}
"""The beginning of an answer's id."""

LONG_TEXT = 65_536
"""Characters of a text that is tokenized alone: several at once would take all cores from short ones."""

BEGUN_AT_ONCE = 4
"""Streams of one body that begin before others have their turn: a body may have dozens."""

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class CompletionJob:
    """A body that passed every check."""

    body: GenerationFields
    caller: Caller
    target: TargetModel
    format: CompletionFormat
    requests: tuple[AdmittedRequest, ...]
    """One request for each prompt."""
    answers: AnswerAccumulator
    seed: int
    id: str
    chat: ChatPlan | None
    """How the answer to a conversation is parsed; None: the body asks for no such answer."""
    parsing: AnswerParsing

    async def parsed(self, piece: Piece) -> Piece:
        """The piece, parsed by the checkpoint's response template where the answer is."""
        return await self.parsing.parsed(piece)


@dataclass(frozen=True, slots=True)
class Asker:
    """Who sent a body."""

    caller: Caller
    owner: str
    """Whose turn and whose memory the body takes."""


class CompletionService:
    """Checks the bodies of HTTP requests and runs their requests."""

    def __init__(
        self,
        fleet: Fleet,
        admission: Admission,
        relay: Relay,
        metrics: RequestMetrics,
        limit: ConcurrencyLimit,
        intake: BodyIntake,
        defaults: translate.AnswerDefaults,
        parsers: ResponseParsers,
    ) -> None:
        self._fleet = fleet
        self._admission = admission
        self._relay = relay
        self._metrics = metrics
        self._limit = limit
        self._defaults = defaults
        self._parsers = parsers
        self._long_texts = asyncio.Semaphore(1)
        self.intake = intake
        """Receives and reads the bodies."""

    def served(self) -> list[TargetModel]:
        """The models that a request can be opened for now."""
        return self._fleet.served()

    def target(self, name: str | None) -> TargetModel:
        """The served model of this name; see choose_target."""
        return self._admission.target(name or "")

    def reserved(self, caller: Caller) -> AbstractContextManager[Reservation]:
        """A place for a request of this caller, while the context lasts; see `reserved`."""
        return reserved(self._limit, caller)

    def sampling_defaults(self, target: TargetModel) -> dict[str, Any]:
        """Sampling parameters of bodies that leave them out; those of the contract are left out here, too."""
        found = self._defaults.sampling(common_pb2.Sampling(), target)
        return {field.name: value for field, value in found.ListFields()}

    async def job(self, kind: BodyKind, data: bytearray, asker: Asker, places: Reservation) -> CompletionJob:
        """Read a body, check it and tokenize its prompts. Raises OutriderError.

        Args:
            places: one place, which becomes one for each prompt.
        """
        fields: GenerationFields | None = None
        try:
            read = await self.intake.read(kind, data, asker.owner)
            places.widen(len(read.prompts))
            assert isinstance(read.fields, CompletionFields | ChatFields)
            fields = read.fields
            return await self._job(kind, read, fields, asker.caller)
        except Exception as error:
            with self._metrics.begin():  # a refused request counts as a request, too
                if isinstance(error, InvalidRequest) and not isinstance(error, FieldRefused):
                    raise translate.renamed(error, fields) from error
                raise

    async def events(self, job: CompletionJob) -> AsyncGenerator[tuple[int, Event], None]:
        """The events of the job's requests, each with the index of its request.

        Closing the generator ends the requests. Raises OutriderError.
        """
        streams = [self._answer(request, job) for request in job.requests]
        async with aclosing(merge_streams(streams)) as events:
            try:
                async for event in events:
                    yield event
            except InvalidRequest as error:
                raise translate.renamed(error, job.body) from error
            finally:
                job.parsing.close()

    async def token_ids(self, prompt: Prompt, target: TargetModel, *, add_special: bool) -> Sequence[int]:
        """Token ids of a prompt. Of long texts one at a time is tokenized. Raises InvalidRequest."""
        if not isinstance(prompt, str):
            return prompt
        if len(prompt) <= LONG_TEXT:
            return await encode_prompt(prompt, target, add_special=add_special)
        async with self._long_texts:
            return await encode_prompt(prompt, target, add_special=add_special)

    async def _job(
        self, kind: BodyKind, read: ReadBody, body: CompletionFields | ChatFields, caller: Caller
    ) -> CompletionJob:
        translate.check_together(body, read.suffix)
        target = self.target(body.model)
        seed = secrets.randbits(SEED_BITS) if body.seed is None else body.seed % 2**64
        name = f"{ID_PREFIXES[kind]}{secrets.token_hex(12)}"
        copied = await encode_copied(read.prediction, read.references, target)
        edits = body.speculation is not None and bool(body.speculation.edit)
        tenant = caller.tenant()
        requests, echoed = [], []
        for index, text in enumerate(read.prompts):
            prompt = _before(text, read.suffix, target) if read.suffix else text
            ids = await self.token_ids(prompt, target, add_special=not read.rendered)
            if kind is BodyKind.MESSAGES:
                body = translate.within_context(body, len(ids), target)
            texts = await with_document(copied, _edited(text), target) if edits else copied
            session = f"{caller.owner}{name}-{index}"
            requests.append(
                translate.admitted(body, ids, target, seed, tenant, session, self._defaults, texts, read.chat)
            )
            if translate.echoes(body):
                echoed.append(await asyncio.to_thread(_text, text, target))
            await asyncio.sleep(0)  # others have their turn between two prompts
        self._check_choices(requests, target)
        format_ = _format(read.chat, target, requests[0])
        plan = read.chat or ChatPlan()
        answers = AnswerAccumulator(
            requests,
            echoed,
            silent=translate.prompt_alone(body),
            reasoning=partial(ReasoningCount, target.tokens, plan.thought, plan.marks),
        )
        parsing = AnswerParsing(self._parsers, plan.order)
        return CompletionJob(
            body, caller, target, format_, tuple(requests), answers, seed, name, read.chat, parsing
        )

    def _check_choices(self, requests: Sequence[AdmittedRequest], target: TargetModel) -> None:
        """Raises InvalidRequest for a body whose choices could never be decoded at once."""
        self._admission.check_room(requests[0], target)  # all have the same number of choices
        choices, most = sum(request.choices for request in requests), self._fleet.most_sessions(target.name)
        if choices > most > 0:
            raise InvalidRequest(
                f"prompt has {len(requests)} prompts and n is {requests[0].choices}, {choices} choices; the "
                f"verifiers of model {target.name!r} decode {most} at once: send fewer prompts in one body"
            )

    async def _answer(self, request: AdmittedRequest, job: CompletionJob) -> AsyncGenerator[Event, None]:
        with self._metrics.begin() as measure:
            measure.admitted(request, job.target)
            answer = self._relay.answer(request, job.target, None)
            prompts = (
                request.choices if request.score_prompt else 1
            )  # a prompt that is scored is computed anew
            async with aclosing(job.caller.charged(answer, len(request.ids) * prompts)) as events:
                async for event in events:
                    measure.note(event)
                    yield event


def _format(plan: ChatPlan | None, target: TargetModel, request: AdmittedRequest) -> CompletionFormat:
    end_ids = request.params.end_ids(target.eos_ids)
    if plan is None:
        return TextCompletionFormat(target.tokens, end_ids)
    return ChatCompletionFormat(target.tokens, end_ids, plan)


def _edited(prompt: Prompt) -> str:
    """The prompt whose last document is a reference. Raises FieldRefused."""
    if not isinstance(prompt, str):
        raise FieldRefused("speculation.edit", "edit is true beside a prompt of ids; give the prompt as text")
    return prompt


def _before(prompt: Prompt, suffix: str, target: TargetModel) -> str:
    """The prompt whose answer stands between this text and the suffix. Raises FieldRefused."""
    if not isinstance(prompt, str):
        raise FieldRefused("suffix", "suffix is given beside a prompt of token ids; give the prompt as text")
    added = frozenset[str]() if target.tokens is None else target.tokens.added_tokens
    return fill_in_middle(prompt, suffix, added)


def _text(prompt: Prompt, target: TargetModel) -> str:
    """The text of a prompt that is to be echoed. Raises FieldRefused."""
    if isinstance(prompt, str):
        return prompt
    if target.tokens is None:
        raise FieldRefused("echo", f"echo cannot be used: model {target.name!r} has no tokenizer")
    return b"".join(map(target.tokens.token_bytes, prompt)).decode("utf-8", "replace")


class _End:
    """Marks the end of a stream's items."""


async def merge_streams(
    streams: Sequence[AsyncGenerator[Item, None]],
) -> AsyncGenerator[tuple[int, Item], None]:
    """Items of all streams as they come, each with the index of its stream.

    The first error ends all streams, and so does closing the generator.
    """
    queue: asyncio.Queue[tuple[int, Item | _End | Exception]] = asyncio.Queue(len(streams))

    async def pump(index: int, stream: AsyncGenerator[Item, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    await queue.put((index, item))
        except Exception as error:
            await queue.put((index, error))
        else:
            await queue.put((index, _End()))

    pumps: list[asyncio.Task[None]] = []
    left = len(streams)
    try:
        for index, stream in enumerate(streams):
            pumps.append(asyncio.create_task(pump(index, stream)))
            if not len(pumps) % BEGUN_AT_ONCE:
                await asyncio.sleep(0)
        while left:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if isinstance(item, _End):
                left -= 1
            else:
                yield index, item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
