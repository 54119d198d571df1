"""How the tiers of a node are, in its own words: for `status`, heartbeats and metrics.

A tier may be anybody's code. One that can't tell of itself is reported as unhealthy; it must not
take the answer of the node with it.
"""

from __future__ import annotations

from typing import Any

from kvstrata.node.store import Store
from kvstrata.tiers.base import Tier, Usage
from kvstrata.wire import TierStatus

__all__ = ["tier_statuses", "usage_of"]

_MOST = 1 << 63
_MOST_DETAIL = 2000


def usage_of(tier: Tier) -> Usage:
    """`tier.usage()` in plain numbers and text. Never raises."""
    try:
        use = tier.usage()
        return Usage(
            used_bytes=_count(use.used_bytes),
            chunks=_count(use.chunks),
            capacity_bytes=None if use.capacity_bytes is None else _count(use.capacity_bytes),
            healthy=bool(use.healthy),
            detail=str(use.detail)[:_MOST_DETAIL],
            counters={str(name): _count(n) for name, n in dict(use.counters).items()},
        )
    except Exception as e:
        detail = f"its usage() does not work: {type(e).__name__}: {e}"
        return Usage(0, 0, healthy=False, detail=detail[:_MOST_DETAIL])


def tier_statuses(store: Store) -> list[TierStatus]:
    """The host tier, and then the others in the order they are asked."""
    cascades = {cascade.tier: cascade for cascade in store.cascades}
    statuses = [_host_status(store)]
    for tier in store.tiers:
        use = usage_of(tier)
        counters = dict(use.counters)
        if tier in cascades:
            cascade = cascades[tier]
            counters |= {
                "cascade_dropped": cascade.dropped,
                "cascade_failed": cascade.failed,
                "cascade_waiting": cascade.waiting,
            }
        counters["hits"] = store.counters.tier_hits[tier.name]
        statuses.append(
            TierStatus(
                tier.name,
                use.used_bytes,
                use.capacity_bytes,
                use.chunks,
                use.healthy,
                use.detail,
                counters,
            )
        )
    return statuses


def _host_status(store: Store) -> TierStatus:
    host = store.host
    usage = host.usage()
    return TierStatus(
        "host",
        usage.used,
        usage.capacity,
        usage.chunks,
        True,
        "",
        {
            "evicted": host.evicted,
            "expired_leases": host.expired_leases,
            "expired_writes": host.expired_writes,
            "granted_bytes": usage.granted,
            "quarantined_bytes": usage.quarantined,
            "largest_free_bytes": usage.largest_free,
            "leases": usage.leases,
        },
    )


def _count(value: Any) -> int:
    count = int(value)
    if not 0 <= count < _MOST:
        raise ValueError(f"{count} counts nothing")
    return count
