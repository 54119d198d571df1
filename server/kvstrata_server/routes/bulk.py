"""Reports and lookups as msgpack: the same operations by content type, past the JSON schema.

These routes come before those of the same paths and take a request only if it says that its body
is msgpack. Answers are JSON, as ever: they are small.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from kvstrata.bulk import MEDIA_TYPE, BulkLookup, BulkReport
from kvstrata.errors import Malformed
from kvstrata_server.auth import authorize, identity_of
from kvstrata_server.lookup import look_up
from kvstrata_server.plane import state_of

__all__ = ["ROUTES"]

T = TypeVar("T")

_report = msgspec.msgpack.Decoder(BulkReport)
_lookup = msgspec.msgpack.Decoder(BulkLookup)


class _BulkRoute(Route):
    """Of a path, what is sent as msgpack."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if scope["type"] != "http":
            return Match.NONE, {}
        kind = Headers(scope=scope).get("content-type", "").partition(";")[0].strip().lower()
        if kind not in (MEDIA_TYPE, "application/x-msgpack"):
            return Match.NONE, {}
        match, child = super().matches(scope)
        return (match, {**child, "route": self}) if match is Match.FULL else (Match.NONE, {})


async def _post_report(request: Request) -> Response:
    report = await _decoded(request, _report)
    return _answer(state_of(request).cluster.report(request.path_params["node_id"], report))


async def _lookup_placements(request: Request) -> Response:
    asked = await _decoded(request, _lookup)
    state, who = state_of(request), identity_of(request)
    if who.tenants is not None:
        state.namespaces.require_visible((run.namespace for run in asked.keys), who)
    return _answer(look_up(state.cluster, state.metrics, state.hot, asked))


async def _decoded(request: Request, decoder: msgspec.msgpack.Decoder[T]) -> T:
    await authorize(request)
    try:
        return decoder.decode(await request.body())
    except msgspec.DecodeError as e:
        raise Malformed(f"the request does not follow its schema: {e}") from e


def _answer(message: BaseModel) -> Response:
    return Response(message.model_dump_json(), media_type="application/json")


def _route(path: str, name: str, serve: Callable[[Request], Awaitable[Any]]) -> Route:
    return _BulkRoute(path, serve, methods=["POST"], name=name)


ROUTES = [
    _route("/v1/nodes/{node_id}/reports", "post_report", _post_report),
    _route("/v1/placements:lookup", "lookup_placements", _lookup_placements),
]
