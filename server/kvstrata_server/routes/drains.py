"""Nodes that are to be stopped."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from kvstrata import api
from kvstrata_server.problems import responses
from kvstrata_server.routes.parameters import NodeId, State

router = APIRouter(prefix="/v1/nodes", tags=["drains"])

OrderId = Annotated[str, Path(max_length=64, examples=["9f31c2a07be4d865"])]


@router.post(
    "/{node_id}/drain",
    summary="Make it safe to stop a node",
    status_code=202,
    responses=responses(404, 409, 503),
)
async def create_drain(node_id: NodeId, request: api.DrainRequest, state: State) -> api.DrainInfo:
    """The node takes no new chunks, and what only it holds is written back or moved to others.
    Accepted and kept; read it again until `may_stop`. Repeating it while it goes on is harmless;
    after its end it begins another."""
    return await state.drains.create(node_id, request)


@router.get(
    "/{node_id}/drain",
    summary="See whether a node may be stopped",
    responses=responses(404, 503),
)
async def get_drain(node_id: NodeId, state: State) -> api.DrainInfo:
    """The latest drain of the node: what was written back and moved, and what is left and why."""
    return await state.drains.get(node_id)


@router.delete(
    "/{node_id}/drain",
    summary="Have a node serve again",
    responses=responses(404, 503),
)
async def cancel_drain(node_id: NodeId, state: State) -> api.DrainInfo:
    """End the drain, also one after whose end the node still takes nothing new. What was written
    back and moved stays where it is."""
    return await state.drains.cancel(node_id)


@router.post(
    "/{node_id}/orders/{order_id}",
    summary="Report what a node wrote back",
    responses=responses(404, 410, 503),
)
async def post_store_result(
    node_id: NodeId, order_id: OrderId, result: api.StoreResult, state: State
) -> api.OrderReply:
    """A node says what became of the keys of a command `store`. Repeating it is harmless."""
    return state.drains.result(node_id, order_id, result)
