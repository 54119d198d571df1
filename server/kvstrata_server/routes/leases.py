"""Keeping chunks in a node's host memory for a while."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Path, Response

from kvstrata import api
from kvstrata.api import LeaseState
from kvstrata_server.examples.world import LEASE
from kvstrata_server.plane import ControlState
from kvstrata_server.problems import responses
from kvstrata_server.routes import transfers
from kvstrata_server.routes.parameters import IdempotencyKey, State, Who
from kvstrata_server.scheduling.shown import Shown

router = APIRouter(prefix="/v1/leases", tags=["leases"])

LeaseId = Annotated[str, Path(max_length=64, examples=[LEASE])]


@router.post(
    "",
    summary="Keep chunks in a node's host memory",
    status_code=202,
    response_model=api.LeaseInfo,
    responses=responses(404, 409, 503, 507),
)
async def create_lease(
    request: api.Lease, state: State, who: Who, idempotency_key: IdempotencyKey = None
) -> Response:
    """Ask a node to keep chunks in host memory. Read it again to see which it has got. To renew
    one, ask for another before it ends, and delete the first. Of token ids it is what an engine
    needs to go on after them: of a window the last chunks, of states one."""
    asked = api.TransferRequest.model_construct(
        source="own",
        target=request.node,
        keys=await transfers.asked_keys(request, state, who),
        deadline=request.deadline,
        hold=request.ttl,
    )
    made = await transfers.make(asked, state, who, idempotency_key)
    content = await _lease(made, state)
    return transfers.answer(content, 202, {"Location": f"/v1/leases/{made.id}"})


@router.get(
    "/{lease_id}",
    summary="See what a lease holds",
    response_model=api.LeaseInfo,
    responses=responses(404, 503),
)
async def get_lease(lease_id: LeaseId, state: State, who: Who) -> Response:
    """Whether it is held, until when, and which of its keys are."""
    await transfers.require_seen(lease_id, state, who)
    return transfers.answer(await _lease(await state.transfers.get(lease_id), state))


@router.delete(
    "/{lease_id}",
    summary="End a lease before its time",
    response_model=api.LeaseInfo,
    responses=responses(404, 503),
)
async def release_lease(lease_id: LeaseId, state: State, who: Who) -> Response:
    """End it before its time. The node is told; one that can't be told lets it end by itself."""
    await transfers.require_seen(lease_id, state, who)
    return transfers.answer(await _lease(await state.transfers.cancel(lease_id), state))


async def _lease(transfer: Shown, state: ControlState) -> bytes:
    """As an `api.LeaseInfo`."""
    until = transfer.holds_until
    if not transfer.state.ended:
        lease = LeaseState.PENDING
    else:
        lease = LeaseState.HELD if until > state.clock() else LeaseState.ENDED
    return msgspec.json.encode(
        {
            "id": transfer.id,
            "state": lease.value,
            "node": transfer.summary.target,
            "expires": until or None,
            "keys": await transfer.outcomes_json(),
        }
    )
