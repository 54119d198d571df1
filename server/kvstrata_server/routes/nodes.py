"""What nodes say and are told, and what is known about them."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request

from kvstrata import api
from kvstrata.api.base import NO_NUL
from kvstrata_server.access.answered import acts_on
from kvstrata_server.examples.world import INCARNATION
from kvstrata_server.problems import Forbidden, responses
from kvstrata_server.routes.parameters import After, Limit, NodeId, State, Who

router = APIRouter(prefix="/v1/nodes", tags=["nodes"])

Incarnation = Annotated[
    str,
    Query(
        max_length=128,
        pattern=NO_NUL,
        description="The node's start id, as registered",
        examples=[INCARNATION],
    ),
]


@router.post(
    "",
    summary="Register a node",
    responses=responses(503),
)
async def register_node(
    registration: api.NodeRegistration, request: Request, state: State, who: Who
) -> api.RegistrationReply:
    """A node says that it is here. Repeating it is harmless; a new incarnation voids what the
    old one held in host memory."""
    acts_on(request, f"/v1/nodes/{registration.id}")
    if who.node is not None and who.node != registration.id:
        raise Forbidden(f"token {who.name!r} is for node {who.node!r}, not {registration.id!r}")
    state.follower.require_loaded()
    return state.cluster.register(registration)


@router.get(
    "",
    summary="List nodes and how they fare",
    responses=responses(),
)
async def list_nodes(state: State, after: After = None, limit: Limit = 100) -> api.NodeList:
    """All nodes ever registered, in order of their ids."""
    return state.cluster.page(after, limit)


@router.get(
    "/{node_id}",
    summary="See how one node fares",
    responses=responses(404),
)
async def get_node(node_id: NodeId, state: State) -> api.NodeInfo:
    """State, stores, use of host memory, and how long ago it was heard."""
    return state.cluster.info(state.cluster.known(node_id))


@router.delete(
    "/{node_id}",
    summary="Take a node out of service",
    responses=responses(404, 410, 503),
)
async def deregister_node(
    node_id: NodeId, state: State, incarnation: Incarnation | None = None
) -> api.NodeInfo:
    """Take a node out of service: what it holds in host memory is no longer offered. What it put
    into stores stays, for others that share them. A node that is alive registers again."""
    state.follower.require_loaded()
    return state.cluster.info(state.cluster.deregister(node_id, incarnation))


@router.put(
    "/{node_id}/heartbeat",
    summary="Say that a node is alive",
    responses=responses(404, 410),
)
async def put_heartbeat(
    node_id: NodeId, beat: api.HeartbeatRequest, state: State
) -> api.HeartbeatReply:
    """A node is alive, and how full it is."""
    await state.follower.catch_up(node_id, beat.incarnation)
    reply = state.reports.heartbeat(node_id, beat)
    reply.draining = state.drains.heard(node_id, beat)
    return reply


@router.post(
    "/{node_id}/reports",
    summary="Report which chunks came and went",
    responses=responses(404, 410, 503),
)
async def post_report(node_id: NodeId, report: api.Report, state: State) -> api.ReportReply:
    """Which chunks appeared at or left the locations of a node, since the report before."""
    await state.follower.catch_up(node_id, report.incarnation)
    return state.reports.report(node_id, report)


@router.get(
    "/{node_id}/commands",
    summary="Wait for what a node shall do",
    responses=responses(404, 410),
)
async def poll_commands(
    node_id: NodeId,
    incarnation: Incarnation,
    state: State,
    request: Request,
    wait: Annotated[
        float, Query(ge=0, le=api.MAX_WAIT, description="Seconds to wait for a command")
    ] = 0.0,
) -> api.CommandBatch:
    """What a node is asked to do: a long poll that is answered as soon as there is something."""
    await state.follower.catch_up(node_id, incarnation)
    return await state.transfers.commands(node_id, incarnation, wait, request.is_disconnected)


@router.post(
    "/{node_id}/progress",
    summary="Report how a transfer goes",
    responses=responses(403, 404, 410, 503),
)
async def post_progress(node_id: NodeId, progress: api.Progress, state: State) -> api.ProgressReply:
    """What became of a transfer's keys, so far or for good."""
    await state.follower.catch_up(node_id, progress.incarnation)
    return await state.transfers.progress(node_id, progress)
