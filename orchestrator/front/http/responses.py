"""Sends a job's answer to the client, whole or as a stream of events.

A client that goes away cancels the job.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi.responses import Response
from starlette.types import Send

from orchestrator.front.http.accumulator import Piece
from orchestrator.front.http.bodies.memory import HeldMemory
from orchestrator.front.http.body_response import BodyResponse
from orchestrator.front.http.completion_service import CompletionJob, CompletionService
from orchestrator.front.http.errors import describe_error
from orchestrator.front.http.event_stream import EventStream
from orchestrator.front.http.fields import StreamOptions
from orchestrator.front.http.json_pieces import json_bytes, json_in_pieces
from orchestrator.front.http.openai_format import token_text
from orchestrator.front.reservation import Reservation

LONG_ANSWER = 256
"""Tokens above which an answer's log-probabilities are formatted in a thread."""


class CompletionResponse(BodyResponse):
    """The response to one body. Its call runs the job."""

    async def _work(
        self, data: bytearray, memory: HeldMemory, places: Reservation, send: Send
    ) -> Response | None:
        job = await self._service.job(self._kind, data, self._asker, places)
        data.clear()
        memory.release()
        answer = _Answer(self._service, job)
        return await answer.stream(send) if job.body.stream else await answer.whole()


class _Answer:
    """The answer to one job."""

    def __init__(self, service: CompletionService, job: CompletionJob) -> None:
        self._service = service
        self._job = job
        self._prompts: dict[int, bytes] = {}
        """Token ids of prompts as JSON, by the prompt's index."""

    async def whole(self) -> Response | None:
        """The whole answer, once all choices have ended."""
        answers = self._job.answers
        async with aclosing(self._service.events(self._job)) as events:
            async for place, event in events:
                answers.add(place, event)
        choices = [await self._choice(piece, whole=True) for piece in answers.whole()]
        rest = {"usage": answers.usage()} | _metrics(self._job)
        head = json_bytes(_head(self._job, self._job.format.whole_object))
        body = head[:-1] + b',"choices":[' + b",".join(choices) + b"]," + json_bytes(rest)[1:]
        return Response(body, media_type="application/json")

    async def stream(self, send: Send) -> Response | None:
        """Send the stream. Errors after its beginning are events, too.

        Returns None: nothing is left to send.
        """
        async with EventStream(send) as stream, aclosing(self._events()) as chunks:
            try:
                async for chunk in chunks:
                    await stream.send(chunk)
                await stream.send(b"[DONE]")
            except Exception as error:
                if not stream.begun:
                    raise
                await stream.send(json_bytes(describe_error(error)[1]))
            await stream.end()
        return None

    async def _events(self) -> AsyncGenerator[bytes, None]:
        """Yield an event for each message of each choice, and the event with the usage."""
        job = self._job
        head = _head(job, job.format.chunk_object)
        asked = job.body.stream_options or StreamOptions()
        if asked.include_usage:
            head["usage"] = None
        begun = json_bytes(head)[:-1] + b',"choices":['
        async with aclosing(self._service.events(job)) as events:
            async for place, event in events:
                if (piece := job.answers.add(place, event)) is None:
                    continue
                if asked.continuous_usage_stats:
                    begun = json_bytes(head | {"usage": job.answers.usage()})[:-1] + b',"choices":['
                yield begun + await self._choice(piece, whole=False) + b"]}"
        if asked.include_usage:
            last = {"choices": [], "usage": job.answers.usage()}
            yield json_bytes(head | last | _metrics(job))

    async def _choice(self, piece: Piece, *, whole: bool) -> bytes:
        """A choice as JSON."""
        piece = await self._job.parsed(piece)
        form = self._job.format.whole if whole else self._job.format.chunk
        # Log-probabilities of a long answer take long to format: a thread lets the loop in now and then.
        long = whole and len(piece.logprobs) > LONG_ANSWER
        choice = await asyncio.to_thread(form, piece) if long else form(piece)
        if self._job.body.return_token_ids:
            choice["token_ids"] = piece.ids
        if self._job.body.return_token_sources:
            ids = piece.ids[len(piece.ids) - len(piece.sources) :]  # without those of the prompt
            texts = [token_text(self._job.target.tokens, id_) for id_ in ids]
            choice["token_sources"] = [
                {"text": text, "source": source} for text, source in zip(texts, piece.sources, strict=True)
            ]
        written = await json_in_pieces(choice) if whole else json_bytes(choice)
        return await self._with_prompt(written, piece.index) if piece.first else written

    async def _with_prompt(self, choice: bytes, index: int) -> bytes:
        """A choice's JSON with the prompt's token ids, where the body asks for them."""
        if not self._job.body.return_token_ids:
            return choice
        place = index // self._job.requests[0].choices
        if place not in self._prompts:
            self._prompts[place] = await json_in_pieces(self._job.requests[place].ids)
        return choice[:-1] + b',"prompt_token_ids":' + self._prompts[place] + b"}"


def _head(job: CompletionJob, object_: str) -> dict[str, Any]:
    return {
        "id": job.id,
        "object": object_,
        "created": int(time.time()),
        "model": job.target.name,
        "seed": job.seed,
    }


def _metrics(job: CompletionJob) -> dict[str, Any]:
    level = job.body.per_request_spec_decode_metrics
    if level in (None, "none"):
        return {}
    return {"metrics": job.answers.metrics(detailed=level == "detailed")}
