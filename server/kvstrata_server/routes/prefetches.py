"""Bringing chunks up from a node's own tiers, before the request that needs them comes."""

from __future__ import annotations

from fastapi import APIRouter, Response

from kvstrata import api
from kvstrata_server.problems import responses
from kvstrata_server.routes import transfers
from kvstrata_server.routes.parameters import PLANNED, IdempotencyKey, State, Who

router = APIRouter(prefix="/v1/prefetches", tags=["transfers"])


@router.post(
    "",
    summary="Bring chunks up before they are needed",
    status_code=202,
    responses={**PLANNED, **responses(404, 409, 503, 507)},
)
async def create_prefetch(
    request: api.Prefetch,
    response: Response,
    state: State,
    who: Who,
    idempotency_key: IdempotencyKey = None,
) -> api.TransferInfo:
    """Ask a node to promote chunks from its own disks and stores into host memory, and to hold
    them there. It is a transfer whose source is `own`: read or cancel it as one."""
    kind = api.TransferRequest if isinstance(request, api.PrefetchRequest) else api.TokenTransfer
    asked = kind(source="own", target=request.node, **request.model_dump(exclude={"node"}))
    return await transfers.create_transfer(asked, response, state, who, idempotency_key)
