"""The one place where tiers meet: lookup, promotion, cascade.

Runs on the node's event loop. Lookups answer at once with what the host tier has; what it has
not is looked for in the secondary tiers, in order, by a task, and settled by a callback: ready
and leased to who asked, or a miss. One promotion of a chunk serves everyone who waits for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Literal

from kvstrata.config import CascadeMode, HostSettings
from kvstrata.errors import ConfigError, Malformed
from kvstrata.host import Chunk, HostTier, State
from kvstrata.keys import DIGEST_BYTES, Key
from kvstrata.node.breaker import Kind
from kvstrata.node.cascade import Cascade
from kvstrata.node.guard import GRACE, LOOKUP_SECONDS, Guard
from kvstrata.node.namespaces import Namespaces
from kvstrata.node.placements import Placements
from kvstrata.node.promotion import FROM_TIER, Promotions, came_from
from kvstrata.node.waits import Counters, Settle, Waits
from kvstrata.policies import open_policy
from kvstrata.slots import Slots
from kvstrata.tiers.base import Item, Tier

__all__ = ["Store"]

_log = logging.getLogger(__name__)

_DROP_KEYS = 1024


class Store:
    """Host tier and secondary tiers as one. `region` is the writable byte view of the region."""

    def __init__(
        self,
        region: memoryview,
        settings: HostSettings,
        namespaces: Namespaces,
        clock: Callable[[], float],
    ) -> None:
        self.region = region
        self.settings = settings
        self.namespaces = namespaces
        self.counters = Counters()
        self.placements = Placements()
        self.guards: list[Guard] = []
        self.cascades: list[Cascade] = []
        self.clock = clock
        self.draining = False
        """Whether engines and transfers may bring no new chunks into host memory."""
        self.host = HostTier(
            Slots(len(region)),
            open_policy(settings.policy, len(region)),
            clock,
            reserve_ttl=settings.reserve_ttl,
            on_ready=self._on_ready,
            on_gone=self._on_gone,
        )
        self._waits = Waits(self.host, self.counters, settings.lease_ttl)
        self._promotions = Promotions(
            region, self.host, self.guards, self._waits, namespaces, self.counters, clock
        )

    def attach(
        self,
        tier: Tier,
        cascade: CascadeMode = "write_through",
        *,
        kind: str = "",
        grace: float = GRACE,
        lookup_deadline: float = LOOKUP_SECONDS,
    ) -> None:
        """Add a secondary tier behind those attached before; see `Guard` for the rest. Raises
        `ConfigError` on a clash."""
        if any(g.store_id == tier.store_id for g in self.guards):
            raise ConfigError(f"tier {tier.name} with store {tier.store_id} is configured twice")
        if tier.name in {"host", *(g.name for g in self.guards)}:
            raise ConfigError(f"two tiers are called {tier.name}: give one of them a `name`")
        guard = Guard(
            tier,
            self.clock,
            kind=kind,
            grace=grace,
            lookup_deadline=lookup_deadline,
            on_error=self._count_error,
        )
        self.guards.append(guard)
        self.counters.tier_hits.setdefault(tier.name, 0)
        budget = int(len(self.region) * self.settings.promotion_budget)
        for each in self.guards:
            each.budget.capacity = max(1, budget // len(self.guards))
        if tier.writable:
            here = (guard, self.host, self.item, self.placements, self.clock)
            self.cascades.append(Cascade(*here, cascade, self._cascade_share))

    @property
    def tiers(self) -> list[Tier]:
        """The secondary tiers, in the order they are asked."""
        return [guard.tier for guard in self.guards]

    def lost(self, tier: str, keys: Sequence[Key]) -> None:
        """The tier of that name dropped chunks by itself."""
        for cascade in self.cascades:
            if cascade.guard.name == tier:
                cascade.lost(keys)

    def item(self, chunk: Chunk) -> Item:
        """A chunk and its memory, for a tier or a transport."""
        view = self.region[chunk.offset : chunk.offset + chunk.nbytes]
        parent = self.host.parent_of(chunk.key)
        return Item(chunk.key, view, chunk.offset, chunk.checksum, parent)

    # ------------------------------------------------------------ lookup

    def lookup(
        self,
        owner: str,
        lease: int,
        keys: Sequence[Key],
        want: Literal["prefix", "all"],
        wait: float,
        settle: Settle,
    ) -> tuple[list[State], list[Chunk | None]]:
        """Find and lease chunks. `State.WRITING` means pending: `settle` is called for it within
        `wait` seconds. Raises `Missing` for keys of unknown namespaces."""
        if len(set(keys)) < len(keys):
            return self._lookup_repeated(owner, lease, keys, want, wait, settle)
        for key in keys:
            self.namespaces.size_of(key)
        found = self.host.lease(owner, lease, keys, self.settings.lease_ttl, want == "prefix")
        self.counters.asked += len(keys)
        missing = [key for key, chunk in zip(keys, found, strict=True) if chunk is None]
        if len(missing) < len(keys):
            for cascade in self.cascades:
                cascade.used(keys)
        self.counters.host_hits += len(keys) - len(missing)
        if not missing:
            return [State.READY] * len(keys), found
        pending, absent = self._split_missing(missing, want) if wait > 0 else ([], [])
        waiting = set(pending) | set(absent)
        self.counters.misses += sum(key not in waiting for key in missing)
        if waiting:
            self._waits.add(owner, lease, waiting.copy(), settle, wait)
        if absent:
            self._promotions.start(absent, want, self.clock() + wait)
        states = [
            State.READY if chunk else State.WRITING if key in waiting else State.ABSENT
            for key, chunk in zip(keys, found, strict=True)
        ]
        return states, found

    def _lookup_repeated(
        self,
        owner: str,
        lease: int,
        keys: Sequence[Key],
        want: Literal["prefix", "all"],
        wait: float,
        settle: Settle,
    ) -> tuple[list[State], list[Chunk | None]]:
        """`lookup` of keys some of which are named more than once: each counts once."""
        unique = list(dict.fromkeys(keys))
        states, found = self.lookup(owner, lease, unique, want, wait, settle)
        at = {key: i for i, key in enumerate(unique)}
        return [states[at[key]] for key in keys], [found[at[key]] for key in keys]

    async def find(
        self,
        owner: str,
        lease: int,
        keys: Sequence[Key],
        want: Literal["prefix", "all"],
        wait: float,
    ) -> dict[Key, Chunk]:
        """`lookup`, awaited: the chunks that are ready and leased after at most `wait` seconds."""
        done = asyncio.get_running_loop().create_future()
        chunks: dict[Key, Chunk] = {}
        left = 0

        def settle(settled: Sequence[Key], found: Sequence[Chunk | None]) -> None:
            nonlocal left
            left -= len(settled)
            chunks.update((k, c) for k, c in zip(settled, found, strict=True) if c is not None)
            if left <= 0 and not done.done():
                done.set_result(None)

        unique = list(dict.fromkeys(keys))
        states, found = self.lookup(owner, lease, unique, want, wait, settle)
        left = states.count(State.WRITING)
        chunks.update((k, c) for k, c in zip(unique, found, strict=True) if c is not None)
        if left:
            try:
                await done
            except asyncio.CancelledError:
                self.abandon(owner, lease)
                raise
        return chunks

    def abandon(self, owner: str, lease: int) -> None:
        """Nobody waits for this lease any more: end its waits, release what it holds."""
        self._waits.stop(owner, lease)
        self.host.release(owner, [lease])

    def stop_waiting(self, owner: str) -> None:
        """Nobody is there to be told of this owner's lookups."""
        self._waits.stop(owner)

    def forget(self, owner: str) -> None:
        """An owner is gone for certain: end its waits, leases, reads and writes."""
        self._waits.stop(owner)
        self.host.forget(owner)

    async def drop(
        self,
        tiers: Sequence[str],
        keys: Sequence[Key] | None,
        digests: Collection[bytes] = (),
    ) -> dict[str, int]:
        """Drop idle chunks from the named tiers: `keys` (None: all), and what they hold of the
        namespaces `digests`; how many, by tier. Raises `Malformed` on unknown tiers."""
        known = {"host"} | {guard.name for guard in self.guards}
        for name in tiers:
            if name not in known:
                raise Malformed(f"no tier {name!r} here: this node has {sorted(known)}")
        dropped: dict[str, int] = {}
        for guard in self.guards:
            if guard.name in tiers:
                victims = await _victims(guard.keys, keys, digests)
                dropped[guard.name] = sum(await guard.evict(victims))
        if "host" in tiers:
            dropped["host"] = 0
            victims = await _victims(self.host.keys, keys, digests)
            for start in range(0, len(victims), _DROP_KEYS):
                dropped["host"] += self.host.drop(victims[start : start + _DROP_KEYS])
                await asyncio.sleep(0)  # there may be millions, and engines wait
        return dropped

    async def quiesce(self, seconds: float = 10.0) -> None:
        """End cascades and promotions; each finishes the batch it is at, or is given up after
        `seconds`."""
        ending = asyncio.gather(
            *(cascade.close() for cascade in self.cascades),
            *self._promotions.tasks,
            return_exceptions=True,
        )
        await asyncio.wait({ending}, timeout=max(0.0, seconds))
        if not ending.done():
            for guard in self.guards:
                guard.give_up()
        for failed in await ending:
            if failed is not None:  # it has settled who waited, and must not keep tiers open
                _log.error("a promotion or cascade failed", exc_info=failed)

    async def close(self, seconds: float = 10.0) -> list[str]:
        """Close the tiers, in at most about `seconds`. Returns those of which something still
        runs: it may touch the region, which then must stay what it is."""
        began = self.clock()
        await self.quiesce(seconds / 2)
        left = max(seconds / 4, seconds - (self.clock() - began))
        closed = await asyncio.gather(*(guard.close(left) for guard in self.guards))
        stuck = [g.name for g, done in zip(self.guards, closed, strict=True) if not done]
        for guard in self.guards:
            if guard.name in stuck:
                _log.error("tier %s did not close in %g s", guard.name, seconds)
        return stuck

    def _split_missing(
        self, missing: Sequence[Key], want: Literal["prefix", "all"]
    ) -> tuple[list[Key], list[Key]]:
        """Of keys that are not ready: those on their way already, and those to look for."""
        pending, absent = [], []
        may_have = any(guard.allows(Kind.LOOKUP) for guard in self.guards)
        for key, state in zip(missing, self.host.find(missing), strict=True):
            if state is State.WRITING or key in self._promotions.sources:
                pending.append(key)
            elif may_have:
                absent.append(key)
            elif want == "prefix":
                break
        return pending, list(dict.fromkeys(absent))

    # ------------------------------------------------------------ what the host tier tells

    def _on_ready(self, chunks: Sequence[Chunk]) -> None:
        self.placements.added("host", [chunk.key for chunk in chunks])
        by_source: dict[str, list[Key]] = {}
        for chunk in chunks:
            by_source.setdefault(self._promotions.sources.pop(chunk.key, ""), []).append(chunk.key)
        for source, keys in by_source.items():
            self._waits.settle(keys, source)
        if not self.cascades:
            return
        fresh: list[Chunk] = []
        promoted: list[Chunk] = []
        for chunk in chunks:
            (promoted if chunk.owner.startswith(FROM_TIER) else fresh).append(chunk)
        for cascade in self.cascades:
            here = came_from(cascade.guard)
            others = [chunk for chunk in promoted if not chunk.owner.startswith(here)]
            cascade.arrived(fresh, used=False)
            cascade.arrived(others, used=True)

    def _on_gone(self, chunks: Sequence[Chunk]) -> None:
        gone = [c.key for c in chunks if c.state is State.READY]
        self.placements.removed("host", gone)
        for cascade in self.cascades:
            cascade.gone(gone)
        # A write that was given up: whoever waited for it waits in vain, unless it is being
        # promoted, and then that settles it.
        written = [c.key for c in chunks if c.state is State.WRITING]
        self._waits.settle([key for key in written if key not in self._promotions.sources])

    def _cascade_share(self) -> int:
        """What one batch to one tier may pin of the region: all of them a quarter."""
        return self.host.slots.capacity // (4 * max(1, len(self.cascades)))

    def _count_error(self) -> None:
        self.counters.tier_errors += 1


async def _victims(
    held: Callable[[], list[Key]], keys: Sequence[Key] | None, digests: Collection[bytes]
) -> Sequence[Key]:
    """`keys` (None: all that is held), each once, and those held of the namespaces `digests`."""
    if keys is None:
        return held()
    named = dict.fromkeys(keys)
    if not digests:
        return list(named)
    here = held()
    # Millions, maybe: in a thread, and key by key, so that the loop has its turns meanwhile.
    return [
        *named,
        *await asyncio.to_thread(
            lambda: [k for k in here if k[:DIGEST_BYTES] in digests and k not in named]
        ),
    ]
