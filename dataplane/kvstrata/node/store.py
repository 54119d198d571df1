"""The one place where tiers meet: lookup, promotion, cascade.

Runs on the node's event loop. Lookups answer at once with what the host tier has; what it has
not is looked for in the secondary tiers, in order, by a task, and settled by a callback: ready
and leased to who asked, or a miss. Promotions share a byte budget and one promotion of a chunk
serves everyone who waits for it. A wait that passes its deadline is a miss; the promotion goes
on, because its tier may still be writing to the slot.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Literal

from kvstrata.config import HostSettings
from kvstrata.errors import ConfigError, Malformed
from kvstrata.host import NO_ROOM, PRESENT, Chunk, HostTier, State
from kvstrata.keys import Key
from kvstrata.node.budget import Budget
from kvstrata.node.cascade import Cascade
from kvstrata.node.namespaces import Namespaces
from kvstrata.node.placements import Placements
from kvstrata.node.waits import Counters, Settle, Waits
from kvstrata.policies import open_policy
from kvstrata.slots import Slots
from kvstrata.tiers.base import Item, Outcome, Tier, complete

__all__ = ["Store"]

_log = logging.getLogger(__name__)

# One load of a tier: enough for its threads to be busy, small enough that the first chunks of a
# long prefix are readable while the rest is still on its way.
_BATCH_BYTES = 32 << 20


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
        self.tiers: list[Tier] = []
        self.cascades: list[Cascade] = []
        self.clock = clock
        self.host = HostTier(
            Slots(len(region)),
            open_policy(settings.policy, len(region)),
            clock,
            reserve_ttl=settings.reserve_ttl,
            on_ready=self._on_ready,
            on_gone=self._on_gone,
        )
        self._budget = Budget(int(len(region) * settings.promotion_budget))
        self._waits = Waits(self.host, self.counters, settings.lease_ttl)
        self._promoting: dict[Key, str] = {}
        self._loads = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def attach(self, tier: Tier) -> None:
        """Add a secondary tier behind those attached before. Raises `ConfigError` on a clash."""
        if any(t.store_id == tier.store_id for t in self.tiers):
            raise ConfigError(f"tier {tier.name} with store {tier.store_id} is configured twice")
        self.tiers.append(tier)
        self.counters.tier_hits.setdefault(tier.name, 0)
        if tier.writable:
            self.cascades.append(Cascade(tier, self.host, self.item, self.placements, self.clock))

    def item(self, chunk: Chunk) -> Item:
        """A chunk and its memory, for a tier or a transport."""
        view = self.region[chunk.offset : chunk.offset + chunk.nbytes]
        return Item(chunk.key, view, chunk.offset, chunk.checksum)

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
        self.counters.host_hits += len(keys) - len(missing)
        if not missing:
            return [State.READY] * len(keys), found
        pending, absent = self._split_missing(missing, want) if wait > 0 else ([], [])
        waiting = set(pending) | set(absent)
        self.counters.misses += sum(key not in waiting for key in missing)
        if waiting:
            self._waits.add(owner, lease, waiting.copy(), settle, wait)
        if absent:
            self._promoting |= dict.fromkeys(absent, "")
            self._spawn(self._promote(absent, want, self.clock() + wait))
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

    async def drop(self, tiers: Sequence[str], keys: Sequence[Key] | None) -> dict[str, int]:
        """Drop idle chunks from the named tiers (None: all chunks); how many, by tier."""
        known = {"host"} | {tier.name for tier in self.tiers}
        for name in tiers:
            if name not in known:
                raise Malformed(f"no tier {name!r} here: this node has {sorted(known)}")
        dropped: dict[str, int] = {}
        for tier in self.tiers:
            if tier.name in tiers:
                victims = tier.keys() if keys is None else keys
                gone = sum(await tier.evict(victims))
                dropped[tier.name] = dropped.get(tier.name, 0) + gone
        if "host" in tiers:
            dropped["host"] = self.host.drop(keys)
        return dropped

    async def quiesce(self) -> None:
        """End cascades and promotions; each finishes the batch it is at."""
        await asyncio.gather(*(cascade.close() for cascade in self.cascades))
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self) -> None:
        """Close the tiers. Returns when nothing touches the region any more."""
        await self.quiesce()
        for tier in self.tiers:
            try:
                await tier.close()
            except Exception:
                _log.exception("tier %s did not close", tier.name)

    def _split_missing(
        self, missing: Sequence[Key], want: Literal["prefix", "all"]
    ) -> tuple[list[Key], list[Key]]:
        """Of keys that are not ready: those on their way already, and those to look for."""
        pending, absent = [], []
        for key, state in zip(missing, self.host.find(missing), strict=True):
            if state is State.WRITING or key in self._promoting:
                pending.append(key)
            elif self.tiers:
                absent.append(key)
            elif want == "prefix":
                break
        return pending, list(dict.fromkeys(absent))

    # ------------------------------------------------------------ promotion

    async def _promote(
        self, keys: Sequence[Key], want: Literal["prefix", "all"], deadline: float
    ) -> None:
        """Bring absent chunks in from the first tier that has each; settle all of them."""
        left = list(keys)
        try:
            first = 0
            while left and first < len(self.tiers):
                where = await self._locate(left, first, deadline)
                located = [key for key in left if key in where]
                if want == "prefix":
                    gap = next((i for i, key in enumerate(left) if key not in where), len(left))
                    located = left[:gap]
                wanted = set(located)
                self._give_back([key for key in left if key not in wanted])
                failed = await asyncio.gather(
                    *(
                        self._load(i, [k for k in located if where[k] == i], deadline)
                        for i in sorted({where[k] for k in located})
                    )
                )
                # What a tier had but could not deliver may be in a later one.
                retry = {key: i for keys_of in failed for key, i in keys_of.items()}
                left = [key for key in located if key in retry]
                first = min(retry.values(), default=0) + 1
        finally:
            self._give_back(left)

    def _give_back(self, keys: Sequence[Key]) -> None:
        """No longer being promoted: settle those that nobody is writing."""
        for key in keys:
            self._promoting.pop(key, None)
        states = self.host.find(keys)
        self._waits.settle([k for k, s in zip(keys, states, strict=True) if s is not State.WRITING])

    async def _locate(self, keys: Sequence[Key], first: int, deadline: float) -> dict[Key, int]:
        """For each key that a tier from number `first` on has, that tier's number."""
        where: dict[Key, int] = {}
        unknown = list(keys)
        for i in range(first, len(self.tiers)):
            if not unknown:
                break
            try:
                present = complete(await self.tiers[i].lookup(unknown, deadline), len(unknown))
            except Exception:
                # A tier that breaks its contract must not take the others with it.
                _log.exception("tier %s: lookup failed", self.tiers[i].name)
                self.counters.tier_errors += 1
                continue
            where |= {key: i for key, here in zip(unknown, present, strict=True) if here}
            unknown = [key for key in unknown if key not in where]
        return where

    async def _load(self, number: int, keys: Sequence[Key], deadline: float) -> dict[Key, int]:
        """Load from one tier, in batches; the keys it failed to deliver -> its number."""
        failed: dict[Key, int] = {}
        for batch in self._batches(keys):
            async with self._budget.take(sum(n for _, n in batch)):
                # Too late, it must not evict what is of use for what would not be loaded.
                late = self.clock() >= deadline
                left = (
                    [key for key, _ in batch]
                    if late
                    else await self._load_batch(number, batch, deadline)
                )
                failed |= dict.fromkeys(left, number)
        return failed

    async def _load_batch(
        self, number: int, batch: Sequence[tuple[Key, int]], deadline: float
    ) -> list[Key]:
        tier = self.tiers[number]
        # An owner for each load: one that is overdue may still be writing to its slots, and its
        # end must not touch those of a later one.
        self._loads += 1
        owner = f"{_came_from(tier)}{self._loads}"
        offsets = self.host.reserve(owner, batch)
        items, settled = [], []
        for (key, nbytes), offset in zip(batch, offsets, strict=True):
            if offset >= 0:
                items.append(Item(key, self.region[offset : offset + nbytes], offset))
                continue
            # Someone else wrote it meanwhile, or there is no room even after eviction.
            self.counters.no_room += offset == NO_ROOM
            self._promoting.pop(key, None)
            if offset != PRESENT or self.host.get(key) is not None:
                settled.append(key)
        self._waits.settle(settled)
        if not items:
            return []
        try:
            outcomes = complete(await tier.load(items, deadline), len(items))
        except Exception:
            _log.exception("tier %s: load failed", tier.name)
            self.counters.tier_errors += 1
            outcomes = [Outcome.FAILED] * len(items)
        loaded = [i for i, o in zip(items, outcomes, strict=True) if o is Outcome.LOADED]
        failed = [i.key for i, o in zip(items, outcomes, strict=True) if o is not Outcome.LOADED]
        self.host.abort(owner, failed)
        self.counters.promoted_bytes += sum(len(item.view) for item in loaded)
        for item in loaded:
            self._promoting[item.key] = tier.name
        self.host.commit(owner, [item.key for item in loaded])
        self.host.forget(owner)
        for item in loaded:  # where another was ready first, ours was not announced
            self._promoting.pop(item.key, None)
        return failed

    def _batches(self, keys: Sequence[Key]) -> list[list[tuple[Key, int]]]:
        limit = min(_BATCH_BYTES, self._budget.capacity)
        batches: list[list[tuple[Key, int]]] = []
        size = limit + 1
        for key in keys:
            nbytes = self.namespaces.size_of(key)
            if size + nbytes > limit:
                batches.append([])
                size = 0
            batches[-1].append((key, nbytes))
            size += nbytes
        return batches

    # ------------------------------------------------------------ what the host tier tells

    def _on_ready(self, chunks: Sequence[Chunk]) -> None:
        self.placements.added("host", [chunk.key for chunk in chunks])
        by_source: dict[str, list[Key]] = {}
        for chunk in chunks:
            by_source.setdefault(self._promoting.pop(chunk.key, ""), []).append(chunk.key)
        for source, keys in by_source.items():
            self._waits.settle(keys, source)
        for cascade in self.cascades:
            here = _came_from(cascade.tier)
            cascade.offer([chunk.key for chunk in chunks if not chunk.owner.startswith(here)])

    def _on_gone(self, chunks: Sequence[Chunk]) -> None:
        self.placements.removed("host", [c.key for c in chunks if c.state is State.READY])
        # A write that was given up: whoever waited for it waits in vain, unless it is being
        # promoted, and then that settles it.
        written = [c.key for c in chunks if c.state is State.WRITING]
        self._waits.settle([key for key in written if key not in self._promoting])

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _came_from(tier: Tier) -> str:
    """How the owners of what a tier loads begin."""
    return f"tier:{tier.store_id}#"
