"""What many routes take: the server's parts, who asks, and parameters."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Header, Path, Query

from kvstrata import api
from kvstrata.api.base import NO_NUL
from kvstrata_server.access.auth import identity_of
from kvstrata_server.access.roles import Identity
from kvstrata_server.examples.world import SOURCE
from kvstrata_server.plane import ControlState, state_of

__all__ = ["PLANNED", "After", "IdempotencyKey", "Limit", "NodeId", "State", "Who"]

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
