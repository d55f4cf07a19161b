"""The routes of the HTTP API."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

import outrider
from orchestrator.fleet.target_model import TargetModel
from orchestrator.front.auth import Gate
from orchestrator.front.http.bodies.bounds import BodyKind
from orchestrator.front.http.completion_service import CompletionService
from orchestrator.front.http.errors import error_response, on_error, on_http_error
from orchestrator.front.http.fields import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from orchestrator.front.http.middleware import AuthMiddleware, FramingMiddleware, OriginMiddleware
from orchestrator.front.http.reference_page import reference_page
from orchestrator.front.http.responses import CompletionResponse
from orchestrator.front.http.tokenizing import TokenizeResponse
from speculative.errors import OutriderError, Unavailable

SHOWN_TO_PAGES = ["x-request-id", "retry-after", "retry-after-ms"]
"""Headers of responses that web pages may read."""


def make_app(service: CompletionService, gate: Gate, origins: Sequence[str] = ()) -> FastAPI:
    """The application. Every response that reports an error has OpenAI's shape.

    Args:
        origins: origins of web pages that may call the API from a browser.
    """
    app = FastAPI(title="Outrider", version=outrider.__version__, docs_url=None, redoc_url=None)
    app.include_router(_completions(service))
    app.include_router(_models(service))
    app.include_router(_tokenizing(service))
    app.include_router(_documents(app))
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(OutriderError, on_error)
    app.add_exception_handler(Exception, on_error)
    app.add_middleware(AuthMiddleware, gate=gate)
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

    return router


def _models(service: CompletionService) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The models that can be asked for."""
        return {"object": "list", "data": [_model(target) for target in service.served()]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """One model."""
        return _model(service.target(name))

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


def _documents(app: FastAPI) -> APIRouter:
    router = APIRouter()

    @cache
    def page() -> str:
        return reference_page(app.openapi())

    @router.get("/docs", response_class=HTMLResponse, include_in_schema=False)
    async def docs() -> HTMLResponse:
        """The description of this API for readers."""
        return HTMLResponse(page())

    return router


def _model(target: TargetModel) -> dict[str, Any]:
    return {
        "id": target.name,
        "object": "model",
        "created": 0,
        "owned_by": "outrider",
        "max_model_len": target.max_length,
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
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


def _describe(app: FastAPI) -> None:
    """Complete the OpenAPI document: the routes read their bodies themselves, and refuse invalid ones."""
    made = app.openapi()
    modes: list[tuple[type[BaseModel], JsonSchemaMode]] = [
        (model, "validation") for model in _BODIES.values()
    ]
    _, described = models_json_schema(modes, ref_template="#/components/schemas/{model}")
    made.setdefault("components", {})["schemas"] = described["$defs"]
    for path, model in _BODIES.items():
        reference = {"$ref": f"#/components/schemas/{model.__name__}"}
        operation = made["paths"][path]["post"]
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": reference}}}
        operation["responses"]["400"] = {"description": "A field is not what it may be."}
    for operations in made["paths"].values():
        for operation in operations.values():
            if operation["responses"].pop("422", None) is not None:
                operation["responses"]["400"] = {"description": "A field is not what it may be."}
