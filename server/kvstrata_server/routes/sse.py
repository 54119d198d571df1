"""Server-sent events, as any route may answer them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import Depends
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from kvstrata_server.access.auth import standing_of

__all__ = ["NOTHING_NEW", "SILENCE", "STREAM", "EventStream", "Standing", "event"]

Standing = Annotated[Callable[[], bool], Depends(standing_of)]
"""Whether who asked still may: to be looked at before each event."""

SILENCE = 10.0
"""Seconds after which to say `NOTHING_NEW`: proxies close what is silent for longer."""
NOTHING_NEW = ": nothing new\n\n"
"""A comment, which readers skip."""
# A reader that takes nothing for so long is dropped. It may come back for what it missed.
_STALL = 30.0

STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Server-sent events",
        # Nothing of what it is like: some take a schema for that of all the text, as generators of
        # clients, and some for that of each event, as schemathesis and OpenAPI 3.2.
        "content": {"text/event-stream": {"schema": {}}},
    }
}


def event(kind: str, data: Any, cursor: str | None = None) -> str:
    """One event; `data` is what JSON knows."""
    mark = "" if cursor is None else f"id: {cursor}\n"
    return f"{mark}event: {kind}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"


class EventStream(Response):
    """Sends what `events` yields until that ends, or the reader leaves, is lost or stops to read;
    then `events` is closed."""

    def __init__(self, events: AsyncGenerator[str]) -> None:
        super().__init__(
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        leaving = asyncio.create_task(_left(receive))
        sending = asyncio.create_task(self._send(send))
        try:
            await asyncio.wait({leaving, sending}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (leaving, sending):
                task.cancel()
            ended = await asyncio.gather(leaving, sending, return_exceptions=True)
        if isinstance(ended[1], Exception) and not isinstance(ended[1], TimeoutError | OSError):
            raise ended[1]

    async def _send(self, send: Send) -> None:
        async def say(text: str, more: bool) -> None:
            async with asyncio.timeout(_STALL):
                await send({"type": "http.response.body", "body": text.encode(), "more_body": more})

        async with aclosing(self._events) as events:
            async for text in events:
                await say(text, True)
        await say("", False)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
