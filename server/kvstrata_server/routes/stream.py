"""Changes as they happen, for those who keep an index of their own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from kvstrata.errors import Expired
from kvstrata_server.auth import standing_of
from kvstrata_server.batches import Families
from kvstrata_server.examples import example
from kvstrata_server.feed import Change, Feed, NodeChange, Placed, Voided
from kvstrata_server.index import HOST
from kvstrata_server.plane import ControlState
from kvstrata_server.problems import responses
from kvstrata_server.routes.parameters import State

router = APIRouter(prefix="/v1", tags=["events"])

Standing = Annotated[Callable[[], bool], Depends(standing_of)]

_CURSOR = r"^([0-9a-f]{1,32}:[0-9]{1,18})?$"
# Proxies close what is silent for longer.
_SILENCE = 10.0
# A reader that takes nothing for so long is dropped. It may come back for what it missed.
_STALL = 30.0
_MOST_KEYS = 5000

_STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Server-sent events",
        # Of all of them: what one is like can be said since OpenAPI 3.2.
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
}
_LINES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "One JSON document a line",
        "content": {"application/x-ndjson": {"schema": {"type": "string"}}},
    }
}


@router.get(
    "/events",
    summary="Follow who holds what",
    response_class=Response,
    responses={**responses(410), **_STREAM},
    openapi_extra=example("stream_events", kind="text/event-stream"),
)
async def stream_events(
    state: State,
    standing: Standing,
    last_event_id: Annotated[str | None, Header(pattern=_CURSOR, description="Cursor")] = None,
    since: Annotated[
        str | None,
        Query(pattern=_CURSOR, description="Cursor, where no header can be sent"),
    ] = None,
) -> Response:
    """Server-sent events from the cursor on, or from now on. The `id` of an event is its cursor:
    a reader that was cut off sends it in `Last-Event-ID` and misses nothing; 410 if that is too
    long ago. Events:

    - `placements`: `{node, location, removed, added}`: keys that left and then came to a location,
      `host` or the id of a store. Parts of one change follow each other, and the last has the id.
    - `voided`: `{node, location}`: nothing is there any more.
    - `node`: `{node, stores}`: in service with these stores (id -> tier); null: it has left.
    - `start`: `{}`: where the stream begins.

    Applying an event twice does no harm. A node that falls silent is not told of: see `/v1/nodes`.
    """
    asked = last_event_id or since
    cursor = asked or state.feed.cursor
    state.feed.number_of(cursor)
    return _EventStream(state.feed, cursor, state.index.families, standing)


@router.get(
    "/snapshot",
    summary="Read all placements at once",
    response_class=StreamingResponse,
    responses={**responses(), **_LINES},
    openapi_extra=example("take_snapshot", kind="application/x-ndjson"),
)
async def take_snapshot(state: State) -> StreamingResponse:
    """All placements, a JSON document a line: first `{cursor}`, from which `/v1/events` goes on,
    then `{node, stores}` for each node in service and `{node, location, keys}` in parts, last
    `{end: true}`. It need not be of one moment; with the events after the cursor it is true."""
    return StreamingResponse(_snapshot(state), media_type="application/x-ndjson")


async def _snapshot(state: ControlState) -> AsyncIterator[bytes]:
    yield _line({"cursor": state.feed.cursor})
    for node in list(state.cluster.nodes.values()):
        if not node.gone:
            yield _line({"node": node.id, "stores": node.stores})
    for location, keys in state.index.dump(_MOST_KEYS):
        try:
            node_id, store = state.places.describe(location)
        except KeyError:
            continue  # forgotten meanwhile: the events say so
        if keys:
            shown = {"node": node_id, "location": store or HOST, "keys": [k.hex() for k in keys]}
            yield _line(shown)
        await asyncio.sleep(0)
    yield _line({"end": True})


class _EventStream(Response):
    """Sends until the reader leaves, is lost, stops to read, or its token is none any more
    (`standing`); `feed.close` ends it, too."""

    def __init__(
        self, feed: Feed, cursor: str, families: Families, standing: Callable[[], bool]
    ) -> None:
        super().__init__(
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )
        del self.headers["content-length"]
        self._feed = feed
        self._cursor = cursor
        self._families = families
        self._standing = standing

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
        async def say(text: str, more: bool = True) -> None:
            async with asyncio.timeout(_STALL):
                await send({"type": "http.response.body", "body": text.encode(), "more_body": more})

        await say(_event("start", {}, self._cursor))
        while not self._feed.closed and self._standing():
            try:
                found = self._feed.after(self._cursor)
            except Expired:
                break  # too slow: it will be told when it comes back
            if found is None:
                before = self._feed.cursor
                await self._feed.wait(_SILENCE)
                if self._feed.cursor == before and not self._feed.closed:
                    await say(": nothing new\n\n")
                continue
            number, change = found
            self._cursor = self._feed.cursor_at(number)
            for text in _texts(change, self._cursor, self._families):
                await say(text)
        await say("", more=False)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _texts(change: Change, cursor: str, families: Families) -> Iterator[str]:
    """One change as events; the last bears the cursor."""
    if isinstance(change, NodeChange):
        yield _event("node", {"node": change.node, "stores": change.stores}, cursor)
    elif isinstance(change, Voided):
        yield _event("voided", {"node": change.node, "location": change.location}, cursor)
    else:
        parts = [*_parts(change, "removed", families), *_parts(change, "added", families)]
        for n, part in enumerate(parts, 1):
            yield _event("placements", part, cursor if n == len(parts) else None)


def _parts(change: Placed, name: str, families: Families) -> Iterator[dict[str, Any]]:
    batch = change.removed if name == "removed" else change.added
    for start in range(0, len(batch), _MOST_KEYS):
        part = slice(start, start + _MOST_KEYS)
        keys = families.keys(batch.families[part], batch.words[part])
        yield {
            "node": change.node,
            "location": change.location,
            "removed": [],
            "added": [],
            name: [key.hex() for key in keys],
        }


def _event(kind: str, data: Any, cursor: str | None) -> str:
    mark = "" if cursor is None else f"id: {cursor}\n"
    return f"{mark}event: {kind}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"


def _line(document: Any) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"
