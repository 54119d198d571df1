"""Tests of a tier: what one call does to chunks and their memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from kvstrata.keys import Key
from kvstrata.testing.chunks import a_namespace
from kvstrata.testing.clock import FakeClock
from kvstrata.testing.tier_hooks import PAGE, TierHooks, aligned, payload
from kvstrata.tiers.base import Item, Outcome, Tier, checksum

STORED, PRESENT, LOADED = Outcome.STORED, Outcome.PRESENT, Outcome.LOADED
MISSING, CORRUPT = Outcome.MISSING, Outcome.CORRUPT
NO_ROOM, FAILED = Outcome.NO_ROOM, Outcome.FAILED


class CallTests(TierHooks):
    """Part of `TierTests`."""

    # ------------------------------------------------------------ lookup

    async def test_empty_batches(self, tier: Tier) -> None:
        assert await tier.lookup([]) == []
        assert await tier.store([]) == []
        assert await tier.load([]) == []
        assert await tier.evict([]) == []

    async def test_lookup_in_an_empty_tier(self, tier: Tier) -> None:
        assert await tier.lookup([self.key(0), self.key(1)]) == [False, False]
        assert tier.keys() == []

    async def test_lookup_answers_in_order(self, tier: Tier) -> None:
        await self.fill(tier, self.items(0, 2))
        asked = [self.key(i) for i in (5, 1, 6, 0, 1)]
        assert await tier.lookup(asked) == [False, True, False, True, True]

    async def test_lookup_of_many(self, tier: Tier) -> None:
        await self.fill(tier, self.items(0, 8))
        found = await tier.lookup([self.key(i) for i in range(512)])
        assert found == [i < 8 for i in range(512)]

    async def test_lookup_of_a_key_twice(self, tier: Tier) -> None:
        await self.fill(tier, self.items(0, 1))
        asked = [self.key(i) for i in (0, 1, 0, 1, 0)]
        assert await tier.lookup(asked) == [True, False, True, False, True]

    # ------------------------------------------------------------ store and load

    @pytest.mark.parametrize("count", [0, 1, 2, 5, 64])
    async def test_round_trip(self, tier: Tier, count: int) -> None:
        items = self.items(0, count)
        await self.fill(tier, items)
        await self.check_loads(tier, items)

    async def test_round_trip_of_every_size_in_one_batch(self, tier: Tier) -> None:
        items = [self.item(self.key(i), size) for i, size in enumerate(self.sizes)]
        await self.fill(tier, items)
        await self.check_loads(tier, items)

    async def test_keys_that_resemble_each_other(self, tier: Tier) -> None:
        ours, theirs = a_namespace(), a_namespace(tenant="other")
        hashes = [b"\0", b"\0\0", b"\0\0\0", bytes(32), b"\xab", b"\xab\0", b"\xab" * 32]
        keys = [ns.key(group, h) for ns in (ours, theirs) for group in (0, 1, 10) for h in hashes]
        keys.append(ours.key(0xFFFFFFFF, b"\0"))
        items = [self.item(key, min(self.sizes)) for key in keys]
        await self.fill(tier, items)
        await self.check_loads(tier, items)
        if tier.writable:
            assert tier.usage().chunks == len(keys)

    async def test_load_writes_inside_its_view_only(self, tier: Tier) -> None:
        items = self.items(0, 3)
        await self.fill(tier, items)
        slot = -(-self.size // PAGE) * PAGE
        memory = aligned(3 * slot, fill=0xAA)
        views = [memory[i * slot : i * slot + self.size] for i in range(3)]
        blank = [
            Item(item.key, view, i * slot)
            for i, (item, view) in enumerate(zip(items, views, strict=True))
        ]
        assert await tier.load(blank) == [LOADED] * 3
        self.check_bytes(blank, [LOADED] * 3)
        for i in range(3):
            rest = memory[i * slot + self.size : (i + 1) * slot]
            assert rest == b"\xaa" * len(rest)

    async def test_store_does_not_write_to_memory(self, tier: Tier) -> None:
        self.needs_store(tier)
        items = self.items(0, 3)
        await tier.store(items)
        assert [bytes(i.view) for i in items] == [payload(i.key, self.size) for i in items]

    async def test_present_is_not_stored_again(self, tier: Tier) -> None:
        self.needs_store(tier)
        items = self.items(0, 3)
        await self.fill(tier, items)
        used = tier.usage().used_bytes
        assert await tier.store(items) == [PRESENT] * 3
        assert tier.usage().used_bytes == used
        assert tier.usage().chunks == 3
        await self.check_loads(tier, items)

    async def test_store_answers_in_order(self, tier: Tier) -> None:
        self.needs_store(tier)
        items = self.items(0, 5)
        await self.fill(tier, items[1::2])
        assert await tier.store(items) == [STORED, PRESENT, STORED, PRESENT, STORED]
        await self.check_loads(tier, items)

    async def test_a_key_twice_in_a_store(self, tier: Tier) -> None:
        self.needs_store(tier)
        items = [self.item(self.key(i)) for i in (0, 1, 0, 0)]
        outcomes = await tier.store(items)
        assert set(outcomes) <= {STORED, PRESENT}
        assert outcomes[1] is STORED
        assert STORED in (outcomes[0], outcomes[2], outcomes[3])
        assert tier.usage().chunks == 2
        await self.check_loads(tier, items[:2])

    async def test_a_key_twice_in_a_load(self, tier: Tier) -> None:
        items = self.items(0, 2)
        await self.fill(tier, items)
        await self.check_loads(tier, [items[0], items[1], items[0]])

    async def test_load_of_what_is_not_there(self, tier: Tier) -> None:
        assert await tier.load(self.blank(self.items(0, 3))) == [MISSING] * 3

    async def test_load_answers_in_order(self, tier: Tier) -> None:
        items = self.items(0, 5)
        await self.fill(tier, items[1::2])
        blank = self.blank(items)
        outcomes = await tier.load(blank)
        assert outcomes == [MISSING, LOADED, MISSING, LOADED, MISSING]
        self.check_bytes(blank, outcomes)

    @pytest.mark.parametrize("by", [-1, 1, -PAGE, PAGE])
    async def test_load_of_another_size_is_never_served(self, tier: Tier, by: int) -> None:
        items = self.items(0, 3)
        await self.fill(tier, items)
        blank = self.blank(items)
        blank[1] = Item(items[1].key, aligned(self.size + by))
        outcomes = await tier.load(blank)
        assert outcomes[1] in (MISSING, CORRUPT, FAILED)
        assert [outcomes[0], outcomes[2]] == [LOADED, LOADED]
        self.check_bytes(blank, outcomes)

    async def test_a_known_checksum_is_kept(self, tier: Tier) -> None:
        self.needs_store(tier)
        item = self.item(self.key(0))
        await self.fill(tier, [Item(item.key, item.view, checksum=checksum(item.view))])
        await self.check_loads(tier, [item])

    async def test_memory_that_differs_from_its_checksum_is_never_served(self, tier: Tier) -> None:
        self.needs_store(tier)
        item = self.item(self.key(0))
        known = checksum(item.view)
        item.view[7] ^= 1
        await tier.store([Item(item.key, item.view, checksum=known)])
        [outcome] = await tier.load(self.blank([item]))
        assert outcome in (CORRUPT, MISSING)

    # ------------------------------------------------------------ what items say

    @pytest.mark.parametrize("more", [1, 128, PAGE, 3 * PAGE + 5])
    async def test_a_shorter_object_where_the_load_takes_one(self, tier: Tier, more: int) -> None:
        self.needs_shorter()
        items = self.items(0, 3)
        await self.fill(tier, items)
        blank = [Item(i.key, aligned(self.size + more, fill=0xAA), exact=False) for i in items]
        assert await tier.load(blank) == [LOADED] * 3
        for item in blank:
            assert item.view[: self.size] == payload(item.key, self.size)

    async def test_an_object_that_fits_where_a_shorter_one_would_do(self, tier: Tier) -> None:
        self.needs_shorter()
        items = [self.item(self.key(i), size) for i, size in enumerate(self.sizes)]
        await self.fill(tier, items)
        blank = [Item(i.key, aligned(i.view.nbytes), exact=False) for i in items]
        outcomes = await tier.load(blank)
        assert outcomes == [LOADED] * len(items)
        self.check_bytes(blank, outcomes)

    async def test_a_longer_object_is_never_cut(self, tier: Tier) -> None:
        self.needs_shorter()
        items = self.items(0, 2)
        await self.fill(tier, items)
        blank = self.blank(items)
        blank[0] = Item(items[0].key, aligned(self.size - 1), exact=False)
        outcomes = await tier.load(blank)
        assert outcomes[0] in (MISSING, CORRUPT, FAILED)
        assert outcomes[1] is LOADED
        self.check_bytes(blank[1:], outcomes[1:])

    async def test_parents_change_nothing_but_eviction(self, tier: Tier) -> None:
        self.needs_store(tier)
        items = self.chain(0, 6)
        assert await tier.store(items[:4]) == [STORED] * 4
        assert await tier.store(items) == [PRESENT] * 4 + [STORED] * 2
        await self.check_loads(tier, items)

    async def test_a_parent_that_is_not_there(self, tier: Tier) -> None:
        self.needs_store(tier)
        [item] = self.chain(7, 8)
        assert await tier.store([item]) == [STORED]
        assert await tier.lookup([self.key(6)]) == [False]
        await self.check_loads(tier, [item])

    @pytest.mark.parametrize("start", [1, 64, 512])
    async def test_memory_that_is_not_page_aligned(self, tier: Tier, start: int) -> None:
        self.needs_store(tier)
        memory = aligned(self.size + PAGE)[start : start + self.size]
        memory[:] = payload(self.key(0), self.size)
        assert await tier.store([Item(self.key(0), memory)]) == [STORED]
        blank = Item(self.key(0), aligned(self.size + PAGE)[start : start + self.size])
        assert await tier.load([blank]) == [LOADED]
        self.check_bytes([blank], [LOADED])

    # ------------------------------------------------------------ memory between calls

    async def test_memory_is_free_after_a_store(self, tier: Tier) -> None:
        self.needs_store(tier)
        items = self.items(0, 8)
        await tier.store(items)
        for item in items:
            item.view[:] = bytes(item.view.nbytes)
        await tier.drain()
        await self.check_loads(tier, items)

    @pytest.mark.parametrize("late", [False, True])
    async def test_memory_is_free_after_a_load(
        self, tier: Tier, clock: FakeClock, late: bool
    ) -> None:
        items = self.items(0, 8)
        await self.fill(tier, items)
        blank = self.blank(items)
        await tier.load(blank, deadline=clock() - 1 if late else None)
        await self._check_untouched(tier, blank)

    async def test_memory_is_free_after_a_cancelled_load(self, tier: Tier) -> None:
        items = self.items(0, 32)
        await self.fill(tier, items)
        blank = self.blank(items)
        call = asyncio.ensure_future(tier.load(blank))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
        await self._check_untouched(tier, blank)
        await self.check_loads(tier, items)

    async def test_memory_is_free_after_a_cancelled_store(self, tier: Tier) -> None:
        self.needs_store(tier)
        items = self.items(0, 32)
        call = asyncio.ensure_future(tier.store(items))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
        for item in items:
            item.view[:] = bytes(item.view.nbytes)
        await tier.drain()
        found = await tier.lookup([item.key for item in items])
        blank = self.blank(items)
        outcomes = await tier.load(blank)
        self.check_bytes(blank, outcomes)
        assert [o is LOADED for o in outcomes] == found

    async def _check_untouched(self, tier: Tier, items: Sequence[Item]) -> None:
        for item in items:
            item.view[:] = b"\x55" * item.view.nbytes
        await tier.drain()
        for item in items:
            assert item.view == b"\x55" * item.view.nbytes, "memory touched after its call"

    # ------------------------------------------------------------ evict

    async def test_evicted_is_gone(self, tier: Tier, removed: list[Key]) -> None:
        self.needs_store(tier)
        items = self.items(0, 4)
        await self.fill(tier, items)
        assert await tier.evict([self.key(1), self.key(3)]) == [True, True]
        assert sorted(removed) == sorted([self.key(1), self.key(3)])
        assert await tier.lookup([self.key(i) for i in range(4)]) == [True, False, True, False]
        blank = self.blank(items)
        assert await tier.load(blank) == [LOADED, MISSING, LOADED, MISSING]
        assert sorted(tier.keys()) == sorted([self.key(0), self.key(2)])

    async def test_evict_of_what_is_not_there(self, tier: Tier, removed: list[Key]) -> None:
        self.needs_store(tier)
        await self.fill(tier, self.items(0, 1))
        assert await tier.evict([self.key(i) for i in (7, 0, 8)]) == [False, True, False]
        assert removed == [self.key(0)]

    async def test_evicted_can_be_stored_again(self, tier: Tier) -> None:
        self.needs_store(tier)
        items = self.items(0, 3)
        await self.fill(tier, items)
        await tier.evict([item.key for item in items])
        await self.fill(tier, items)
        await self.check_loads(tier, items)

    async def test_evict_of_a_key_twice(self, tier: Tier, removed: list[Key]) -> None:
        self.needs_store(tier)
        await self.fill(tier, self.items(0, 2))
        gone = await tier.evict([self.key(0), self.key(0)])
        assert gone[0]
        assert removed == [self.key(0)]
        assert await tier.evict([self.key(0)]) == [False]
        assert tier.keys() == [self.key(1)]
