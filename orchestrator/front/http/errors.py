"""Errors in the shape of the API that was asked, OpenAI's or Anthropic's, under the status that fits."""

import math
import re
from typing import Any, NamedTuple

import grpc
from fastapi import Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.routing import Match

from orchestrator.front.http.field_faults import FieldRefused
from orchestrator.front.http.json_pieces import json_bytes
from outrider.wire.status import RETRY_KEY, status_of
from speculative.errors import InvalidRequest, QuotaExceeded, UnknownModel, UnknownSession


class ErrorKind(NamedTuple):
    """The HTTP status, error type and error code that stand for a gRPC status."""

    status: int
    type: str
    code: str | None


_KINDS = {
    grpc.StatusCode.INVALID_ARGUMENT: ErrorKind(400, "invalid_request_error", None),
    grpc.StatusCode.UNAUTHENTICATED: ErrorKind(401, "invalid_request_error", "invalid_api_key"),
    grpc.StatusCode.PERMISSION_DENIED: ErrorKind(403, "invalid_request_error", "permission_denied"),
    grpc.StatusCode.NOT_FOUND: ErrorKind(404, "invalid_request_error", "not_found"),
    grpc.StatusCode.ABORTED: ErrorKind(409, "conflict_error", "superseded"),
    grpc.StatusCode.FAILED_PRECONDITION: ErrorKind(409, "conflict_error", "failed_precondition"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: ErrorKind(429, "rate_limit_error", "overloaded"),
    grpc.StatusCode.UNAVAILABLE: ErrorKind(503, "service_unavailable_error", "unavailable"),
    grpc.StatusCode.DEADLINE_EXCEEDED: ErrorKind(504, "timeout_error", "deadline_exceeded"),
}
MESSAGES_PATH = "/v1/messages"
"""The path of Anthropic's API, whose errors have a shape of their own."""
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
# Errors of their own kind, and the name of what the request asked for in vain.
_NAMED_KINDS: dict[type[Exception], tuple[ErrorKind, str | None]] = {
    QuotaExceeded: (ErrorKind(429, "rate_limit_error", "rate_limit_exceeded"), None),
    UnknownModel: (ErrorKind(404, "invalid_request_error", "model_not_found"), "model"),
    UnknownSession: (ErrorKind(404, "invalid_request_error", "session_not_found"), "session"),
}
_METHODS = ("DELETE", "GET", "PATCH", "POST", "PUT")
_INTERNAL = ErrorKind(500, "server_error", "internal_error")

# Fields by the names that the checks of both fronts give them, where the body has another name. The messages
# quote what clients wrote, which may hold any words: a message is about the field that it begins with.
_NAMES = (
    (r"^(an id in )?stop_ids\b", "stop_token_ids"),
    (r"^(an id in )?logit_bias\b", "logit_bias"),
    (r"^speculation\.node_limit\b", "speculation.nodes"),
    (r"^criterion\b", "speculation.criterion"),
    (r"^speculation\.policy\b", "speculation.policy"),
    (r"^speculation\.sources\b|^a source's name\b|cannot name a source:", "speculation.sources"),
    (r"^speculation\.corpora\b|^there are \d+ corpora\b|cannot name a corpus:", "speculation.corpora"),
    (r"^speculation\.edit\b", "speculation.edit"),
    (r"^references\b", "references"),
    (r"^(regex|choice|lark)\b|: (regex|choice|lark) is not", "structured_outputs"),
    (r"^(json_schema|json_object|grammar)\b|: json_(schema|object) is not", "response_format"),
    (r"^model must be given|^no model\b", "model"),
    (r"\bstop string", "stop"),
    (r"^[Tt]he prompt\b|give ids, not text", "prompt"),
)
_FIELD = re.compile(r"([a-z_]+) (?:is|has|names|cannot)\b")


def param_of(message: str) -> str | None:
    """Name, in the body, of the field that a refusal is about; None where the refusal names none."""
    for pattern, name in _NAMES:
        if re.search(pattern, message):
            return name
    found = _FIELD.match(message)
    return found[1] if found else None


def describe_error(error: Exception) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Status, body and headers of an error; the text of a bug goes to the log alone."""
    status = status_of(error)
    kind, param = _NAMED_KINDS.get(type(error), (_KINDS.get(status.code, _INTERNAL), None))
    message = status.message
    if isinstance(error, InvalidRequest):
        refused = field_of(error)
        param, message = refused.param, str(refused)
    headers = _retry_headers(float(dict(status.metadata).get(RETRY_KEY, "0")))
    if kind.status == 401:
        headers["www-authenticate"] = "Bearer"
    return kind.status, openai_error(message, kind.type, param, kind.code), headers


def field_of(error: InvalidRequest) -> FieldRefused:
    """The refusal with the name that the field has in the body."""
    if isinstance(error, FieldRefused):
        return error
    message = str(error)
    param = param_of(message)
    message = re.sub(r"^(an id in )?stop_ids\b", r"\1stop_token_ids", message)
    message = re.sub(r"^speculation\.node_limit\b", "speculation.nodes", message)
    return FieldRefused(param, message)


def _retry_headers(seconds: float) -> dict[str, str]:
    """Headers that say when to retry.

    HTTP's own header counts whole seconds; OpenAI's clients read OpenAI's header first.
    """
    if not seconds:
        return {}
    return {"retry-after": str(math.ceil(seconds)), "retry-after-ms": str(math.ceil(seconds * 1000))}


def openai_error(
    message: str, type_: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": type_, "param": param, "code": code}}


def anthropic_error(status: int, message: str) -> dict[str, Any]:
    """Anthropic's error object, for an error of this HTTP status."""
    type_ = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": type_, "message": message}}


def shaped(body: dict[str, Any], status: int, path: str) -> dict[str, Any]:
    """OpenAI's error object in the shape of the API that a path belongs to."""
    if path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/"):
        return anthropic_error(status, body["error"]["message"])
    return body


def error_response(error: Exception, path: str = "") -> Response:
    """The response that reports an error.

    Args:
        path: the path of the request; empty: errors have OpenAI's shape.
    """
    status, body, headers = describe_error(error)
    return _response(shaped(body, status, path), status, headers)


async def on_error(request: Request, error: Exception) -> Response:
    """Handles every error that a route raises."""
    return error_response(error, request.url.path)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Handles what the framework refuses: an unknown path or method, a body that is not JSON."""
    assert isinstance(error, HTTPException)
    type_ = "invalid_request_error" if error.status_code < 500 else "server_error"
    message, headers = str(error.detail), dict(error.headers or {})
    if error.status_code == 405:
        methods = ", ".join(_methods(request))
        message, headers = f"this path takes {methods}, not {request.method}", {"Allow": methods}
    body = shaped(openai_error(message, type_), error.status_code, request.url.path)
    return _response(body, error.status_code, headers)


def _response(body: dict[str, Any], status: int, headers: dict[str, str]) -> Response:
    """The response with this body; a refusal may name what a client wrote, half characters included."""
    return Response(json_bytes(body), status, headers, "application/json")


def _methods(request: Request) -> list[str]:
    """The methods that the request's path takes."""
    scopes = {method: {**request.scope, "method": method} for method in _METHODS}
    return [
        method
        for method, scope in scopes.items()
        if any(route.matches(scope)[0] == Match.FULL for route in request.app.routes)
    ]
