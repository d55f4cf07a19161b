"""The routes of the HTTP API."""

import time
from collections.abc import Sequence
from functools import cache
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

import outrider
from orchestrator.edge.drafters import DraftersOf
from orchestrator.fleet.fleet import Fleet
from orchestrator.fleet.target_model import TargetModel
from orchestrator.front.auth import Gate
from orchestrator.front.generating import StreamAnswerer
from orchestrator.front.http.bodies.bounds import BodyKind
from orchestrator.front.http.bodies.tokenize_fields import DetokenizeRequest, TokenizeRequest
from orchestrator.front.http.chat.chat_fields import ChatRequest
from orchestrator.front.http.chat.planning import parses_answers
from orchestrator.front.http.completion_service import CompletionService
from orchestrator.front.http.connections.websocket import websocket_routes
from orchestrator.front.http.dialects.answering import TranslatedResponse
from orchestrator.front.http.dialects.messages_fields import CountRequest, MessagesRequest
from orchestrator.front.http.dialects.responses_fields import ResponsesRequest
from orchestrator.front.http.errors import error_response, on_error, on_http_error
from orchestrator.front.http.fields import CompletionRequest
from orchestrator.front.http.middleware import (
    AuthMiddleware,
    FramingMiddleware,
    HeadMiddleware,
    OriginMiddleware,
)
from orchestrator.front.http.page.routes import page_routes
from orchestrator.front.http.responses import CompletionResponse
from orchestrator.front.http.templated.known_templates import response_template
from orchestrator.front.http.tokenizing import TokenizeResponse
from speculative.errors import OutriderError, Unavailable

SHOWN_TO_PAGES = ["x-request-id", "request-id", "retry-after", "retry-after-ms"]
"""Headers of responses that web pages may read."""


def make_app(
    service: CompletionService,
    answerer: StreamAnswerer,
    gate: Gate,
    drafters_of: DraftersOf,
    fleet: Fleet,
    origins: Sequence[str] = (),
    *,
    with_page: bool = True,
) -> FastAPI:
    """The application. Every response that reports an error has OpenAI's shape.

    Args:
        drafters_of: the models that devices can draft with.
        fleet: the workers whose state the page shows.
        origins: origins of web pages that may call the API from a browser.
        with_page: whether there is a page at /.
    """
    app = FastAPI(title="Outrider", version=outrider.__version__, docs_url=None, redoc_url=None)
    app.include_router(_completions(service))
    app.include_router(_models(service, drafters_of))
    app.include_router(_tokenizing(service))
    app.include_router(page_routes(app, fleet, with_page=with_page))
    app.include_router(websocket_routes(answerer))
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(OutriderError, on_error)
    app.add_exception_handler(Exception, on_error)
    app.add_middleware(AuthMiddleware, gate=gate)
    app.add_middleware(HeadMiddleware)
    app.add_middleware(FramingMiddleware)
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=SHOWN_TO_PAGES,
        )
    app.add_middleware(OriginMiddleware, origins=frozenset(origins))  # the last one sees a request first
    _describe(app)
    return app


def _completions(service: CompletionService) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions", response_class=JSONResponse)
    async def completions(request: Request) -> Response:
        """Complete one text, or several."""
        return CompletionResponse(service, BodyKind.COMPLETION, request)

    @router.post("/v1/chat/completions", response_class=JSONResponse)
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        return CompletionResponse(service, BodyKind.CHAT, request)

    @router.post("/v1/responses", response_class=JSONResponse)
    async def responses(request: Request) -> Response:
        """Answer a conversation, as OpenAI's Responses API; the server keeps no state."""
        return TranslatedResponse(service, BodyKind.RESPONSES, request)

    @router.post("/v1/messages", response_class=JSONResponse)
    async def messages(request: Request) -> Response:
        """Answer a conversation, as Anthropic's Messages API."""
        return TranslatedResponse(service, BodyKind.MESSAGES, request)

    @router.post("/v1/messages/count_tokens", response_class=JSONResponse)
    async def count_tokens(request: Request) -> Response:
        """The number of tokens of the prompt that /v1/messages would make."""
        return TokenizeResponse(service, BodyKind.COUNT, request)

    return router


