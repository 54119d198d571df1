"""The suite itself: an honest tier passes it, tiers that lie fail it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvstrata.keys import Key
from kvstrata.testing import Damage, FakeClock, TierTests
from kvstrata.testing.memory_tier import MemoryTier
from kvstrata.tiers.base import Item, Outcome, TierContext


class TestMemoryTier(TierTests):
    durable = False
    keeps_heads = True
    damages = tuple(set(Damage) - {Damage.HEADER, Damage.VERSION})
    tier_class: ClassVar[type[MemoryTier]] = MemoryTier

    async def open_tier(self, tmp_path: Path, context: TierContext) -> MemoryTier:
        return self.tier_class(context)

    async def open_bounded(self, tmp_path: Path, context: TierContext, capacity: int) -> MemoryTier:
        return self.tier_class(context, capacity)

    async def damage(self, tier: Any, key: Key, how: Damage, other: Key) -> None:
        tier.harm(key, how, other)

    def stall(self, tier: Any) -> AbstractContextManager[None]:
        return tier.stalled()


# ---------------------------------------------------------------- tiers that lie


class Unverified(MemoryTier):
    """Serves what it finds."""

    def load_one(self, item: Item) -> Outcome:
        content, _ = self.chunks.get(item.key, (None, 0))
        if content is None:
            return Outcome.MISSING
        n = min(len(content), item.view.nbytes)
        item.view[:n] = content[:n]
        return Outcome.LOADED


class KeepsTheDamaged(MemoryTier):
    """Finds damage, and offers the chunk again."""

    def load_one(self, item: Item) -> Outcome:
        kept = dict(self.chunks)
        outcome = super().load_one(item)
        self.chunks = kept
        return outcome


class Silent(MemoryTier):
    """Drops chunks without a word."""

    def remove(self, keys: Sequence[Key]) -> None:
        for key in keys:
            del self.chunks[key]


class Forgetful(MemoryTier):
    """Says stored, and keeps only a view of memory that isn't its own."""

    def store_one(self, item: Item, batch: set[Key]) -> Outcome:
        outcome = super().store_one(item, batch)
        if outcome is Outcome.STORED:
            self.chunks[item.key] = item.view, self.chunks[item.key][1]  # type: ignore[assignment]
        return outcome


class Late(MemoryTier):
    """Goes on writing after its call was cancelled."""

    async def load(self, batch: Sequence[Item], deadline: float | None = None) -> list[Outcome]:
        load = asyncio.ensure_future(self.load_later(batch))
        self.running = load
        return await asyncio.shield(load)

    async def load_later(self, batch: Sequence[Item]) -> list[Outcome]:
        for _ in range(3):
            await asyncio.sleep(0)
        return [self.load_one(item) for item in batch]

    async def drain(self, deadline: float | None = None) -> None:
        await self.running


class Unordered(MemoryTier):
    """Answers in an order of its own."""

    async def lookup(self, keys: Sequence[Key], deadline: float | None = None) -> list[bool]:
        return sorted(await super().lookup(keys, deadline))


class Unbounded(MemoryTier):
    """Has a capacity and exceeds it."""

    def store_one(self, item: Item, batch: set[Key]) -> Outcome:
        capacity, self.capacity = self.capacity, None
        outcome = super().store_one(item, batch)
        self.capacity = capacity
        return outcome


class Immortal(MemoryTier):
    """Answers after it was closed."""

    def check_open(self) -> None:
        return None


class WallClock(MemoryTier):
    """Takes a deadline for one of its own clock."""

    async def store(self, batch: Sequence[Item], deadline: float | None = None) -> list[Outcome]:
        if deadline is not None and deadline < asyncio.get_running_loop().time():
            return [Outcome.FAILED] * len(batch)
        return await super().store(batch)


LIES = [
    (Unverified, "test_damaged_is_corrupt_then_missing", {"how": Damage.FLIP}),
    (Unverified, "test_damaged_is_corrupt_then_missing", {"how": Damage.TRUNCATE}),
    (Unverified, "test_damaged_is_corrupt_then_missing", {"how": Damage.SWAP}),
    (Unverified, "test_load_of_another_size_is_never_served", {"by": 1}),
    (Unverified, "test_memory_that_differs_from_its_checksum_is_never_served", {}),
    (KeepsTheDamaged, "test_damaged_is_corrupt_then_missing", {"how": Damage.FLIP}),
    (Silent, "test_evicted_is_gone", {}),
    (Silent, "test_damaged_is_corrupt_then_missing", {"how": Damage.FLIP}),
    (Silent, "test_the_bound_holds", {}),
    (Forgetful, "test_memory_is_free_after_a_store", {}),
    (Late, "test_memory_is_free_after_a_cancelled_load", {}),
    (Unordered, "test_lookup_answers_in_order", {}),
    (Unbounded, "test_the_bound_holds", {}),
    (Unbounded, "test_a_batch_that_does_not_fit", {}),
    (Immortal, "test_closed_refuses_every_call", {}),
    (WallClock, "test_deadlines_are_in_the_contexts_clock", {}),
]


@pytest.mark.parametrize(("liar", "test", "arguments"), LIES)
async def test_a_lie_is_found(
    tmp_path: Path, liar: type[MemoryTier], test: str, arguments: dict[str, Any]
) -> None:
    class Suite(TestMemoryTier):
        tier_class = liar

    async def run(tier_class: type[MemoryTier]) -> None:
        suite = Suite()
        suite.tier_class = tier_class  # type: ignore[misc]
        clock, removed = FakeClock(-1e9), list[Key]()
        context = TierContext("node", clock=clock, on_removed=removed.extend)
        fixtures = {
            "tmp_path": tmp_path,
            "clock": clock,
            "removed": removed,
            "context": context,
            "tier": await suite.open_tier(tmp_path, context),
        }
        method = getattr(suite, test)
        wanted = method.__code__.co_varnames[: method.__code__.co_argcount]
        await method(**{n: v for n, v in (fixtures | arguments).items() if n in wanted})

    await run(MemoryTier)  # the test passes for who does not lie
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        await run(liar)
