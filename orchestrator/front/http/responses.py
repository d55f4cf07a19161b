"""Sends a job's answer to the client, whole or as a stream of events.

A client that goes away cancels the job.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from orchestrator.front.http.accumulator import Piece
from orchestrator.front.http.completion_service import CompletionJob, CompletionService
from orchestrator.front.http.errors import describe_error, error_response
from orchestrator.front.http.translate import wants_usage

Result = TypeVar("Result")


class CompletionResponse(Response):
    """The response to one body. Its call runs the job; a client that goes away cancels the job."""

    def __init__(self, service: CompletionService, job: CompletionJob) -> None:
        super().__init__()
        self._service = service
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send one response, whatever happens to the job."""
        work = self._stream(send) if self._job.body.stream else self._whole()
        try:
            response = await unless_gone(receive, work)
        except Exception as error:
            response = error_response(error)
        if response is not None:
            await response(scope, receive, send)

    async def _whole(self) -> Response | None:
        answers = self._job.answers
        async with aclosing(self._service.events(self._job)) as events:
            async for place, event in events:
                answers.add(place, event)
        body = _head(self._job, self._job.format.whole_object)
        body["choices"] = [self._choice(piece, whole=True) for piece in answers.whole()]
        body["usage"] = answers.usage()
        return JSONResponse(body | _metrics(self._job))

    async def _stream(self, send: Send) -> Response | None:
        """Send the stream. Errors after its first event are events, too.

        Returns None: nothing is left to send.
        """
        begun = False
        async with aclosing(self._events()) as chunks:
            try:
                async for chunk in chunks:
                    if not begun:
                        begun = True
                        await send(_START)
                    await _send(send, chunk)
                await _send(send, b"[DONE]")
            except Exception as error:
                if not begun:
                    raise
                await _send(send, _json(describe_error(error)[1]))
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return None

    async def _events(self) -> AsyncGenerator[bytes, None]:
        """Yield an event for each message of each choice, and those that open and end the stream."""
        job = self._job
        head = _head(job, job.format.chunk_object)
        if wants_usage(job.body):
            head["usage"] = None
        opened = set[int]()
        async with aclosing(self._service.events(job)) as events:
            async for place, event in events:
                if place not in opened:  # the first event of a request says that all of its choices are open
                    opened.add(place)
                    for choice in self._openings(place):
                        yield _json(head | {"choices": [choice]})
                if (piece := job.answers.add(place, event)) is not None:
                    yield _json(head | {"choices": [self._choice(piece, whole=False)]})
        if wants_usage(job.body):
            last = {"choices": [], "usage": job.answers.usage()}
            yield _json(head | last | _metrics(job))

    def _openings(self, place: int) -> list[dict[str, Any]]:
        job = self._job
        count = job.requests[place].choices
        indices = range(place * count, (place + 1) * count)
        found = []
        for index in indices:
            choice = job.format.opening(index)
            if choice is None and job.body.return_token_ids:
                choice = job.format.chunk(Piece(index, ""))
            if choice is not None:
                if job.body.return_token_ids:
                    choice["prompt_token_ids"] = job.requests[place].ids
                found.append(choice)
        return found

    def _choice(self, piece: Piece, *, whole: bool) -> dict[str, Any]:
        choice = self._job.format.whole(piece) if whole else self._job.format.chunk(piece)
        if self._job.body.return_token_ids:
            choice["token_ids"] = piece.ids
            if whole:
                choice["prompt_token_ids"] = self._job.answers.prompt_of(piece.index)
        return choice


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result | None:
    """The result of the work; None where the client went away, which cancels the work."""
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ],
}


async def _send(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


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
