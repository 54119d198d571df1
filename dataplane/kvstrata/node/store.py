"""The one place where tiers meet: lookup, promotion, cascade.

Runs on the node's event loop. Lookups answer at once with what the host tier has; what it has
not is looked for in the secondary tiers, in order, by a task, and settled by a callback: ready
and leased to who asked, or a miss. Promotions share a byte budget and one promotion of a chunk
serves everyone who waits for it. A wait that passes its deadline is a miss; the promotion goes
on, because its tier may still be writing to the slot. A load that does not return is given up
(see `guard`): its slots stay out of use, and a later tier is asked.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any, Literal

from kvstrata.config import CascadeMode, HostSettings
from kvstrata.errors import ConfigError, Malformed
from kvstrata.host import NO_ROOM, PRESENT, Chunk, HostTier, State
from kvstrata.keys import DIGEST_BYTES, Key
from kvstrata.node.breaker import Kind
from kvstrata.node.cascade import Cascade
from kvstrata.node.guard import GRACE, LOOKUP_SECONDS, Guard
from kvstrata.node.namespaces import Namespaces
from kvstrata.node.placements import Placements
from kvstrata.node.waits import Counters, Settle, Waits
from kvstrata.policies import open_policy
from kvstrata.slots import Slots
from kvstrata.tiers.base import Item, Outcome, Tier

__all__ = ["Store"]

_log = logging.getLogger(__name__)

# One load of a tier: enough for its threads to be busy, small enough that the first chunks of a
# long prefix are readable while the rest is still on its way.
_BATCH_BYTES = 32 << 20
_FROM_TIER = "tier:"


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
        self.host = HostTier(
            Slots(len(region)),
            open_policy(settings.policy, len(region)),
            clock,
            reserve_ttl=settings.reserve_ttl,
            on_ready=self._on_ready,
            on_gone=self._on_gone,
        )
        self._waits = Waits(self.host, self.counters, settings.lease_ttl)
        self._promoting: dict[Key, str] = {}
        self._loads = 0
        self._tasks: set[asyncio.Task[None]] = set()

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
        known = {"host"} | {guard.name for guard in self.guards}
        for name in tiers:
            if name not in known:
                raise Malformed(f"no tier {name!r} here: this node has {sorted(known)}")
        dropped: dict[str, int] = {}
        for guard in self.guards:
            if guard.name in tiers:
                victims = guard.keys() if keys is None else keys
                dropped[guard.name] = sum(await guard.evict(victims))
        if "host" in tiers:
            dropped["host"] = self.host.drop(keys)
        return dropped

    async def held_of(self, tiers: Sequence[str], digests: Collection[bytes]) -> list[Key]:
        """Chunks of these namespaces that the named tiers hold, in no order; some repeat."""
        if not digests:
            return []
        held = [self.host.keys()] if "host" in tiers else []
        held += [guard.keys() for guard in self.guards if guard.name in tiers]
        # Millions, maybe: in a thread, so that engines aren't kept waiting.
        return await asyncio.to_thread(
            lambda: [key for keys in held for key in keys if key[:DIGEST_BYTES] in digests]
        )

    async def quiesce(self, seconds: float = 10.0) -> None:
        """End cascades and promotions; each finishes the batch it is at, or is given up after
        `seconds`."""
        ending = asyncio.ensure_future(
            asyncio.gather(*(cascade.close() for cascade in self.cascades), *self._tasks)
        )
        await asyncio.wait({ending}, timeout=max(0.0, seconds))
        if not ending.done():
            for guard in self.guards:
                guard.give_up()
        await ending

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
            if state is State.WRITING or key in self._promoting:
                pending.append(key)
            elif may_have:
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
            while left and first < len(self.guards):
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
        for i in range(first, len(self.guards)):
            if not unknown:
                break
            # One that does not answer must leave the others their share of the time.
            sharing = sum(guard.allows(Kind.LOOKUP) for guard in self.guards[i:])
            now = self.clock()
            until = now + (deadline - now) / max(1, sharing)
            present = await self.guards[i].lookup(unknown, until)
            if present is not None:
                where |= {key: i for key, here in zip(unknown, present, strict=True) if here}
                unknown = [key for key in unknown if key not in where]
        return where

    async def _load(self, number: int, keys: Sequence[Key], deadline: float) -> dict[Key, int]:
        """Load from one tier, in batches; the keys it failed to deliver -> its number."""
        guard = self.guards[number]
        failed: dict[Key, int] = {}
        for batch in self._batches(keys, min(_BATCH_BYTES, max(1, guard.room))):
            size = sum(n for _, n in batch)
            taken = 0
            if guard.allows(Kind.LOAD) and min(size, guard.budget.capacity) <= guard.room:
                taken = await guard.budget.take(size, deadline - self.clock())
            if not taken or self.clock() >= deadline:
                # Too late, it must not evict what is of use for what would not be loaded.
                guard.budget.give(taken)
                left = [key for key, _ in batch]
            else:
                left = await self._load_batch(guard, batch, taken, deadline)
            failed |= dict.fromkeys(left, number)
        return failed

    async def _load_batch(
        self, guard: Guard, batch: Sequence[tuple[Key, int]], taken: int, deadline: float
    ) -> list[Key]:
        """Load into slots of the batch's own; the keys not delivered. `taken` of the guard's
        budget is given back when the tier is done with the slots."""
        # An owner for each load: one that is overdue may still be writing to its slots, and its
        # end must not touch those of a later one.
        self._loads += 1
        owner = f"{_came_from(guard)}{self._loads}"
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
            guard.budget.give(taken)
            return []

        def end(outcomes: Sequence[Outcome], late: bool = True) -> list[Key]:
            guard.budget.give(taken)
            return self._end_load(guard, owner, items, outcomes, late)

        outcomes = await guard.load(items, deadline, end)
        if outcomes is None:
            # Absent from now on, for others to look for elsewhere or to compute.
            keys = [item.key for item in items]
            self.host.disown(owner, keys)
            return keys
        return end(outcomes, late=False)

    def _end_load(
        self,
        guard: Guard,
        owner: str,
        items: Sequence[Item],
        outcomes: Sequence[Outcome],
        late: bool,
    ) -> list[Key]:
        """The tier is done with the slots. The keys it did not deliver."""
        loaded = [i for i, o in zip(items, outcomes, strict=True) if o is Outcome.LOADED]
        failed = [i.key for i, o in zip(items, outcomes, strict=True) if o is not Outcome.LOADED]
        self.host.abort(owner, failed)
        self.counters.promoted_bytes += sum(len(item.view) for item in loaded)
        keys = ours = [item.key for item in loaded]
        if late:
            # What others promote or have written by now is theirs to announce.
            states = self.host.find(keys)
            ours = [key for key, s in zip(keys, states, strict=True) if s is State.ABSENT]
        self._promoting |= dict.fromkeys(ours, guard.name)
        self.host.commit(owner, keys)
        self.host.forget(owner)
        for key in ours:  # where another was ready first, ours was not announced
            self._promoting.pop(key, None)
        return failed

    def _batches(self, keys: Sequence[Key], limit: int) -> list[list[tuple[Key, int]]]:
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
        if not self.cascades:
            return
        fresh: list[Chunk] = []
        promoted: list[Chunk] = []
        for chunk in chunks:
            (promoted if chunk.owner.startswith(_FROM_TIER) else fresh).append(chunk)
        for cascade in self.cascades:
            here = _came_from(cascade.guard)
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
        self._waits.settle([key for key in written if key not in self._promoting])

    def _cascade_share(self) -> int:
        """What one batch to one tier may pin of the region: all of them a quarter."""
        return self.host.slots.capacity // (4 * max(1, len(self.cascades)))

    def _count_error(self) -> None:
        self.counters.tier_errors += 1

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _came_from(guard: Guard) -> str:
    """How the owners of what a tier loads begin."""
    return f"{_FROM_TIER}{guard.store_id}#"
