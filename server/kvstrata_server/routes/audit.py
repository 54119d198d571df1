"""Who changed what."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from kvstrata import api
from kvstrata_server.access.audit import page
from kvstrata_server.problems import responses
from kvstrata_server.routes.parameters import Limit, State

router = APIRouter(prefix="/v1/audit", tags=["audit"])


@router.get(
    "",
    summary="Read who changed what",
    responses=responses(503),
)
async def list_audit(
    state: State,
    after: Annotated[
        int, Query(ge=0, le=(1 << 63) - 1, description="Cursor: `next` of the page before")
    ] = 0,
    limit: Limit = 100,
) -> api.AuditList:
    """Acts that changed state, oldest first: who, from where, what, and how it was answered."""
    return await page(state.database, after, limit)
