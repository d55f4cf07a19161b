"""The routes, and what they answer."""

from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

import outrider
from orchestrator.front.admission import Target
from orchestrator.front.gate import Gate
from orchestrator.front.http.chat import conversation
from orchestrator.front.http.completion_service import Desk
from orchestrator.front.http.doorkeeper import Doorkeeper, caller_of
from orchestrator.front.http.errors import (
    FieldRefused,
    error_response,
    on_error,
    on_http_error,
    on_invalid_body,
)
from orchestrator.front.http.fields import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from orchestrator.front.http.limits import BodyLimit
from orchestrator.front.http.responses import Answer
from outrider.tokens import TokenTable
from speculative.errors import InvalidRequest, OutriderError, Unavailable


def make_app(desk: Desk, gate: Gate, max_body_bytes: int) -> FastAPI:
    """The application; every answer that is no success has OpenAI's shape."""
    app = FastAPI(title="Outrider", version=outrider.__version__, docs_url=None, redoc_url=None)
    app.include_router(_completions(desk))
    app.include_router(_models(desk))
    app.include_router(_tokenizing(desk))
    app.add_exception_handler(RequestValidationError, on_invalid_body)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(OutriderError, on_error)
    app.add_exception_handler(Exception, on_error)
    app.add_middleware(BodyLimit, most_bytes=max_body_bytes)
    app.add_middleware(Doorkeeper, gate=gate)  # the last one is the first to see a request
    _describe(app)
    return app


def _completions(desk: Desk) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions", response_class=JSONResponse)
    async def completions(asked: CompletionRequest, request: Request) -> Response:
        """Go on with a text, or with several."""
        return await _answer(desk, asked, request)

    @router.post("/v1/chat/completions", response_class=JSONResponse)
    async def chat_completions(asked: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        return await _answer(desk, asked, request)

    return router


async def _answer(desk: Desk, asked: CompletionRequest | ChatRequest, request: Request) -> Response:
    try:
        return Answer(desk, await desk.job(asked, caller_of(request)))
    except FieldRefused:
        raise
    except InvalidRequest as error:
        if isinstance(asked, ChatRequest) and str(error).startswith(("the prompt", "there is no prompt")):
            raise FieldRefused("messages", str(error)) from error
        raise


def _models(desk: Desk) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        """What can be asked for."""
        return {"object": "list", "data": [_model(target) for target in desk.served()]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """One of them."""
        return _model(desk.target(name))

    @router.get("/health")
    async def health() -> Response:
        """Whether a request could be answered now."""
        if desk.served():
            return JSONResponse({"status": "ok"})
        return error_response(Unavailable("no verifier can be reached"))

    @router.get("/version")
    async def version() -> dict[str, str]:
        """Of this server."""
        return {"version": outrider.__version__}

    return router


def _model(target: Target) -> dict[str, Any]:
    return {
        "id": target.name,
        "object": "model",
        "created": 0,
        "owned_by": "outrider",
        "max_model_len": target.max_length,
    }


def _tokenizing(desk: Desk) -> APIRouter:
    router = APIRouter()

    @router.post("/tokenize")
    async def tokenize(asked: TokenizeRequest) -> dict[str, Any]:
        """Ids of a prompt, as a completion would see them."""
        target = desk.target(asked.model)
        text, special = await _text_of(asked, target)
        ids = await desk.encode(text, target, add_special=special) if text else []
        told: dict[str, Any] = {"count": len(ids), "max_model_len": target.max_length, "tokens": ids}
        if asked.return_token_strs:
            told["token_strs"] = [_tokens(target).token(id_) for id_ in ids]
        return told

    @router.post("/detokenize")
    async def detokenize(asked: DetokenizeRequest) -> dict[str, str]:
        """The text of ids; special ones have none."""
        target = desk.target(asked.model)
        tokens = _tokens(target)
        for at, id_ in enumerate(asked.tokens):
            if id_ >= target.vocabulary_size:
                what = f"tokens[{at}] is {id_}; ids are below {target.vocabulary_size}"
                raise FieldRefused(f"tokens[{at}]", what)
        return {"prompt": b"".join(map(tokens.token_bytes, asked.tokens)).decode("utf-8", "replace")}

    return router


async def _text_of(asked: TokenizeRequest, target: Target) -> tuple[str, bool]:
    """What is to be tokenized, and whether the tokenizer adds to it."""
    special = asked.add_special_tokens
    if asked.messages is None:
        if asked.prompt is None:
            raise FieldRefused("prompt", "prompt is missing; give it, or messages")
        if asked.add_generation_prompt is not None:
            raise FieldRefused("add_generation_prompt", "add_generation_prompt is given without messages")
        return asked.prompt, special is not False
    if asked.prompt is not None:
        raise FieldRefused("prompt", "prompt is given beside messages; give one of them")
    plain = [message.plain() for message in asked.messages]
    follows = asked.add_generation_prompt is not False
    return await conversation(target, plain, add_generation_prompt=follows), bool(special)


def _tokens(target: Target) -> TokenTable:
    if target.tokens is None:
        raise FieldRefused("model", f"model {target.name!r} has no tokenizer")
    return target.tokens


def _describe(app: FastAPI) -> None:
    """The OpenAPI document: what the framework would refuse with 422 is refused with 400 here."""
    made = app.openapi()
    for operations in made["paths"].values():
        for operation in operations.values():
            if operation["responses"].pop("422", None) is not None:
                operation["responses"]["400"] = {"description": "A field is not what it may be."}
    for name in ("HTTPValidationError", "ValidationError"):
        made["components"]["schemas"].pop(name, None)
