"""No request may fill the server's memory."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvstrata_server.problems import problem

__all__ = ["BodyLimit"]


class BodyLimit:
    """Middleware: 413 for a body over `most` bytes, whatever its headers claim.

    The body is read here, whole: routes take messages, which need all of it anyway.
    """

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._most = most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        too_large = problem(
            413, f"a request may have {self._most} bytes: send several smaller ones"
        )
        claimed = Headers(scope=scope).get("content-length", "0")
        if claimed.isdigit() and int(claimed) > self._most:
            await too_large(scope, receive, send)
            return
        body = bytearray()
        more = True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return  # gone before it finished asking
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self._most:
                await too_large(scope, receive, send)
                return
        whole: Message | None = {"type": "http.request", "body": bytes(body), "more_body": False}

        async def replay() -> Message:
            nonlocal whole
            if whole is not None:
                message, whole = whole, None
                return message
            return await receive()

        await self._app(scope, replay, send)
