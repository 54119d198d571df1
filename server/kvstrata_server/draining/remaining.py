"""What only one node holds, as the index has it: what is lost if that node is stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvstrata import api
from kvstrata.keys import Key
from kvstrata_server.placement.batches import Numbers, Words
from kvstrata_server.placement.cluster import Cluster, Node
from kvstrata_server.placement.index import Holders, LocationId

__all__ = ["OnlyHere", "Remaining"]

# Keys made at a time, where few of many are wanted.
_MADE = 1024


@dataclass(slots=True)
class OnlyHere:
    """Chunks that only the node holds, their bytes, and some of them, host memory's first."""

    chunks: int = 0
    bytes: int = 0
    some: list[Key] = field(default_factory=list)


class Remaining:
    """Of `node`, for a purpose, at this moment.

    A chunk is safe that another node can serve which is up, not drained itself, and has reported
    without a gap: from its host memory, whatever ails its tiers, or from a store that is not in
    trouble there. For a restart it is also safe in a store of the node's own that isn't in trouble
    at it. Chunks in host memory count, and where the node goes for good those in its stores.
    """

    def __init__(self, cluster: Cluster, node: Node, purpose: api.DrainPurpose) -> None:
        # Of a node that owes a snapshot it is known that what the index has is not so.
        self.others = [
            n for n in cluster.up() if n is not node and n.drain is None and not n.snapshot_wanted
        ]
        self.shared = {
            store for other in self.others for store in other.stores if store not in other.ailing
        }
        """Stores that others have attached and can read."""
        self.own = {store for store in node.stores if store not in node.ailing}
        """Those of its stores that the node can use."""
        self._cluster = cluster
        places = cluster.places
        self._host = [places.location(node.id, None)]
        self._stores = [
            location
            for store in node.stores
            if purpose == "removal" and store not in self.shared
            for location in places.sharing(store)
        ]
        self._serving = {other.id for other in self.others}
        self._safe_stores = self.shared | (self.own if purpose == "restart" else set())
        self._known: dict[LocationId, bool] = {}

    async def find(
        self, most: int = 0, wanted: Callable[[Key], bool] = lambda key: True
    ) -> OnlyHere:
        """All of it, in steps between which others have their turns; `most` of those keys are
        named that are `wanted`."""
        found = OnlyHere()
        host = set(self._host)
        for parts in (
            self._select(self._host, self._is_only_here),
            self._select(
                self._stores,
                lambda held: host.isdisjoint(held) and self._is_only_here(held),
            ),
        ):
            for families, words in parts:
                self._count(found, families)
                for start in range(0, len(families), _MADE):
                    if len(found.some) >= most:
                        break
                    part = slice(start, start + _MADE)
                    keys = self._cluster.index.families.keys(families[part], words[part])
                    found.some += filter(wanted, keys)
                    await asyncio.sleep(0)
                await asyncio.sleep(0)
        del found.some[most:]
        return found

    def safe(self, keys: Sequence[Key]) -> list[bool]:
        """Which of these chunks need this node no more, or are not here any more."""
        here = {*self._host, *self._stores}
        return [
            here.isdisjoint(held) or not self._is_only_here(held)
            for held in self._cluster.index.holders(keys)
        ]

    def _select(
        self, locations: Sequence[LocationId], wanted: Callable[[Holders], bool]
    ) -> Iterator[tuple[Numbers, Words]]:
        return self._cluster.index.select(locations, wanted)

    def _count(self, found: OnlyHere, families: Numbers) -> None:
        known, namespaces = self._cluster.index.families, self._cluster.namespaces
        counts = np.bincount(families)
        for family in np.flatnonzero(counts).tolist():
            count = int(counts[family])
            found.chunks += count
            found.bytes += count * namespaces.tenant_and_size(known[family].prefix)[1]

    def _is_only_here(self, held: Holders) -> bool:
        return not any(self._is_safe(location) for location in held)

    def _is_safe(self, location: LocationId) -> bool:
        safe = self._known.get(location)
        if safe is None:
            reporter, store = self._cluster.places.describe(location)
            safe = reporter in self._serving if store is None else store in self._safe_stores
            self._known[location] = safe
        return safe
