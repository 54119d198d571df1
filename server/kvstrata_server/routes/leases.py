"""Keeping chunks in a node's host memory for a while."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Response

from kvstrata import api
from kvstrata.api import LeaseState
from kvstrata_server.examples.world import LEASE
from kvstrata_server.plane import ControlState
from kvstrata_server.problems import responses
from kvstrata_server.routes import transfers
from kvstrata_server.routes.parameters import IdempotencyKey, State, Who

router = APIRouter(prefix="/v1/leases", tags=["leases"])

LeaseId = Annotated[str, Path(max_length=64, examples=[LEASE])]


@router.post(
    "",
    summary="Keep chunks in a node's host memory",
    status_code=202,
    responses=responses(404, 409, 503, 507),
)
async def create_lease(
    request: api.LeaseRequest,
    response: Response,
    state: State,
    who: Who,
    idempotency_key: IdempotencyKey = None,
) -> api.LeaseInfo:
    """Ask a node to keep chunks in host memory. Read it again to see which it has got. To renew
    one, ask for another before it ends, and delete the first."""
    asked = api.TransferRequest(
        source="own",
        target=request.node,
        keys=request.keys,
        deadline=request.deadline,
        hold=request.ttl,
    )
    transfer = await transfers.create_transfer(asked, response, state, who, idempotency_key)
    response.headers["Location"] = f"/v1/leases/{transfer.id}"
    return await _lease(transfer.id, state)


@router.get(
    "/{lease_id}",
    summary="See what a lease holds",
    responses=responses(404, 503),
)
async def get_lease(lease_id: LeaseId, state: State, who: Who) -> api.LeaseInfo:
    """Whether it is held, until when, and which of its keys are."""
    await transfers.require_seen(lease_id, state, who)
    return await _lease(lease_id, state)


@router.delete(
    "/{lease_id}",
    summary="End a lease before its time",
    responses=responses(404, 503),
)
async def release_lease(lease_id: LeaseId, state: State, who: Who) -> api.LeaseInfo:
    """End it before its time. The node is told; one that can't be told lets it end by itself."""
    await transfers.cancel_transfer(lease_id, state, who)
    return await _lease(lease_id, state)


async def _lease(transfer_id: str, state: ControlState) -> api.LeaseInfo:
    info, until = await state.transfers.held(transfer_id)
    if not info.state.ended:
        lease = LeaseState.PENDING
    else:
        lease = LeaseState.HELD if until > state.clock() else LeaseState.ENDED
    return api.LeaseInfo(
        id=info.id,
        state=lease,
        node=info.target,
        expires=until or None,
        keys=info.keys,
    )
