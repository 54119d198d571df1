"""Bringing chunks up from a node's own tiers, before the request that needs them comes."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Header, Response

from kvstrata import api
from kvstrata_server.auth import identity_of
from kvstrata_server.examples import example
from kvstrata_server.plane import ControlState, state_of
from kvstrata_server.problems import responses
from kvstrata_server.roles import Identity
from kvstrata_server.routes import transfers

router = APIRouter(prefix="/v1/prefetches", tags=["transfers"])

State = Annotated[ControlState, Depends(state_of)]
Who = Annotated[Identity, Depends(identity_of)]


@router.post(
    "",
    status_code=202,
    responses={
        200: {"model": api.TransferInfo, "description": "A dry run: the plan, not kept"},
        **responses(404, 409, 503),
    },
    openapi_extra=example("create_prefetch", 202),
)
async def create_prefetch(
    request: api.PrefetchRequest,
    response: Response,
    state: State,
    who: Who,
    idempotency_key: Annotated[
        str | None,
        Header(
            min_length=1,
            max_length=255,
            description="The same key with the same request gives the same transfer",
        ),
    ] = None,
) -> api.TransferInfo:
    """Ask a node to promote chunks from its own disks and stores into host memory, and to hold
    them there. It is a transfer whose source is `own`: read or cancel it as one."""
    asked = api.TransferRequest(
        source="own", target=request.node, **request.model_dump(exclude={"node"})
    )
    return await transfers.create_transfer(asked, response, state, who, idempotency_key)
