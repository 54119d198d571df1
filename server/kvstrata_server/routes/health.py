"""Whether this process works, and what it counts."""

from __future__ import annotations

from fastapi import APIRouter, Response

from kvstrata import api
from kvstrata_server.problems import responses
from kvstrata_server.routes.parameters import State

router = APIRouter(tags=["health"])

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@router.get(
    "/healthz",
    summary="Check that the server is alive",
)
async def get_health(state: State) -> api.Health:
    """Alive, and the state of its background tasks. Always 200: restarting this process would not
    mend a database that takes no writes."""
    return state.health()


@router.get(
    "/readyz",
    summary="Check that the server takes requests",
    responses={503: {"model": api.Health, "description": "Not ready"}},
)
async def get_readiness(state: State, response: Response) -> api.Health:
    """Whether requests should be sent here: 503 while it starts, ends, or can't write to SQL."""
    health = state.health()
    if not state.ready or health.status != "ok":
        response.status_code = 503
    return health


@router.get(
    "/metrics",
    summary="Scrape metrics",
    response_class=Response,
    responses={
        200: {
            "content": {"text/plain": {"schema": {"type": "string"}}},
            "description": "Prometheus",
        },
        **responses(),
    },
)
async def get_metrics(state: State) -> Response:
    """Counters and gauges as Prometheus text."""
    return Response(state.measure(), media_type=_METRICS_TYPE)
