"""What many routes take: the server's parts, who asks, and parameters."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Header, Path, Query, Request, params
from fastapi.dependencies.utils import get_flat_params
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute

from kvstrata import api
from kvstrata.api.base import NO_NUL
from kvstrata_server.access.auth import OPEN_PATHS, identity_of
from kvstrata_server.access.roles import Identity
from kvstrata_server.examples.world import SOURCE
from kvstrata_server.plane import ControlState, state_of

__all__ = ["PLANNED", "After", "IdempotencyKey", "Limit", "NodeId", "State", "Who", "require_known"]

State = Annotated[ControlState, Depends(state_of)]
Who = Annotated[Identity, Depends(identity_of)]

After = Annotated[
    str | None,
    Query(max_length=128, pattern=NO_NUL, description="Cursor: `next` of the page before"),
]
Limit = Annotated[int, Query(ge=1, le=1000, description="Most entries of a page")]
NodeId = Annotated[str, Path(max_length=128, examples=[SOURCE])]
IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=255,
        description="The same key with the same request gives the same answer",
        examples=["chat-4711-turn-3"],
    ),
]

PLANNED: dict[int | str, dict[str, Any]] = {
    200: {"model": api.TransferInfo, "description": "A dry run: the plan, not kept"}
}
"""Beside 202, of requests that may be dry runs."""

COMPATIBLE = "compatible"
"""Tag of routes whose clients are not ours, and may say more than we know."""


async def require_known(request: Request) -> None:
    """Dependency of every route. Raises `RequestValidationError` for a query parameter that it
    doesn't take: who misspells a filter would believe that all there is passed it. Not of
    `OPEN_PATHS`: nothing in their answers could be asked for, and probes add what they like."""
    if not request.scope["query_string"] or request.url.path in OPEN_PATHS:
        return
    route, known = request.scope.get("route"), set[str]()
    if isinstance(route, APIRoute):
        if COMPATIBLE in route.tags:
            return
        fields = get_flat_params(route.dependant)
        known = {field.alias for field in fields if isinstance(field.field_info, params.Query)}
    if unknown := sorted(request.query_params.keys() - known):
        takes = f"there are {', '.join(sorted(known))}" if known else "there is none at all"
        msg = f"no such parameter here: {takes}"
        raise RequestValidationError(
            [{"type": "extra_forbidden", "loc": ("query", name), "msg": msg} for name in unknown]
        )
