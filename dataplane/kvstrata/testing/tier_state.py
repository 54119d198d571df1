"""Tests of a tier: what it holds and says, what damage, bounds and opening again do to that."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvstrata.keys import Key
from kvstrata.testing.tier_hooks import PAGE, Damage, TierHooks
from kvstrata.tiers.base import Outcome, Tier, TierContext

STORED, PRESENT, LOADED = Outcome.STORED, Outcome.PRESENT, Outcome.LOADED
MISSING, CORRUPT = Outcome.MISSING, Outcome.CORRUPT
NO_ROOM, FAILED = Outcome.NO_ROOM, Outcome.FAILED


class StateTests(TierHooks):
    """Part of `TierTests`."""

    # ------------------------------------------------------------ what it says of itself

    async def test_keys_are_what_it_holds(self, tier: Tier) -> None:
        self.needs_store(tier)
        items = self.items(0, 5)
        await self.fill(tier, items)
        keys = tier.keys()
        assert len(keys) == 5
        assert set(keys) == {item.key for item in items}

    async def test_usage_adds_up(self, tier: Tier) -> None:
        self.needs_store(tier)
        assert (tier.usage().used_bytes, tier.usage().chunks) == (0, 0)
        items = self.items(0, 5)
        await self.fill(tier, items)
        usage = tier.usage()
        assert usage.chunks == 5
        assert usage.used_bytes >= 5 * self.size
        assert usage.capacity_bytes is None or usage.used_bytes <= usage.capacity_bytes
        assert usage.healthy
        await tier.evict([item.key for item in items[:2]])
        assert 3 * self.size <= tier.usage().used_bytes < usage.used_bytes
        await tier.evict([item.key for item in items[2:]])
        assert (tier.usage().used_bytes, tier.usage().chunks) == (0, 0)

    async def test_counters_never_fall(self, tier: Tier) -> None:
        items = self.items(0, 3)
        before = tier.usage().counters
        await self.fill(tier, items)
        await tier.load(self.blank(items))
        await tier.evict([items[0].key])
        after = tier.usage().counters
        assert all(after[name] >= count for name, count in before.items())

    async def test_store_id_names_a_location(self, tier: Tier) -> None:
        assert tier.name
        assert 0 < len(tier.store_id) <= 128
        assert set(tier.store_id) <= set(
            "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._:-"
        ), "the control plane takes no other characters"

    async def test_usage_after_every_kind_of_call(self, tier: Tier) -> None:
        self.needs_store(tier)
        items = self.items(0, 4)
        await self.fill(tier, items)
        full = tier.usage()
        await tier.store(items)
        await tier.lookup([self.key(i) for i in range(8)])
        await tier.load(self.blank(self.items(0, 8)))
        await tier.evict([self.key(9)])
        assert (tier.usage().used_bytes, tier.usage().chunks) == (full.used_bytes, 4)
        await tier.evict([self.key(0)])
        await self.fill(tier, items[:1])
        assert (tier.usage().used_bytes, tier.usage().chunks) == (full.used_bytes, 4)
        await tier.evict([item.key for item in items])
        assert (tier.usage().used_bytes, tier.usage().chunks) == (0, 0)

    async def test_keys_are_the_callers_own(self, tier: Tier) -> None:
        self.needs_store(tier)
        await self.fill(tier, self.items(0, 2))
        tier.keys().clear()
        tier.usage().counters.clear()
        assert len(tier.keys()) == tier.usage().chunks == 2

    # ------------------------------------------------------------ damage

    @pytest.mark.parametrize("how", list(Damage))
    async def test_damaged_is_corrupt_then_missing(
        self, tier: Tier, removed: list[Key], how: Damage
    ) -> None:
        items = self.items(0, 4)
        await self.fill(tier, items)
        await self.do_damage(tier, items[1].key, how, other=items[2].key)
        blank = self.blank(items)
        outcomes = await tier.load(blank)
        swapped = how is Damage.SWAP
        assert outcomes == [LOADED, CORRUPT, CORRUPT if swapped else LOADED, LOADED]
        self.check_bytes(blank, outcomes)
        gone = [items[1].key, items[2].key][: 1 + swapped]
        assert sorted(removed) == sorted(gone)
        assert await tier.lookup(gone) == [False] * len(gone)
        assert await tier.load(self.blank(items[1:2])) == [MISSING]
        assert set(tier.keys()).isdisjoint(gone)
        assert tier.usage().chunks == 4 - len(gone)

    async def test_damage_is_counted(self, tier: Tier) -> None:
        items = self.items(0, 2)
        await self.fill(tier, items)
        before = tier.usage().counters.get("corrupt", 0)
        await self.do_damage(tier, items[0].key, Damage.FLIP, other=items[1].key)
        await tier.load(self.blank(items))
        assert tier.usage().counters["corrupt"] == before + 1

    @pytest.mark.parametrize("how", list(Damage))
    async def test_damaged_can_be_stored_again(self, tier: Tier, how: Damage) -> None:
        self.needs_store(tier)
        items = self.items(0, 3)
        await self.fill(tier, items)
        await self.do_damage(tier, items[0].key, how, other=items[1].key)
        await tier.load(self.blank(items))
        assert set(await tier.store(items)) <= {STORED, PRESENT}
        await self.check_loads(tier, items)

    @pytest.mark.parametrize("how", list(Damage))
    async def test_usage_after_damage(self, tier: Tier, how: Damage) -> None:
        self.needs_store(tier)
        items = self.items(0, 3)
        await self.fill(tier, items)
        await self.do_damage(tier, items[0].key, how, other=items[1].key)
        await tier.load(self.blank(items))
        await tier.evict([item.key for item in items])
        assert (tier.usage().used_bytes, tier.usage().chunks) == (0, 0)
        assert tier.keys() == []

    async def test_damage_is_announced_once(self, tier: Tier, removed: list[Key]) -> None:
        items = self.items(0, 2)
        await self.fill(tier, items)
        await self.do_damage(tier, items[0].key, Damage.FLIP, other=items[1].key)
        blanks = [self.blank(items) for _ in range(6)]
        outcomes = await asyncio.gather(*(tier.load(blank) for blank in blanks))
        for blank, outcome in zip(blanks, outcomes, strict=True):
            assert outcome[0] in (CORRUPT, MISSING)
            assert outcome[1] is LOADED
            self.check_bytes(blank, outcome)
        assert removed == [items[0].key]
        await tier.evict([items[0].key])
        assert removed == [items[0].key]

    # ------------------------------------------------------------ opening again

    async def test_acknowledged_chunks_are_there_again(
        self, tier: Tier, tmp_path: Path, context: TierContext
    ) -> None:
        if not self.durable:
            pytest.skip("this tier is not durable")
        items = self.items(0, 5)
        await self.fill(tier, items)
        await tier.evict([items[4].key])
        usage, store_id = tier.usage(), tier.store_id
        await tier.close()
        again = await self.open_tier(tmp_path, context)
        try:
            assert again.store_id == store_id
            assert set(again.keys()) == {item.key for item in items[:4]}
            assert again.usage().used_bytes == usage.used_bytes
            assert await again.lookup([items[4].key]) == [False]
            await self.check_loads(again, items[:4])
        finally:
            await again.close()

    async def test_what_was_acknowledged_survives_a_kill(
        self, tier: Tier, tmp_path: Path, context: TierContext
    ) -> None:
        if not self.durable:
            pytest.skip("this tier is not durable")
        items = self.items(0, 6)
        await self.fill(tier, items)
        await tier.evict([items[5].key])
        await self.kill(tier)
        again = await self.open_tier(tmp_path, context)
        try:
            assert set(again.keys()) == {item.key for item in items[:5]}
            await self.check_loads(again, items[:5])
        finally:
            await again.close()

    @pytest.mark.parametrize("how", list(Damage))
    async def test_damage_while_it_was_closed(
        self, tier: Tier, tmp_path: Path, context: TierContext, how: Damage
    ) -> None:
        if not self.durable:
            pytest.skip("this tier is not durable")
        items = self.items(0, 4)
        await self.fill(tier, items)
        await self.do_damage(tier, items[1].key, how, other=items[2].key)
        await tier.close()
        again = await self.open_tier(tmp_path, context)
        try:
            blank = self.blank(items)
            outcomes = await again.load(blank)
            self.check_bytes(blank, outcomes)
            assert outcomes[0] is outcomes[3] is LOADED
            assert outcomes[1] in (CORRUPT, MISSING)
            await again.store(items)
            await self.check_loads(again, items)
        finally:
            await again.close()

    # ------------------------------------------------------------ bounds

    async def test_the_bound_holds(
        self, tmp_path: Path, context: TierContext, removed: list[Key]
    ) -> None:
        capacity = 20 * (self.size + 2 * PAGE)
        tier = await self.open_bounded(tmp_path, context, capacity)
        try:
            items = self.items(0, 60)
            for i in range(0, 60, 4):
                assert await tier.store(items[i : i + 4]) == [STORED] * 4
                assert tier.usage().used_bytes <= capacity
            assert tier.usage().capacity_bytes == capacity
            assert removed, "nothing was announced as evicted"
            kept = set(tier.keys())
            assert kept == {item.key for item in items} - set(removed)
            assert {item.key for item in items[-4:]} <= kept, "the youngest were evicted"
            await self.check_loads(tier, [item for item in items if item.key in kept])
        finally:
            await tier.close()

    async def test_a_batch_that_does_not_fit(self, tmp_path: Path, context: TierContext) -> None:
        capacity = 5 * (self.size + 2 * PAGE)
        tier = await self.open_bounded(tmp_path, context, capacity)
        try:
            items = self.items(0, 20)
            outcomes = await tier.store(items)
            assert set(outcomes) <= {STORED, NO_ROOM}
            assert NO_ROOM in outcomes
            assert tier.usage().used_bytes <= capacity
            await self.check_loads(
                tier, [i for i, o in zip(items, outcomes, strict=True) if o is STORED]
            )
            huge = self.item(self.key(99), 2 * capacity)
            assert await tier.store([huge]) == [NO_ROOM]
        finally:
            await tier.close()

    async def test_the_bound_holds_under_parallel_stores(
        self, tmp_path: Path, context: TierContext
    ) -> None:
        capacity = 12 * (self.size + 2 * PAGE)
        tier = await self.open_bounded(tmp_path, context, capacity)
        try:
            items = self.items(0, 64)
            calls = [tier.store(items[i : i + 4]) for i in range(0, 64, 4)]
            outcomes = [o for batch in await asyncio.gather(*calls) for o in batch]
            assert set(outcomes) <= {STORED, NO_ROOM}
            assert STORED in outcomes
            assert tier.usage().used_bytes <= capacity
            held = [item for item in items if item.key in set(tier.keys())]
            assert len(held) == tier.usage().chunks > 0
            await self.check_loads(tier, held)
        finally:
            await tier.close()

    async def test_what_never_fits_is_refused(self, tmp_path: Path, context: TierContext) -> None:
        capacity = 8 * (self.size + 2 * PAGE)
        tier = await self.open_bounded(tmp_path, context, capacity)
        try:
            items = self.items(0, 3)
            await self.fill(tier, items[:1])
            huge = self.item(self.key(99), 2 * capacity)
            outcomes = await tier.store([items[1], huge, items[2]])
            assert outcomes == [STORED, NO_ROOM, STORED]
            assert await tier.lookup([huge.key]) == [False]
            assert tier.usage().used_bytes <= capacity
            await self.check_loads(tier, items[1:])
        finally:
            await tier.close()

    async def test_the_bound_holds_after_opening_again(
        self, tmp_path: Path, context: TierContext
    ) -> None:
        if not self.durable:
            pytest.skip("this tier is not durable")
        unit = self.size + 2 * PAGE
        tier = await self.open_bounded(tmp_path, context, 12 * unit)
        items = self.items(0, 8)
        await self.fill(tier, items)
        await tier.close()
        smaller = await self.open_bounded(tmp_path, context, 5 * unit)
        try:
            await smaller.store(self.items(8, 9))
            assert smaller.usage().used_bytes <= 5 * unit
            held = set(smaller.keys())
            await self.check_loads(smaller, [item for item in items if item.key in held])
        finally:
            await smaller.close()

    async def test_the_head_of_a_chain_is_kept_longest(
        self, tmp_path: Path, context: TierContext, removed: list[Key]
    ) -> None:
        if not self.keeps_heads:
            pytest.skip("this tier does not say `keeps_heads`")
        tier = await self.open_bounded(tmp_path, context, 20 * (self.size + 2 * PAGE))
        try:
            chain = self.chain(0, 12)
            for i in range(0, 12, 3):
                assert await tier.store(chain[i : i + 3]) == [STORED] * 3
            for i in range(100, 260, 4):
                await tier.store(self.items(i, i + 4))
                gone = [item.key in set(removed) for item in chain]
                assert gone == sorted(gone), "a chunk went before one that extends it"
            assert any(gone), "nothing of the chain was evicted"
        finally:
            await tier.close()
