"""What is told of tenants: their bounds, what they hold and what they move."""

from __future__ import annotations

import re
from collections.abc import Collection

from kvstrata import api
from kvstrata_server.metrics import Metrics
from kvstrata_server.scheduling.evictions import Evictions
from kvstrata_server.scheduling.turns import Turns
from kvstrata_server.tenancy.quotas import Quotas
from kvstrata_server.tenancy.usage import Usage

__all__ = ["LONGEST_NAME", "NAME_PATTERN", "Tenants"]

LONGEST_NAME = 255
NAME_PATTERN = r"^[^\x00-\x1f\x7f]+$"
"""Of names that can be asked for; documents of namespaces may hold any text."""
_nameable = re.compile(NAME_PATTERN)

_MOST_MEASURED = 100
# No tenant is called so: see `api.tenant_name`.
_OTHERS = "~others"


class Tenants:
    """Answers from the memory of the parts that know."""

    def __init__(self, quotas: Quotas, usage: Usage, turns: Turns, evictions: Evictions) -> None:
        self._quotas = quotas
        self._usage = usage
        self._turns = turns
        self._evictions = evictions

    def info(self, tenant: str) -> api.QuotaInfo:
        quota, held = self._quotas.get(tenant), self._usage.of(tenant)
        transfers, transfer_bytes = self._turns.of_tenant(tenant)
        return api.QuotaInfo(
            tenant=api.tenant_name(tenant),
            max_bytes=None if quota is None else quota.max_bytes,
            max_transfers=None if quota is None else quota.max_transfers,
            max_transfer_bytes=None if quota is None else quota.max_transfer_bytes,
            changed=None if quota is None else quota.changed,
            use=api.TenantUse(
                bytes=held.bytes,
                chunks=held.chunks,
                tiers=held.tiers,
                age=self._usage.age,
                transfers=transfers,
                transfer_bytes=transfer_bytes,
            ),
            eviction=next(iter(self._evictions.sheds_of(tenant)), None),
        )

    def page(
        self, after: str | None, limit: int, among: Collection[str] | None = None
    ) -> api.QuotaList:
        """Those that have a quota or hold anything, by name. `among` None: all of them."""
        named = {
            name: tenant
            for tenant in {*self._usage.tenants, *(quota.tenant for quota in self._quotas.all())}
            if among is None or tenant in among
            if len(name := api.tenant_name(tenant)) <= LONGEST_NAME and _nameable.fullmatch(name)
        }
        rest = sorted(name for name in named if after is None or name > after)
        return api.QuotaList(
            quotas=[self.info(named[name]) for name in rest[:limit]],
            next=rest[limit - 1] if len(rest) > limit else None,
        )

    def measure(self, metrics: Metrics) -> None:
        """Of a bounded number of tenants each by itself: those with quotas before others, and
        large ones before small ones."""
        held = {tenant: use.bytes for tenant, use in self._usage.tenants.items()}
        quotas = {quota.tenant: quota for quota in self._quotas.all()}
        order = sorted(
            held.keys() | quotas.keys(), key=lambda t: (t not in quotas, -held.get(t, 0), t)
        )
        metrics.tenant_bytes.clear()
        metrics.tenant_quota.clear()
        for tenant in order[:_MOST_MEASURED]:
            name = api.tenant_name(tenant)
            metrics.tenant_bytes.labels(name).set(held.get(tenant, 0))
            quota = quotas.get(tenant)
            if quota is not None and quota.max_bytes is not None:
                metrics.tenant_quota.labels(name).set(quota.max_bytes)
        if len(order) > _MOST_MEASURED:
            rest = sum(held.get(tenant, 0) for tenant in order[_MOST_MEASURED:])
            metrics.tenant_bytes.labels(_OTHERS).set(rest)
