"""How much each tenant may hold and move, and what it does."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from kvstrata.api.base import MAX_INT, NUMBER, Answer, Request

__all__ = [
    "QuotaInfo",
    "QuotaList",
    "QuotaRequest",
    "TenantUse",
    "tenant_from_name",
    "tenant_name",
]

_NO_TENANT = "default"
_QUOTED = "~"


def tenant_name(tenant: str) -> str:
    """How a tenant is called in paths and answers: as it is in its namespaces' documents.

    Those that have none are `default`'s. A tenant that is really called that, or whose name
    begins with `~` or `.`, has a `~` before it.
    """
    if not tenant:
        return _NO_TENANT
    return _QUOTED + tenant if tenant == _NO_TENANT or tenant[0] in "~." else tenant


def tenant_from_name(name: str) -> str:
    """The other way round."""
    return "" if name == _NO_TENANT else name.removeprefix(_QUOTED)


class QuotaRequest(Request):
    """PUT /v1/quotas/{tenant}: all of a tenant's bounds. Those left out are none.

    `max_bytes`: of chunks held in the cluster, counted as in `TenantUse`. Of what would go past
    it, transfers, prefetches and leases bring nothing; what engines store beyond it makes nodes
    give up the tenant's coldest chunks, until it is at 95 %. `max_transfers` and
    `max_transfer_bytes`: under way at once; others wait for their turn, until their deadlines.
    """

    max_bytes: Annotated[int, Field(ge=0, le=MAX_INT), NUMBER] | None = None
    max_transfers: Annotated[int, Field(ge=1, le=MAX_INT), NUMBER] | None = None
    max_transfer_bytes: Annotated[int, Field(ge=1, le=MAX_INT), NUMBER] | None = None


class TenantUse(Answer):
    """A chunk counts with the bytes that its namespace says, at the host memory of each node that
    is up, and at each store that one of them has attached, however many nodes share it."""

    bytes: int
    chunks: int
    """A chunk in two places is two."""
    tiers: dict[str, int]
    """Bytes by kind of tier, of which one is `host`."""
    age: float | None
    """Seconds since that was so; None: nothing was counted yet."""
    transfers: int
    """Under way now, and so below."""
    transfer_bytes: int
    """That they ask for, as far as sizes are known."""


class QuotaInfo(Answer):
    tenant: str
    """As in the path: `default` is the tenant of namespaces that have none."""
    max_bytes: int | None = None
    max_transfers: int | None = None
    max_transfer_bytes: int | None = None
    changed: float | None = None
    """When the quota was set; None: it has none, and no bounds."""
    use: TenantUse
    eviction: str | None = None
    """Of what is given up because it holds too much, while that is under way."""


class QuotaList(Answer):
    quotas: list[QuotaInfo]
    next: str | None = None
