"""Tenants that hold more than their quotas: nodes are asked to give up what is coldest there.

Each place gives up a part of the excess that is as large as its part of what the tenant holds; a
store that nodes share is asked of one of them. Looked at after each count:

    the tenant holds                            then
    no more than its quota                      nothing
    more, and an eviction of it runs            nothing: what that brings is not known yet; of those
                                                that other servers asked for, too, but at first
    more, and one ended a moment ago            nothing: the count may not have it
    more, and some that was dropped is not      nothing, until the tenant holds so much less: else
    reported                                    it would be asked for twice; or for two minutes
    more, and the last one dropped nothing      later, twice as late each time: what is there is
                                                leased, or the nodes can't
    more                                        an eviction, until it is at `_AIM` of the quota

Of servers that share a database each asks the nodes that spoke to it last, by shares that all of
them work out alike: of what was counted before a server knew what the others were told it asks for
nothing. What is asked for is kept as an eviction, and goes on after a restart.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvstrata import api
from kvstrata.errors import Busy
from kvstrata_server.clock import Clock
from kvstrata_server.metrics import Metrics
from kvstrata_server.placement.cluster import Cluster, Node
from kvstrata_server.placement.index import HOST
from kvstrata_server.scheduling.evictions import Evictions, Shed
from kvstrata_server.tenancy.quotas import Quota, Quotas
from kvstrata_server.tenancy.usage import Medium, Share, Usage

__all__ = ["Shedding", "split"]

log = logging.getLogger(__name__)

_INTERVAL = 0.5
_AIM = 0.95
_DEADLINE = 30.0
# From the end of an eviction until a count has what was reported before, also where this server
# reads of that from another.
_UNTOLD = 2.0
_MOST_PATIENCE = 120.0


@dataclass(slots=True)
class _Last:
    """The last eviction of a tenant that this server asked for, and how long to wait after it.

    `held` chunks were counted when it was asked for. When it has `ended`, `untold` of them are
    gone, unless reports of all are known to be here. `in_vain`: rounds in a row that freed nothing.
    """

    eviction: str
    held: int
    patience: float = _UNTOLD
    ended: float | None = None
    untold: int = 0
    in_vain: int = 0


class Shedding:
    """`run` (to be supervised) looks after every count."""

    def __init__(
        self,
        cluster: Cluster,
        quotas: Quotas,
        usage: Usage,
        evictions: Evictions,
        metrics: Metrics,
        clock: Clock,
        shared: bool,
        current_since: Callable[[], float | None] = lambda: 0.0,
    ) -> None:
        """`shared`: other servers use the database, and ask their own nodes. `current_since()`:
        from when on this one knew all that those were told; None: it doesn't now."""
        self._cluster = cluster
        self._quotas = quotas
        self._usage = usage
        self._evictions = evictions
        self._metrics = metrics
        self._clock = clock
        self._shared = shared
        self._looked_at: float | None = None
        self._last: dict[str, _Last] = {}
        self._current_since = current_since
        self._elsewhere: set[str] = set()
        """Tenants of whose chunks nodes of other servers were to give some up at the last look."""

    async def run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(_INTERVAL)

    async def look(self) -> None:
        """Act on the last count, once."""
        counted = self._usage.counted_at
        if counted is None or counted == self._looked_at or self._cluster.awaited():
            return
        self._looked_at = counted
        since = self._current_since()
        if since is None or counted < since:
            return
        over = {q.tenant: q for q in self._quotas.all() if self._excess(q) > 0}
        self._last = {tenant: last for tenant, last in self._last.items() if tenant in over}
        self._elsewhere &= over.keys()
        try:
            for quota in over.values():
                if await self._may_ask(quota.tenant, counted):
                    await self._ask(quota)
        except Busy:
            return  # nothing can be asked for, or is known of what was: the next count is near

    def _excess(self, quota: Quota) -> int:
        most = quota.max_bytes
        return 0 if most is None else self._usage.of(quota.tenant).bytes - most

    async def _may_ask(self, tenant: str, counted: float) -> bool:
        last, held = self._last.get(tenant), self._usage.of(tenant).chunks
        asked = self._evictions.shedding(tenant)
        ours = {node for node in asked if self._is_ours(node)}
        # Reports come before the word that it is done, but this count may have been before both.
        elsewhere = asked > ours or tenant in self._elsewhere
        self._elsewhere.discard(tenant)
        if asked > ours:
            self._elsewhere.add(tenant)
        if ours:
            running = self._evictions.sheds_of(tenant)
            if running and (last is None or last.ended is not None):
                # From before this server's start, or by the server that the node was at then; or
                # SQL took it later than it was waited for.
                self._last[tenant] = _Last(max(running), held)
            return False
        if last is None:
            return True
        if elsewhere or (last.ended is None and not await self._note_end(last)):
            return False
        ended = last.ended or counted
        if last.untold and held > last.held - last.untold:
            return counted >= ended + _MOST_PATIENCE
        return counted >= ended + last.patience

    async def _note_end(self, last: _Last) -> bool:
        """What became of it; False: that is not known yet."""
        info = await self._evictions.kept(last.eviction)
        if info is not None and not info.state.ended:
            return False
        nodes = [] if info is None else info.nodes
        dropped = {node.node: sum((node.dropped or {}).values()) for node in nodes}
        last.ended = self._clock()
        if any(dropped[node.node] and not node.reported for node in nodes):
            last.untold = sum(dropped.values())
        last.patience = _UNTOLD if any(dropped.values()) else min(_MOST_PATIENCE, 2 * last.patience)
        last.in_vain = 0 if any(dropped.values()) else last.in_vain + 1
        if any(node.dropped is None for node in nodes):
            # Who did not say may have dropped some, and may be at it yet.
            last.patience = max(last.patience, _DEADLINE)
        return True

    async def _ask(self, quota: Quota) -> None:
        count, most = self._usage.of(quota.tenant), quota.max_bytes or 0
        held = count.bytes
        shares = await self._usage.shares(quota.tenant)
        asked: dict[str, Shed] = {}
        before = self._last.get(quota.tenant)
        in_vain = 0 if before is None else before.in_vain
        for medium, nbytes in split(held - math.floor(_AIM * most), shares, in_vain).items():
            node = self._node_of(medium)
            if node is not None and self._is_ours(node.id):
                shed = asked.setdefault(node.id, Shed({}, {}))
                shed.amounts[medium.store or HOST] = nbytes
                shed.sizes.update((p.hex(), size) for p, size in shares[medium].sizes.items())
        if not asked:
            return
        eviction = await self._evictions.shed(quota.tenant, asked, _DEADLINE)
        self._metrics.shed_requests.inc()
        log.info(
            "tenant %r holds %d bytes of %d: eviction %s has %d nodes give some up",
            api.tenant_name(quota.tenant),
            held,
            most,
            eviction.id,
            len(asked),
        )
        patience = _UNTOLD if before is None else before.patience
        self._last[quota.tenant] = _Last(eviction.id, count.chunks, patience, in_vain=in_vain)

    def _node_of(self, medium: Medium) -> Node | None:
        """Whom to ask: of those that share a store the same one for all servers."""
        if medium.node:
            return self._cluster.nodes.get(medium.node)
        sharing = [node for node in self._cluster.up() if medium.store in node.stores]
        return min(sharing, key=lambda node: (not node.healthy, node.id), default=None)

    def _is_ours(self, node_id: str) -> bool:
        """Whether it spoke to this server last. Not `home`: after a restart that is nobody's until
        the node has something to report."""
        node = self._cluster.nodes.get(node_id)
        if node is None or not self._shared:
            return node is not None
        return node.heard_here >= (node.last_seen or 0.0) > 0.0


def split(excess: int, shares: Mapping[Medium, Share], in_vain: int = 0) -> dict[Medium, int]:
    """How many bytes each should give up: in proportion, but whole chunks, the largest shares
    first, and in all less than a chunk more than `excess`. After some rounds `in_vain` others come
    first: what the largest have may all be leased."""
    held = sum(share.nbytes for share in shares.values())
    parts: dict[Medium, int] = {}
    left = excess
    order = sorted(shares.items(), key=lambda pair: (-pair[1].nbytes, pair[0]))
    first = in_vain % len(order) if order else 0
    for medium, share in order[first:] + order[:first]:
        if left <= 0:
            break
        chunk = share.nbytes / share.chunks
        fair = max(1, math.ceil(excess * share.nbytes / held / chunk))
        chunks = min(fair, math.ceil(left / chunk))
        parts[medium] = min(share.nbytes, math.ceil(chunks * chunk))
        left -= parts[medium]
    return parts
