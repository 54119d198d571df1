"""How much tenants may hold and move, and what they do."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query

from kvstrata import api
from kvstrata.errors import Missing
from kvstrata_server.access.roles import Identity
from kvstrata_server.problems import Forbidden, responses
from kvstrata_server.routes.parameters import Limit, State, Who
from kvstrata_server.tenancy.tenants import LONGEST_NAME, NAME_PATTERN

router = APIRouter(prefix="/v1/quotas", tags=["quotas"])

# A path, since there is no rule against a slash in a tenant's name.
Tenant = Annotated[
    str,
    Path(
        min_length=1,
        max_length=LONGEST_NAME,
        pattern=NAME_PATTERN,
        description=(
            "As in the documents of its namespaces. `default` is the tenant of those that have "
            "none; one that is really called so, or whose name begins with `~` or `.`, is written "
            "with a `~` before it"
        ),
        examples=["acme"],
    ),
]
AfterTenant = Annotated[
    str | None, Query(max_length=LONGEST_NAME, description="Cursor: `next` of the page before")
]


@router.put(
    "/{tenant:path}",
    summary="Set a tenant's quota",
    responses=responses(503),
)
async def put_quota(tenant: Tenant, request: api.QuotaRequest, state: State) -> api.QuotaInfo:
    """Set all bounds of a tenant; what is left out has none. It holds at once here, and at other
    servers of the same database within two seconds."""
    of = api.tenant_from_name(tenant)
    await state.quotas.put(of, request)
    return state.tenants.info(of)


@router.get(
    "",
    summary="List tenants with their quotas and use",
    responses=responses(),
)
async def list_quotas(
    state: State, who: Who, after: AfterTenant = None, limit: Limit = 100
) -> api.QuotaList:
    """Tenants that have a quota or hold anything, in order of their names."""
    return state.tenants.page(after, limit, who.tenants)


@router.get(
    "/{tenant:path}",
    summary="See a tenant's quota and use",
    responses=responses(404),
)
async def get_quota(tenant: Tenant, state: State, who: Who) -> api.QuotaInfo:
    """Bounds, and what the tenant holds and moves now."""
    of = api.tenant_from_name(tenant)
    _require_own(of, who)
    info = state.tenants.info(of)
    if info.changed is None and not info.use.chunks:
        raise Missing(f"tenant {tenant!r} has no quota, and nothing that is known here")
    return info


@router.delete(
    "/{tenant:path}",
    summary="Delete a tenant's quota",
    responses=responses(404, 503),
)
async def delete_quota(tenant: Tenant, state: State) -> api.QuotaInfo:
    """Without one, a tenant has no bounds. What it holds stays."""
    of = api.tenant_from_name(tenant)
    await state.quotas.delete(of)
    return state.tenants.info(of)


def _require_own(tenant: str, who: Identity) -> None:
    if who.tenants is not None and tenant not in who.tenants:
        raise Forbidden(f"token {who.name!r} is for other tenants than this")
