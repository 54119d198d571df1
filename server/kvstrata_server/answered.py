"""What a request was answered, for middleware that writes it down."""

from __future__ import annotations

from starlette.types import Message, Send

__all__ = ["Answered"]


class Answered:
    """Stands in for `send` and sees the HTTP status pass; 500 until then."""

    def __init__(self, send: Send) -> None:
        self.status = 500
        self._send = send

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)
