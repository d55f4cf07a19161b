"""TLS of a process's gRPC port: the certificate that it shows, and the callers that it accepts.

All processes of a deployment have certificates of one authority and accept no others. A process accepts calls
only from the roles that its own role works with (`CALLERS`).
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
"""Role in the certificates of people and programs that operate the services."""
CALLERS: Mapping[str, tuple[str, ...]] = {
    "verifier": ("orchestrator", OPERATOR),
    "drafter": ("verifier", "orchestrator", OPERATOR),
    "retrieval": ("verifier", "orchestrator", OPERATOR),
    "orchestrator": ("verifier", "drafter", "retrieval"),
}
"""Role of a service to the roles that may call it; health and reflection answer any certificate of the
authority. The orchestrator's callers are workers that register: its clients use another port."""
_OURS = "/outrider."
_NAMES = "x509_subject_alternative_name"
_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


@dataclass(frozen=True, slots=True)
class Listening:
    """Credentials, interceptors and options of a server's port."""

    credentials: grpc.ServerCredentials | None = None
    """TLS credentials; None: no encryption."""
    interceptors: Sequence[grpc.aio.ServerInterceptor] = ()
    options: Sequence[tuple[str, int | str]] = ()


def certificates(settings: ServiceSettings, *, serves: bool = True) -> Certificates | None:
    """Certificates of this process and its authority; None: no encryption. Raises InvalidRequest.

    `serves`: whether other services dial this process.
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
    """The port of a service that other services call, with the role check. Raises InvalidRequest."""
    shown = certificates(settings)
    if shown is None:
        return Listening()
    return Listening(server_credentials(shown, clients=True), (RoleCheck(CALLERS[settings.role]),))


def check_role(context: grpc.aio.ServicerContext[Any, Any], *roles: str) -> None:
    """Raises PermissionDenied unless the caller's certificate names one of these roles."""
    shown = {name.decode(errors="replace") for name in context.auth_context().get(_NAMES, ())}
    if shown.isdisjoint(map(role_name, roles)):
        wanted = " or ".join(map(role_name, sorted(roles)))
        raise PermissionDenied(f"the certificate shown names no role that may call here: {wanted}")


class RoleCheck(grpc.aio.ServerInterceptor):
    """Interceptor that refuses callers whose certificate names none of the roles."""

    def __init__(self, roles: Sequence[str]) -> None:
        self._roles = frozenset(roles)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The call's own handler, or one that refuses the caller."""
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
