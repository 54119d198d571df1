"""Reports and lookups as msgpack: the same operations by content type, past the JSON schema.

These routes come before those of the same paths and take a request only if it says that its body
is msgpack. Answers are JSON, as ever: they are small.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from kvstrata.bulk import (
    MEDIA_TYPE,
    BulkLookup,
    BulkModelLookup,
    BulkNamespaceLookup,
    BulkReport,
)
from kvstrata.errors import Malformed
from kvstrata_server.access.auth import authorize, identity_of
from kvstrata_server.lookups.lookup import look_up, look_up_prompts
from kvstrata_server.lookups.prompts import prompts_of
from kvstrata_server.plane import state_of
from kvstrata_server.routes.parameters import require_known

__all__ = ["ROUTES"]

T = TypeVar("T")

_report = msgspec.msgpack.Decoder(BulkReport)
_lookup = msgspec.msgpack.Decoder(BulkLookup)
_namespace_lookup = msgspec.msgpack.Decoder(BulkNamespaceLookup)
_model_lookup = msgspec.msgpack.Decoder(BulkModelLookup)
_fields = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])


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
    report = _decode(await request.body(), _report)
    state, node_id = state_of(request), request.path_params["node_id"]
    await state.follower.catch_up(node_id, report.incarnation)
    return _answer(state.reports.report(node_id, report))


async def _lookup_placements(request: Request) -> Response:
    asked = _asked(await request.body())
    state, who = state_of(request), identity_of(request)
    if not isinstance(asked, BulkLookup):
        seeds = state.settings.hash_seeds
        prompts = await prompts_of(state.namespaces, who, seeds, asked.tokens)
        found = await look_up_prompts(state.cluster, state.metrics, state.hot, asked, prompts)
        return _answer(found)
    if who.tenants is not None:
        state.namespaces.require_visible((run.namespace for run in asked.keys), who)
    return _answer(await look_up(state.cluster, state.metrics, state.hot, asked))


def _asked(body: bytes) -> BulkLookup | BulkNamespaceLookup | BulkModelLookup:
    """By keys or by token ids, as the fields say. Nearly all are by keys, and read once."""
    try:
        return _lookup.decode(body)
    except msgspec.DecodeError as e:
        fields = _fields_of(body)
        if "tokens" not in fields:
            raise _malformed(e) from e
    if "model" in _fields_of(fields["tokens"]):
        return _decode(body, _model_lookup)
    return _decode(body, _namespace_lookup)


def _fields_of(raw: bytes | msgspec.Raw) -> dict[str, msgspec.Raw]:
    try:
        return _fields.decode(raw)
    except msgspec.DecodeError:
        return {}


def _decode(body: bytes, decoder: msgspec.msgpack.Decoder[T]) -> T:
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as e:
        raise _malformed(e) from e


def _malformed(e: msgspec.DecodeError) -> Malformed:
    return Malformed(f"the request does not follow its schema: {e}")


def _answer(message: BaseModel) -> Response:
    return Response(message.model_dump_json(), media_type="application/json")


def _route(path: str, name: str, serve: Callable[[Request], Awaitable[Response]]) -> Route:
    async def checked(request: Request) -> Response:
        # What the app has routes of FastAPI depend on.
        await authorize(request)
        await require_known(request)
        return await serve(request)

    return _BulkRoute(path, checked, methods=["POST"], name=name)


ROUTES = [
    _route("/v1/nodes/{node_id}/reports", "post_report", _post_report),
    _route("/v1/placements:lookup", "lookup_placements", _lookup_placements),
]
