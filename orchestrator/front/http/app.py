"""The routes of the HTTP API."""

from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

import outrider
from orchestrator.fleet.target_model import TargetModel
from orchestrator.front.admission import encode_prompt
from orchestrator.front.auth import Gate
from orchestrator.front.http.chat import render_conversation
from orchestrator.front.http.completion_service import CompletionService
from orchestrator.front.http.errors import (
    FieldRefused,
    error_response,
    on_error,
    on_http_error,
    on_invalid_body,
)
from orchestrator.front.http.fields import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from orchestrator.front.http.middleware import AuthMiddleware, BodyLimitMiddleware, caller_of
from orchestrator.front.http.responses import CompletionResponse
from outrider.tokens import TokenTable
from speculative.errors import InvalidRequest, OutriderError, Unavailable


def make_app(service: CompletionService, gate: Gate, max_body_bytes: int) -> FastAPI:
    """The application. Every response that reports an error has OpenAI's shape."""
    app = FastAPI(title="Outrider", version=outrider.__version__, docs_url=None, redoc_url=None)
    app.include_router(_completions(service))
    app.include_router(_models(service))
    app.include_router(_tokenizing(service))
    app.add_exception_handler(RequestValidationError, on_invalid_body)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(OutriderError, on_error)
    app.add_exception_handler(Exception, on_error)
    app.add_middleware(BodyLimitMiddleware, most_bytes=max_body_bytes)
    app.add_middleware(AuthMiddleware, gate=gate)  # the last one is the first to see a request
    _describe(app)
    return app


def _completions(service: CompletionService) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions", response_class=JSONResponse)
    async def completions(asked: CompletionRequest, request: Request) -> Response:
        """Complete one text, or several."""
        return await _respond(service, asked, request)

    @router.post("/v1/chat/completions", response_class=JSONResponse)
    async def chat_completions(asked: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        return await _respond(service, asked, request)

    return router


async def _respond(
    service: CompletionService, body: CompletionRequest | ChatRequest, request: Request
) -> Response:
    try:
        return CompletionResponse(service, await service.job(body, caller_of(request)))
    except FieldRefused:
        raise
    except InvalidRequest as error:
        if isinstance(body, ChatRequest) and str(error).startswith(("the prompt", "there is no prompt")):
            raise FieldRefused("messages", str(error)) from error
        raise


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

    @router.post("/tokenize")
    async def tokenize(asked: TokenizeRequest) -> dict[str, Any]:
        """Token ids of a prompt, as a completion would see them."""
        target = service.target(asked.model)
        text, special = await _text_of(asked, target)
        ids = await encode_prompt(text, target, add_special=special) if text else []
        answer: dict[str, Any] = {"count": len(ids), "max_model_len": target.max_length, "tokens": ids}
        if asked.return_token_strs:
            answer["token_strs"] = [_tokens(target).token(id_) for id_ in ids]
        return answer

    @router.post("/detokenize")
    async def detokenize(asked: DetokenizeRequest) -> dict[str, str]:
        """The text of token ids; special tokens have none."""
        target = service.target(asked.model)
        tokens = _tokens(target)
        for at, id_ in enumerate(asked.tokens):
            if id_ >= target.vocabulary_size:
                what = f"tokens[{at}] is {id_}; ids are below {target.vocabulary_size}"
                raise FieldRefused(f"tokens[{at}]", what)
        return {"prompt": b"".join(map(tokens.token_bytes, asked.tokens)).decode("utf-8", "replace")}

    return router


async def _text_of(body: TokenizeRequest, target: TargetModel) -> tuple[str, bool]:
    """The text to tokenize, and whether the tokenizer adds its special tokens."""
    special = body.add_special_tokens
    if body.messages is None:
        if body.prompt is None:
            raise FieldRefused("prompt", "prompt is missing; give it, or messages")
        if body.add_generation_prompt is not None:
            raise FieldRefused("add_generation_prompt", "add_generation_prompt is given without messages")
        return body.prompt, special is not False
    if body.prompt is not None:
        raise FieldRefused("prompt", "prompt is given beside messages; give one of them")
    messages = [message.plain() for message in body.messages]
    follows = body.add_generation_prompt is not False
    return await render_conversation(target, messages, add_generation_prompt=follows), bool(special)


def _tokens(target: TargetModel) -> TokenTable:
    if target.tokens is None:
        raise FieldRefused("model", f"model {target.name!r} has no tokenizer")
    return target.tokens


def _describe(app: FastAPI) -> None:
    """Correct the OpenAPI document: invalid bodies are refused with 400 here, not with the usual 422."""
    made = app.openapi()
    for operations in made["paths"].values():
        for operation in operations.values():
            if operation["responses"].pop("422", None) is not None:
                operation["responses"]["400"] = {"description": "A field is not what it may be."}
    for name in ("HTTPValidationError", "ValidationError"):
        made["components"]["schemas"].pop(name, None)
