"""Binds each request over HTTP to what came with it, and tells its id: X-Request-Id, as sent or drawn."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.wire.origin import REQUEST_KEY, arrived, origin_of


class Origins:
    """Middleware around everything else, so that errors carry the id, too."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See above."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        origin = origin_of([(key.decode("latin-1"), value) for key, value in scope["headers"]])
        arrived(origin)
        header = (REQUEST_KEY.encode(), origin.request.encode())

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        await self._app(scope, receive, tell)
