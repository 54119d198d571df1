"""Having nodes give chunks up."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Response

from kvstrata import api
from kvstrata_server.examples.world import EVICTION
from kvstrata_server.problems import responses
from kvstrata_server.routes.parameters import After, IdempotencyKey, Limit, NodeId, State

router = APIRouter(prefix="/v1", tags=["evictions"])

EvictionId = Annotated[str, Path(max_length=64, examples=[EVICTION])]


@router.post(
    "/evictions",
    summary="Have nodes drop chunks",
    status_code=202,
    responses=responses(404, 409, 503),
)
async def create_eviction(
    request: api.EvictionRequest,
    response: Response,
    state: State,
    idempotency_key: IdempotencyKey = None,
) -> api.EvictionInfo:
    """Ask nodes to drop chunks: some keys, a namespace, or all of a model. Accepted and kept; read
    it again for what each node dropped."""
    eviction = await state.evictions.create(request, idempotency_key)
    response.headers["Location"] = f"/v1/evictions/{eviction.id}"
    return eviction


@router.get(
    "/evictions",
    summary="List evictions",
    responses=responses(503),
)
async def list_evictions(state: State, after: After = None, limit: Limit = 100) -> api.EvictionList:
    """Oldest first."""
    return await state.evictions.page(after, limit)


@router.get(
    "/evictions/{eviction_id}",
    summary="See what an eviction dropped",
    responses=responses(404, 503),
)
async def get_eviction(eviction_id: EvictionId, state: State) -> api.EvictionInfo:
    """State, and what each node dropped."""
    return await state.evictions.get(eviction_id)


@router.post(
    "/nodes/{node_id}/evictions/{eviction_id}",
    summary="Report what a node dropped",
    responses=responses(404, 410, 503),
)
async def post_eviction_result(
    node_id: NodeId, eviction_id: EvictionId, result: api.EvictionResult, state: State
) -> api.EvictionInfo:
    """A node says what it dropped. Repeating it is harmless."""
    await state.follower.catch_up(node_id, result.incarnation)
    return await state.evictions.result(node_id, eviction_id, result)