def _models(service: CompletionService, drafters_of: DraftersOf) -> APIRouter:
    router = APIRouter()
    started = int(time.time())

    def shown(target: TargetModel) -> dict[str, Any]:
        return _model(service, target, drafters_of) | {"created": started}

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The models that can be asked for. `created` is when this server started, in seconds since 1970."""
        return {"object": "list", "data": [shown(target) for target in service.served()]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """One model."""
        return shown(service.target(name))

    @router.get("/health")
    async def health() -> Response:
        """Report whether a request could be answered now."""
        if service.served():
            return JSONResponse({"status": "ok"})
        return error_response(Unavailable("no verifier can be reached"))

    @router.get("/version")
    async def version() -> dict[str, str]:
        """The version of this server."""
        return {"version": outrider.__version__}

    return router


def _model(service: CompletionService, target: TargetModel, drafters_of: DraftersOf) -> dict[str, Any]:
    chat = target.chat
    return {
        "id": target.name,
        "object": "model",
        "owned_by": "outrider",
        "max_model_len": target.max_length,
        "sampling_defaults": service.sampling_defaults(target),
        "tokenizer_digest": target.tokenizer_digest,
        "parses_chat": chat is not None and parses_answers(chat.source, response_template(chat)),
        "drafters": [
            {
                "format": drafter.format,
                "url": drafter.url,
                "bytes": drafter.bytes,
                "sha256": drafter.sha256,
                "tokenizer_digest": drafter.tokenizer_digest,
            }
            for drafter in drafters_of(target)
        ],
    }


def _tokenizing(service: CompletionService) -> APIRouter:
    router = APIRouter()

    @router.post("/tokenize", response_class=JSONResponse)
    async def tokenize(request: Request) -> Response:
        """Token ids of a prompt, as a completion would see them."""
        return TokenizeResponse(service, BodyKind.TOKENIZE, request)

    @router.post("/detokenize", response_class=JSONResponse)
    async def detokenize(request: Request) -> Response:
        """The text of token ids; special tokens have none."""
        return TokenizeResponse(service, BodyKind.DETOKENIZE, request)

    return router


_BODIES: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


def _with_any_of(schema: Any) -> Any:
    """The schema with anyOf for oneOf: kinds that their `type` tells apart may share all their fields."""
    if isinstance(schema, dict):
        return {("anyOf" if key == "oneOf" else key): _with_any_of(part) for key, part in schema.items()}
    return [_with_any_of(part) for part in schema] if isinstance(schema, list) else schema


@cache
def _body_schemas() -> Any:
    """The schemas of all bodies by name; to make them takes most of the time that an application takes."""
    modes: list[tuple[type[BaseModel], JsonSchemaMode]] = [
        (model, "validation") for model in _BODIES.values()
    ]
    _, described = models_json_schema(modes, ref_template="#/components/schemas/{model}")
    return _with_any_of(described["$defs"])


def _describe(app: FastAPI) -> None:
    """Complete the OpenAPI document: the routes read their bodies themselves, and refuse invalid ones."""
    made = app.openapi()
    made.setdefault("components", {})["schemas"] = _body_schemas()
    for path, model in _BODIES.items():
        reference = {"$ref": f"#/components/schemas/{model.__name__}"}
        operation = made["paths"][path]["post"]
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": reference}}}
        operation["responses"]["400"] = {"description": "A field is not what it may be."}
    for operations in made["paths"].values():
        for operation in operations.values():
            if operation["responses"].pop("422", None) is not None:
                operation["responses"]["400"] = {"description": "A field is not what it may be."}
