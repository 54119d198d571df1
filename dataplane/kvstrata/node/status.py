"""How the tiers of a node are, in its own words: for `status`, heartbeats and metrics.

A tier may be anybody's code. One that can't tell of itself is reported as unhealthy; it must not
take the answer of the node with it. What the node has found out by using it comes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvstrata.node.guard import Guard
from kvstrata.node.store import Store
from kvstrata.tiers.base import Tier, Usage
from kvstrata.wire import TierStatus

__all__ = ["ailing_stores", "tier_statuses", "tier_trouble", "usage_of"]

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


def tier_trouble(guard: Guard) -> str:
    """What is wrong with a tier, by its node and by itself; empty: nothing. Never raises."""
    use = usage_of(guard.tier)
    return _trouble(guard, use)


def ailing_stores(guards: Sequence[Guard]) -> list[str]:
    """Ids of those in trouble."""
    return [g.store_id for g in guards if g.tier.writable and tier_trouble(g)]


def tier_statuses(store: Store) -> list[TierStatus]:
    """The host tier, and then the others in the order they are asked."""
    cascades = {cascade.guard: cascade for cascade in store.cascades}
    statuses = [_host_status(store)]
    for guard in store.guards:
        use = usage_of(guard.tier)
        counters = dict(use.counters)
        if guard in cascades:
            cascade = cascades[guard]
            counters |= {
                "cascade_dropped": cascade.dropped,
                "cascade_failed": cascade.failed,
                "cascade_waiting": cascade.waiting,
            }
        counters |= {
            "hits": store.counters.tier_hits[guard.name],
            "degraded": guard.breaker.trips,
            "overdue_calls": guard.overdue,
            "stuck_calls": guard.stuck_calls,
            "stuck_bytes": guard.stuck_bytes,
        }
        trouble = _trouble(guard, use)
        statuses.append(
            TierStatus(
                guard.name,
                use.used_bytes,
                use.capacity_bytes,
                use.chunks,
                not trouble,
                trouble or use.detail,
                counters,
            )
        )
    return statuses


def _trouble(guard: Guard, use: Usage) -> str:
    told = [guard.trouble]
    if not use.healthy:
        told.append(use.detail or "unhealthy")
    return "; ".join(filter(None, told))[:_MOST_DETAIL]


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
