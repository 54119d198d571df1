"""Who holds what."""

from __future__ import annotations

from fastapi import APIRouter

from kvstrata import api
from kvstrata_server.lookups.lookup import look_up, look_up_prompts
from kvstrata_server.lookups.prompts import prompts_of
from kvstrata_server.placement.cluster import digests_of
from kvstrata_server.problems import responses
from kvstrata_server.routes.parameters import After, Limit, State, Who

router = APIRouter(prefix="/v1", tags=["placements"])


@router.post(
    "/placements:lookup",
    summary="Find who holds a prefix",
    responses=responses(404),
)
async def lookup_placements(request: api.Lookup, state: State, who: Who) -> api.LookupReply:
    """For a chain of keys, or token ids that the server hashes as the engines do, the longest
    prefix that each node can serve, in all and per tier. Of models with several groups of layers
    it is one that an engine can go on from: of a window that takes the last chunks, of states one.
    Only nodes heard within their heartbeat TTL are offered, and each answer says how old it is."""
    if isinstance(request, api.TokenLookup):
        seeds = state.settings.hash_seeds
        prompts = await prompts_of(state.namespaces, who, seeds, request.tokens)
        return await look_up_prompts(state.cluster, state.metrics, state.hot, request, prompts)
    if who.tenants is not None:
        state.namespaces.require_visible(digests_of(request.keys), who)
    return await look_up(state.cluster, state.metrics, state.hot, request)


@router.get(
    "/namespaces",
    summary="List the namespaces that keys are of",
    responses=responses(),
)
async def list_namespaces(
    state: State, who: Who, after: After = None, limit: Limit = 100
) -> api.NamespaceList:
    """Documents behind the namespace digests that keys begin with, in order of the digests."""
    return state.namespaces.page(after, limit, who)
