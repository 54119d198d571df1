"""What a request was answered, and what it was about, for middleware that writes it down."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Message, Scope, Send

__all__ = ["Answered", "acts_on", "subject_of"]

_SUBJECT = "kvstrata.subject"


class Answered:
    """Stands in for `send` and sees the HTTP status pass, 500 until then, and with it where what
    was made is, if anything was."""

    def __init__(self, send: Send) -> None:
        self.status = 500
        self.location = ""
        self._send = send

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.location = Headers(raw=message["headers"]).get("location", "")
        await self._send(message)


def acts_on(request: Request, subject: str) -> None:
    """For a route whose path doesn't say what it changes, and that makes nothing with a place of
    its own (`Location`). No secrets: it is kept, and shown."""
    request.scope[_SUBJECT] = subject


def subject_of(scope: Scope, answered: Answered) -> str:
    """A path: of what was made, what a route says, or where the request went."""
    return answered.location or scope.get(_SUBJECT) or str(scope["path"])
