"""Changes as they happen, for those who keep an index of their own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query
from fastapi.responses import Response, StreamingResponse

from kvstrata.errors import Expired
from kvstrata_server.placement.batches import Families
from kvstrata_server.placement.feed import Change, Feed, NodeChange, Placed, Voided
from kvstrata_server.placement.index import HOST
from kvstrata_server.plane import ControlState
from kvstrata_server.problems import responses
from kvstrata_server.routes.parameters import State
from kvstrata_server.routes.sse import NOTHING_NEW, SILENCE, STREAM, EventStream, Standing, event

router = APIRouter(prefix="/v1", tags=["events"])

_CURSOR = r"^([0-9a-f]{1,32}:[0-9]{1,18})?$"
_MOST_KEYS = 5000

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
    responses={**responses(410), **STREAM},
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
    return EventStream(_events(state.feed, cursor, state.index.families, standing))


@router.get(
    "/snapshot",
    summary="Read all placements at once",
    response_class=StreamingResponse,
    responses={**responses(), **_LINES},
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


async def _events(
    feed: Feed, cursor: str, families: Families, standing: Callable[[], bool]
) -> AsyncGenerator[str]:
    """Until the token is none any more (`standing`), or the feed is closed."""
    yield event("start", {}, cursor)
    while not feed.closed and standing():
        try:
            found = feed.after(cursor)
        except Expired:
            return  # too slow: it will be told when it comes back
        if found is None:
            before = feed.cursor
            await feed.wait(SILENCE)
            if feed.cursor == before and not feed.closed:
                yield NOTHING_NEW
            continue
        number, change = found
        cursor = feed.cursor_at(number)
        for text in _texts(change, cursor, families):
            yield text


def _texts(change: Change, cursor: str, families: Families) -> Iterator[str]:
    """One change as events; the last bears the cursor."""
    if isinstance(change, NodeChange):
        yield event("node", {"node": change.node, "stores": change.stores}, cursor)
    elif isinstance(change, Voided):
        yield event("voided", {"node": change.node, "location": change.location}, cursor)
    else:
        parts = [*_parts(change, "removed", families), *_parts(change, "added", families)]
        for n, part in enumerate(parts, 1):
            yield event("placements", part, cursor if n == len(parts) else None)


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


def _line(document: Any) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"
