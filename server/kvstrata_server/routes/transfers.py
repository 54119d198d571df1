"""Scheduled movements of chunks."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Header, Path, Response

from kvstrata import api
from kvstrata_server.examples import example
from kvstrata_server.plane import ControlState, state_of
from kvstrata_server.problems import responses
from kvstrata_server.routes.paging import After, Limit

router = APIRouter(prefix="/v1/transfers", tags=["transfers"])

State = Annotated[ControlState, Depends(state_of)]
TransferId = Annotated[str, Path(max_length=64)]


@router.post(
    "",
    status_code=202,
    responses={
        200: {"model": api.TransferInfo, "description": "A dry run: the plan, not kept"},
        **responses(404, 409, 503),
    },
    openapi_extra=example("create_transfer", 202),
)
async def create_transfer(
    request: api.TransferRequest,
    response: Response,
    state: State,
    idempotency_key: Annotated[
        str | None,
        Header(
            min_length=1,
            max_length=255,
            description="The same key with the same request gives the same transfer",
        ),
    ] = None,
) -> api.TransferInfo:
    """Ask a node to fetch chunks from others. The answer is the transfer, accepted and kept; read
    it again for its outcome per key. Keys that nobody holds are outcomes, not errors."""
    transfer = await state.transfers.create(request, idempotency_key)
    if transfer.state is api.TransferState.PLANNED:
        response.status_code = 200
    else:
        response.headers["Location"] = f"/v1/transfers/{transfer.id}"
    return transfer


@router.get("", responses=responses())
async def list_transfers(state: State, after: After = None, limit: Limit = 100) -> api.TransferList:
    """Oldest first, with counts in place of keys."""
    return await state.transfers.page(after, limit)


@router.get("/{transfer_id}", responses=responses(404))
async def get_transfer(transfer_id: TransferId, state: State) -> api.TransferInfo:
    """State, and the outcome per key."""
    return await state.transfers.get(transfer_id)


@router.delete("/{transfer_id}", responses=responses(404, 503))
async def cancel_transfer(transfer_id: TransferId, state: State) -> api.TransferInfo:
    """Cancel it. One that has ended stays as it is."""
    return await state.transfers.cancel(transfer_id)
