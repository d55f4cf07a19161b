"""Receives bodies, within bounds of size, time and memory. Nothing here looks at what a body holds."""

import asyncio

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope

from orchestrator.front.http.bodies.memory import HeldMemory
from orchestrator.front.http.field_faults import FieldRefused

SENDING_S = 30.0
"""How long a client may take to send a request's headers, and again to send its body, in seconds."""


class ClientGone(Exception):
    """The client went away before its body was complete."""


async def receive_body(scope: Scope, receive: Receive, most_bytes: int, memory: HeldMemory) -> bytearray:
    """The body of a request. Its memory counts until `memory` is released.

    Raises HTTPException for a body that is too large or too slow, FieldRefused for one that is no JSON by its
    headers, Overloaded where its memory is not to be had, ClientGone.
    """
    headers = Headers(scope=scope)
    _check_type(headers.get("content-type", ""))
    announced = headers.get("content-length")  # digits, as the protocol has checked
    if announced is not None and announced.isdecimal():
        _check_size(int(announced), most_bytes)
        memory.grow(int(announced))
    body, complete = bytearray(), False
    try:
        async with asyncio.timeout(SENDING_S):
            while not complete:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                chunk = message.get("body", b"")
                _check_size(len(body) + len(chunk), most_bytes)
                memory.grow(len(body) + len(chunk))
                body += chunk
                complete = not message.get("more_body", False)
    except TimeoutError:
        raise HTTPException(408, f"the body was not here within {SENDING_S:g} s") from None
    return body


def _check_size(size: int, most_bytes: int) -> None:
    if size > most_bytes:
        raise HTTPException(
            413,
            f"the body has more than {most_bytes} bytes: no request to the models that are served needs more",
        )


def _check_type(content_type: str) -> None:
    """Raises FieldRefused unless the body is JSON by its header, or the client says nothing."""
    kind = content_type.partition(";")[0].strip().lower()
    if (
        kind
        and kind != "application/json"
        and not (kind.startswith("application/") and kind.endswith("+json"))
    ):
        raise FieldRefused(None, "the body must be a JSON object, sent as application/json")
