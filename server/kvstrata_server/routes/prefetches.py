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
    response_model=api.TransferInfo,
    responses={**PLANNED, **responses(404, 409, 503, 507)},
)
async def create_prefetch(
    request: api.Prefetch, state: State, who: Who, idempotency_key: IdempotencyKey = None
) -> Response:
    """Ask a node to promote chunks from its own disks and stores into host memory, and to hold
    them there. It is a transfer whose source is `own`: read or cancel it as one."""
    asked = api.TransferRequest.model_construct(
        source="own",
        target=request.node,
        keys=await transfers.asked_keys(request, state, who),
        priority=request.priority,
        deadline=request.deadline,
        hold=request.hold,
        byte_budget=request.byte_budget,
        dry_run=request.dry_run,
    )
    return await transfers.accepted(await transfers.make(asked, state, who, idempotency_key))
