"""Answers bodies of other APIs as chat completions are answered, whole or as a stream of events."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi.responses import Response
from starlette.types import Send

from orchestrator.front.http.bodies.bounds import BodyKind
from orchestrator.front.http.bodies.memory import HeldMemory
from orchestrator.front.http.body_response import BodyResponse
from orchestrator.front.http.completion_service import CompletionJob, CompletionService
from orchestrator.front.http.dialects.answer_events import AnswerEnd, AnswerEvents, AnswerHead, Event
from orchestrator.front.http.dialects.messages_events import PING, MessageEvents
from orchestrator.front.http.dialects.messages_translation import MESSAGES_NAMES
from orchestrator.front.http.dialects.responses_events import ResponseEvents
from orchestrator.front.http.dialects.responses_translation import RESPONSES_NAMES
from orchestrator.front.http.dialects.translated_fields import TranslatedFields
from orchestrator.front.http.dialects.translation import in_places
from orchestrator.front.http.errors import describe_error, field_of
from orchestrator.front.http.event_stream import COMMENT, EventStream
from orchestrator.front.http.json_pieces import json_bytes, json_in_pieces
from orchestrator.front.reservation import Reservation
from speculative.errors import InvalidRequest
from speculative.stop import completed_at

LONG_ANSWER = 256
"""Tokens above which an answer's end is looked at in a thread."""
TAIL = 1_024
"""Tokens at an answer's end that hold every stop string: a string has fewer bytes."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one API's answers differ from the others'."""

    names: Mapping[str, str]
    """Names of fields in the client's body, by their names in a chat completion's body."""
    events: Callable[[AnswerHead], AnswerEvents]
    silence: bytes = COMMENT
    """What a stream sends after a silence."""


DIALECTS = {
    BodyKind.RESPONSES: Dialect(RESPONSES_NAMES, ResponseEvents),
    BodyKind.MESSAGES: Dialect(MESSAGES_NAMES, MessageEvents, PING),
}


class TranslatedResponse(BodyResponse):
    """The response to one body of another API."""

    async def _work(
        self, data: bytearray, memory: HeldMemory, places: Reservation, send: Send
    ) -> Response | None:
        dialect = DIALECTS[self._kind]
        try:
            job = await self._service.job(self._kind, data, self._asker, places)
            data.clear()
            memory.release()
            answer = _Answer(self._service, job, dialect)
            if not job.body.stream:
                return await answer.whole()
            await answer.stream(send)
            return None
        except InvalidRequest as error:
            raise in_places(field_of(error), dialect.names) from error


class _Answer:
    """The answer to one job."""

    def __init__(self, service: CompletionService, job: CompletionJob, dialect: Dialect) -> None:
        self._service = service
        self._job = job
        self._dialect = dialect
        self._made = dialect.events(_head(job))
        self._ids: list[int] = []

    async def whole(self) -> Response:
        """The whole answer, once it has ended."""
        async with aclosing(self._events()) as events:
            async for _ in events:
                pass
        return Response(await json_in_pieces(self._made.whole()), media_type="application/json")

    async def stream(self, send: Send) -> None:
        """Send the stream. Errors after its beginning are events, too."""
        large = self._job.body.return_token_ids
        async with (
            EventStream(send, silence=self._dialect.silence) as stream,
            aclosing(self._events()) as events,
        ):
            try:
                async for event in events:
                    data = await json_in_pieces(event) if large else json_bytes(event)
                    await stream.send(data, event["type"])
            except Exception as error:
                if not stream.begun:
                    raise
                if isinstance(error, InvalidRequest):
                    error = in_places(field_of(error), self._dialect.names)
                status, body, _ = describe_error(error)
                for event in self._made.failed(body["error"], status):
                    await stream.send(json_bytes(event), event["type"])
            await stream.end()

    async def _events(self) -> AsyncGenerator[Event, None]:
        job, finish = self._job, "stop"
        begun = False
        async with aclosing(self._service.events(job)) as events:
            async for place, event in events:
                if not begun:
                    begun = True
                    for made in self._made.begin():
                        yield made
                if (piece := job.answers.add(place, event)) is None:
                    continue
                self._ids.extend(piece.ids)
                choice = job.format.chunk(await job.parsed(piece))
                finish = choice["finish_reason"] or finish
                for made in self._made.add(choice["delta"]):
                    yield made
        long = len(self._ids) > LONG_ANSWER
        end = await asyncio.to_thread(self._end, finish) if long else self._end(finish)
        for made in self._made.end(end):
            yield made

    def _end(self, finish: str) -> AnswerEnd:
        job, request = self._job, self._job.requests[0]
        extras: dict[str, Any] = {"seed": job.seed}
        if job.body.return_token_ids:
            extras |= {"token_ids": self._ids, "prompt_token_ids": request.ids}
        asked = _about(job).get("max_tokens")
        room = request.limit - len(request.ids)
        return AnswerEnd(
            finish,
            job.answers.usage(),
            self._stop_string() if finish == "stop" else None,
            context_full=finish == "length" and asked is not None and asked > room,
            extras=extras,
        )

    def _stop_string(self) -> str | None:
        """The stop string that the last token completed, as the verifier's check finds it."""
        request, tokens = self._job.requests[0], self._job.target.tokens
        ended = not self._ids or self._ids[-1] in request.params.end_ids(self._job.target.eos_ids)
        if not request.stops or tokens is None or ended:
            return None
        data = b"".join(map(tokens.token_bytes, self._ids[-TAIL:]))
        before = len(data) - len(tokens.token_bytes(self._ids[-1]))
        found = {stop: completed_at(data, stop.encode("utf-8", "replace"), before) for stop in request.stops}
        at = {stop: place for stop, place in found.items() if place >= 0}
        return min(at, key=lambda stop: at[stop]) if at else None


def _about(job: CompletionJob) -> Mapping[str, Any]:
    assert isinstance(job.body, TranslatedFields)
    return job.body.about


def _head(job: CompletionJob) -> AnswerHead:
    request, body = job.requests[0], job.body
    format_ = None if body.response_format is None else body.response_format.model_dump(by_alias=True)
    return AnswerHead(
        id=job.id,
        created=int(time.time()),
        model=job.target.name,
        prompt_tokens=len(request.ids),
        temperature=request.params.temperature,
        top_p=request.params.top_p,
        response_format=format_,
        about=_about(job),
    )
