"""The steps of every request with a body: the body is received, a place reserved, the work done, answered."""

import asyncio
from abc import abstractmethod
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from orchestrator.front.http.bodies.arriving import ClientGone
from orchestrator.front.http.bodies.bounds import BodyKind
from orchestrator.front.http.bodies.memory import HeldMemory
from orchestrator.front.http.completion_service import Asker, CompletionService
from orchestrator.front.http.errors import error_response, on_http_error
from orchestrator.front.http.middleware import caller_of, owner_of
from orchestrator.front.reservation import Reservation

Result = TypeVar("Result")


class BodyResponse(Response):
    """The response to one request with a body. A client that goes away cancels its work."""

    def __init__(self, service: CompletionService, kind: BodyKind, request: Request) -> None:
        super().__init__()
        self._service = service
        self._kind = kind
        self._request = request
        self._asker = Asker(caller_of(request), owner_of(request))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send one response, whatever happens to the work."""
        try:
            response = await self._respond(receive, send)
        except ClientGone:
            return
        except HTTPException as error:
            response = await on_http_error(self._request, error)
        except Exception as error:
            response = error_response(error, self._request.url.path)
        if response is not None:
            await response(scope, receive, send)

    @abstractmethod
    async def _work(
        self, data: bytearray, memory: HeldMemory, places: Reservation, send: Send
    ) -> Response | None:
        """Do what the body asks for; empty `data` and release `memory` once it is read.

        Returns the response; None where all of it was sent. Raises OutriderError.
        """

    async def _respond(self, receive: Receive, send: Send) -> Response | None:
        intake = self._service.intake
        with intake.held(self._asker.owner) as memory:
            data = await intake.receive(self._kind, self._request, memory)
            return await unless_gone(receive, self._run(data, memory, send))

    async def _run(self, data: bytearray, memory: HeldMemory, send: Send) -> Response | None:
        with self._service.reserved(self._asker.caller) as places:
            return await self._work(data, memory, places, send)


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
