"""How much each tenant holds, counted from the index a little at a time.

A chunk counts with the bytes that its namespace says it has, whatever a tier makes of them
(compression, blocks of a disk), once for each *medium* that holds it:

    the host memory of each node that is up
    each store that a node that is up has attached, however many nodes share it

So what counts is what lookups offer. What a silent node holds is counted again when it is back.
But after a start nodes that nobody has heard yet count as if they were up, for as long as one may
be silent: else every tenant would seem to hold nothing.
Chunks of namespaces whose documents nobody has sent yet are counted for no tenant.

A medium of which nothing has changed is not counted again; one that has is, as a whole, in steps of
a millisecond between which everybody else has their turns. What that takes is in docs/quotas.md.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstrata_server.clock import Clock
from kvstrata_server.placement.cluster import Cluster
from kvstrata_server.placement.index import HOST, LocationId

__all__ = ["Held", "Medium", "Pace", "Share", "Usage"]

Counts = npt.NDArray[np.int64]

INTERVAL = 2.0
"""Seconds between two counts, or more where a count takes long."""
# At most this part of the event loop's time is spent on counting.
_SHARE = 0.04
_STEP = 0.001
_FAMILIES_PER_STEP = 1000


class Medium(NamedTuple):
    """The host memory of `node`, or a store, which is no single node's."""

    node: str = ""
    store: str = ""


@dataclass(slots=True)
class Held:
    """What a tenant holds. `tiers`: bytes by kind of tier, of which one is `host`."""

    bytes: int = 0
    chunks: int = 0
    tiers: dict[str, int] = field(default_factory=dict)


class Share(NamedTuple):
    """What a tenant holds at one medium. `sizes`: how the keys begin that it has there (namespace
    and group) -> bytes of a chunk."""

    nbytes: int
    chunks: int
    sizes: Mapping[bytes, int]


@dataclass(frozen=True, slots=True, eq=False)
class _Counted:
    """Chunks at a medium by family, when its locations had these revisions."""

    revisions: Sequence[tuple[LocationId, int]]
    families: Counts
    chunks: Counts


class Pace:
    """To be awaited between short steps: others have their turns whenever some were taken.
    `busy` is how many seconds of the processor the steps took."""

    def __init__(self) -> None:
        self.busy = 0.0
        self._since = time.thread_time()

    async def step(self) -> None:
        took = time.thread_time() - self._since
        if took >= _STEP:
            self.busy += took
            await asyncio.sleep(0)
            self._since = time.thread_time()


class Usage:
    """`run` (to be supervised) counts every few seconds; the rest tells what it found."""

    def __init__(self, cluster: Cluster, clock: Clock) -> None:
        self.counted_at: float | None = None
        """When the last count began; None before there is one."""
        self.tenants: Mapping[str, Held] = {}
        """Those that hold anything. The empty one: of namespaces that have none."""
        self.before: Callable[[Pace], Awaitable[Callable[[], None]]] | None = None
        """Awaited before each count; what it returns is called when the count is told."""
        self._cluster = cluster
        self._clock = clock
        self._counted: dict[Medium, _Counted] = {}
        self._one = asyncio.Lock()

    def of(self, tenant: str) -> Held:
        return self.tenants.get(tenant) or Held()

    @property
    def age(self) -> float | None:
        """Seconds since what is told here was so."""
        return None if self.counted_at is None else max(0.0, self._clock() - self.counted_at)

    async def run(self) -> None:
        while True:
            busy = await self.refresh()
            await asyncio.sleep(max(INTERVAL, busy / _SHARE))

    async def refresh(self) -> float:
        """Count now. Returns the seconds of work that it took."""
        async with self._one:
            pace, began = Pace(), self._clock()
            settle = None if self.before is None else await self.before(pace)
            counted = {}
            for medium, locations in self._media().items():
                counted[medium] = await self._count(medium, locations, pace)
            self._counted = counted
            self.tenants = await self._sum(pace)
            self.counted_at = began
            if settle is not None:
                settle()
            return pace.busy

    async def shares(self, tenant: str) -> dict[Medium, Share]:
        """Of a tenant, by medium that has anything of it, as of the last count."""
        by_medium = self._counted
        sizes = np.zeros(len(self._cluster.index.families), np.int64)
        pace = Pace()
        for first in range(0, len(sizes), _FAMILIES_PER_STEP):
            for number in range(first, min(first + _FAMILIES_PER_STEP, len(sizes))):
                owner, size = self._about(number)
                sizes[number] = size if owner == tenant else 0
            await pace.step()
        found: dict[Medium, Share] = {}
        families = self._cluster.index.families
        for medium, counted in by_medium.items():
            each = sizes[counted.families]
            here = np.flatnonzero(each)
            if len(here):
                found[medium] = Share(
                    int(each @ counted.chunks),
                    int(counted.chunks[here].sum()),
                    {families[int(counted.families[i])].prefix: int(each[i]) for i in here},
                )
            await pace.step()
        return found

    # ------------------------------------------------------------ inside

    def _media(self) -> dict[Medium, Sequence[LocationId]]:
        places = self._cluster.places
        media: dict[Medium, Sequence[LocationId]] = {}
        for node in (*self._cluster.up(), *self._cluster.awaited()):
            media[Medium(node=node.id)] = [places.location(node.id, None)]
            for store in node.stores:
                if Medium(store=store) not in media:
                    media[Medium(store=store)] = list(places.sharing(store))
        return media

    async def _count(self, medium: Medium, locations: Sequence[LocationId], pace: Pace) -> _Counted:
        index = self._cluster.index
        revisions = [(location, index.revision(location)) for location in locations]
        known = self._counted.get(medium)
        await pace.step()
        if known is not None and known.revisions == revisions:
            return known
        chunks = np.zeros(0, np.int64)
        for families in index.families_at(locations):
            part = np.bincount(families, minlength=len(chunks)).astype(np.int64)
            part[: len(chunks)] += chunks
            chunks = part
            await pace.step()
        families_there = np.flatnonzero(chunks)
        return _Counted(revisions, families_there, chunks[families_there])

    async def _sum(self, pace: Pace) -> dict[str, Held]:
        by_tier: dict[str, Counts] = {}
        families = len(self._cluster.index.families)
        for medium, counted in self._counted.items():
            tier = self._cluster.places.tier(medium.store) if medium.store else HOST
            if tier not in by_tier:
                by_tier[tier] = np.zeros(families, np.int64)
            by_tier[tier][counted.families] += counted.chunks
            await pace.step()
        held: dict[str, Held] = {}
        for tier, chunks in by_tier.items():
            for n, number in enumerate(np.flatnonzero(chunks).tolist()):
                owner, size = self._about(number)
                if owner is not None:
                    count = int(chunks[number])
                    of = held.setdefault(owner, Held())
                    of.chunks += count
                    of.bytes += count * size
                    of.tiers[tier] = of.tiers.get(tier, 0) + count * size
                if n % _FAMILIES_PER_STEP == 0:
                    await pace.step()
        return held

    def _about(self, family: int) -> tuple[str | None, int]:
        """Tenant and bytes of the chunks of a family; no tenant where its document lacks."""
        prefix = self._cluster.index.families[family].prefix
        return self._cluster.namespaces.tenant_and_size(prefix) if prefix else (None, 0)
