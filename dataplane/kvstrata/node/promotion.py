"""Secondary tier -> host tier, for lookups that wait.

Tiers are asked in order. What one has is loaded into slots of the load's own, a bounded number of
bytes at a time, and settled batch by batch: ready, or not to be had. A wait that passes its
deadline is a miss; the load goes on, because its tier may still be writing to its slots. A load
that does not return is given up (see `guard`): its slots stay out of use until it does, and a
later tier is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Literal

from kvstrata.host import NO_ROOM, PRESENT, HostTier, State
from kvstrata.keys import Key
from kvstrata.node.breaker import Kind
from kvstrata.node.guard import Guard
from kvstrata.node.namespaces import Namespaces
from kvstrata.node.waits import Counters, Waits
from kvstrata.tiers.base import Item, Outcome

__all__ = ["FROM_TIER", "Promotions", "came_from"]

# One load of a tier: enough for its threads to be busy, small enough that the first chunks of a
# long prefix are readable while the rest is still on its way.
_BATCH_BYTES = 32 << 20
FROM_TIER = "tier:"


class Promotions:
    """Of one node, from `guards` in their order; `region` is where slots are."""

    def __init__(
        self,
        region: memoryview,
        host: HostTier,
        guards: Sequence[Guard],
        waits: Waits,
        namespaces: Namespaces,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self.sources: dict[Key, str] = {}
        """Keys on their way, and the tier they came from once that is known."""
        self._region = region
        self._host = host
        self._guards = guards
        self._waits = waits
        self._namespaces = namespaces
        self._counters = counters
        self._clock = clock
        self._loads = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def tasks(self) -> set[asyncio.Task[None]]:
        """Those under way. None of them outlives its deadline by more than a tier's grace."""
        return self._tasks

    def start(self, keys: Sequence[Key], want: Literal["prefix", "all"], deadline: float) -> None:
        """Bring absent chunks in; all of them will be settled."""
        self.sources |= dict.fromkeys(keys, "")
        task = asyncio.get_running_loop().create_task(self._promote(keys, want, deadline))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _promote(
        self, keys: Sequence[Key], want: Literal["prefix", "all"], deadline: float
    ) -> None:
        """Bring absent chunks in from the first tier that has each; settle all of them."""
        left = list(keys)
        try:
            first = 0
            while left and first < len(self._guards):
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
            self.sources.pop(key, None)
        states = self._host.find(keys)
        self._waits.settle([k for k, s in zip(keys, states, strict=True) if s is not State.WRITING])

    async def _locate(self, keys: Sequence[Key], first: int, deadline: float) -> dict[Key, int]:
        """For each key that a tier from number `first` on has, that tier's number."""
        where: dict[Key, int] = {}
        unknown = list(keys)
        for i in range(first, len(self._guards)):
            if not unknown:
                break
            # One that does not answer must leave the others their share of the time.
            sharing = sum(guard.allows(Kind.LOOKUP) for guard in self._guards[i:])
            now = self._clock()
            until = now + (deadline - now) / max(1, sharing)
            present = await self._guards[i].lookup(unknown, until)
            if present is not None:
                where |= {key: i for key, here in zip(unknown, present, strict=True) if here}
                unknown = [key for key in unknown if key not in where]
        return where

    async def _load(self, number: int, keys: Sequence[Key], deadline: float) -> dict[Key, int]:
        """Load from one tier, in batches; the keys it failed to deliver -> its number."""
        guard = self._guards[number]
        failed: dict[Key, int] = {}
        for batch in self._batches(keys, min(_BATCH_BYTES, max(1, guard.room))):
            size = sum(n for _, n in batch)
            taken = 0
            if guard.allows(Kind.LOAD) and min(size, guard.budget.capacity) <= guard.room:
                taken = await guard.budget.take(size, deadline - self._clock())
            if not taken or self._clock() >= deadline:
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
        owner = f"{came_from(guard)}{self._loads}"
        offsets = self._host.reserve(owner, batch)
        items, settled = [], []
        for (key, nbytes), offset in zip(batch, offsets, strict=True):
            if offset >= 0:
                items.append(Item(key, self._region[offset : offset + nbytes], offset))
                continue
            # Someone else wrote it meanwhile, or there is no room even after eviction.
            self._counters.no_room += offset == NO_ROOM
            self.sources.pop(key, None)
            if offset != PRESENT or self._host.get(key) is not None:
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
            self._host.disown(owner, keys)
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
        self._host.abort(owner, failed)
        self._counters.promoted_bytes += sum(len(item.view) for item in loaded)
        keys = ours = [item.key for item in loaded]
        if late:
            # What others promote or have written by now is theirs to announce.
            states = self._host.find(keys)
            ours = [key for key, s in zip(keys, states, strict=True) if s is State.ABSENT]
        self.sources |= dict.fromkeys(ours, guard.name)
        self._host.commit(owner, keys)
        self._host.forget(owner)
        for key in ours:  # where another was ready first, ours was not announced
            self.sources.pop(key, None)
        return failed

    def _batches(self, keys: Sequence[Key], limit: int) -> list[list[tuple[Key, int]]]:
        batches: list[list[tuple[Key, int]]] = []
        size = limit + 1
        for key in keys:
            nbytes = self._namespaces.size_of(key)
            if size + nbytes > limit:
                batches.append([])
                size = 0
            batches[-1].append((key, nbytes))
            size += nbytes
        return batches


def came_from(guard: Guard) -> str:
    """How the owners of what a tier loads begin."""
    return f"{FROM_TIER}{guard.store_id}#"
