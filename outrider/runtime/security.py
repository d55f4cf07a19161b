"""How a process meets those who dial it: with which certificate, and whom of them it lets in.

Inside, every process shows a certificate of one authority and takes calls from others of it alone, each role
from those that have business with it (`CALLERS`).
"""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from outrider.runtime.settings import TLS, ServiceSettings
from outrider.wire.status import status_of
from outrider.wire.tls import Certificates, Files, role_name, server_credentials
from speculative.errors import InvalidRequest, PermissionDenied

OPERATOR = "operator"
"""The role of people and programs that look after the services."""
CALLERS: Mapping[str, tuple[str, ...]] = {
    "verifier": ("orchestrator", OPERATOR),
    "drafter": ("verifier", "orchestrator", OPERATOR),
    "retrieval": ("verifier", "orchestrator", OPERATOR),
    "orchestrator": ("verifier", "drafter", "retrieval"),
}
"""Who calls whom inside; health and reflection answer whoever has a certificate. An orchestrator's are those
who register; it meets clients at another port."""
_OURS = "/outrider."
_NAMES = "x509_subject_alternative_name"
_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


@dataclass(frozen=True, slots=True)
class Listening:
    """What a server's port is made with."""

    credentials: grpc.ServerCredentials | None = None
    """None: plain."""
    interceptors: Sequence[grpc.aio.ServerInterceptor] = ()
    options: Sequence[tuple[str, int | str]] = ()


def certificates(settings: ServiceSettings, *, serves: bool = True) -> Certificates | None:
    """What this process shows inside, and whom it believes; None: all is plain. Raises InvalidRequest.

    `serves`: others inside dial it.
    """
    files = Files(
        settings.tls_cert,
        settings.tls_key,
        settings.tls_ca,
        server=serves,
        own_ca=True,
    )
    if problem := TLS.problem(vars(settings)):
        raise InvalidRequest(str(problem))
    return None if files.cert is None else Certificates(files)


def inside(settings: ServiceSettings) -> Listening:
    """For services that others of the same authority call. Raises InvalidRequest."""
    shown = certificates(settings)
    if shown is None:
        return Listening()
    return Listening(server_credentials(shown, clients=True), (RoleCheck(CALLERS[settings.role]),))


def check_role(context: grpc.aio.ServicerContext[Any, Any], *roles: str) -> None:
    """Raises PermissionDenied where the caller's certificate names none of these roles."""
    shown = {name.decode(errors="replace") for name in context.auth_context().get(_NAMES, ())}
    if shown.isdisjoint(map(role_name, roles)):
        wanted = " or ".join(map(role_name, sorted(roles)))
        raise PermissionDenied(f"the certificate shown names no role that may call here: {wanted}")


class RoleCheck(grpc.aio.ServerInterceptor):
    """Refuses calls of those whose certificate names none of the roles."""

    def __init__(self, roles: Sequence[str]) -> None:
        self._roles = frozenset(roles)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(_OURS):
            return handler
        kind = next(kind for kind in _KINDS if getattr(handler, kind) is not None)
        return handler._replace(**{kind: self._checked(getattr(handler, kind))})

    def _checked(self, behaviour: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.isasyncgenfunction(behaviour):

            async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
                await self._check(context)
                async with aclosing(behaviour(request, context)) as responses:
                    async for response in responses:
                        yield response

            return stream

        async def call(request: Any, context: Any) -> Any:
            await self._check(context)
            return await behaviour(request, context)

        return call

    async def _check(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        try:
            check_role(context, *self._roles)
        except PermissionDenied as error:
            status = status_of(error)
            await context.abort(status.code, status.message, status.metadata)
