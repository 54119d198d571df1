"""What is stored in a tier, and when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from tier_kit import PAGE, TroubledTier, find, key, make_store, payload, put, timeless

from kvstrata.config import CascadeMode
from kvstrata.keys import Key
from kvstrata.node.store import Store
from kvstrata.tiers.base import Item, Outcome


@asynccontextmanager
async def cascading(
    *tiers: TroubledTier, mode: CascadeMode, pages: int = 16
) -> AsyncIterator[Store]:
    store = make_store(*tiers, pages=pages, cascade=mode)
    loops = [asyncio.create_task(cascade.run()) for cascade in store.cascades]
    yield store
    assert await store.close() == []
    await asyncio.gather(*loops)


async def settled(store: Store) -> None:
    await asyncio.sleep(0.01)
    await asyncio.gather(*(cascade.drain() for cascade in store.cascades))


# ---------------------------------------------------------------- second touch


@timeless
async def test_what_a_tier_drops_as_soon_as_it_has_said_that_it_is_there_is_gone() -> None:
    class Fickle(TroubledTier):
        async def store(
            self, batch: Sequence[Item], deadline: float | None = None
        ) -> list[Outcome]:
            outcomes = await super().store(batch, deadline)
            asyncio.get_running_loop().call_soon(drop, [batch[0].key])
            return outcomes

    def drop(keys: list[Key]) -> None:
        store.placements.removed(tier.store_id, keys)
        store.lost(tier.name, keys)

    tier = Fickle()
    async with cascading(tier, mode="write_through") as store:
        put(store, 1, 2)
        await settled(store)
        [there] = [c for c in store.placements.take() if c.location == tier.store_id]
        assert (there.added, there.removed) == ([key(2)], [key(1)])
        assert store.cascades[0].stored == 2


@timeless
async def test_second_touch_stores_what_is_used_once_more() -> None:
    tier = TroubledTier()
    async with cascading(tier, mode="second_touch") as store:
        assert await find(store, 1, 2, wait=0) == {}  # before they are there it is no use
        put(store, 1, 2, 3)
        await settled(store)
        assert tier.chunks == {}
        await find(store, 1, 2, wait=0)
        await settled(store)
        assert set(tier.chunks) == {key(1), key(2)}
        await find(store, 1, 2, wait=0)
        await settled(store)
        assert len(tier.stores) == 1  # once


@timeless
async def test_second_touch_takes_what_came_from_another_tier() -> None:
    near, far = TroubledTier("near"), TroubledTier("far")
    far.chunks = {key(1): payload(key(1))}
    async with cascading(near, far, mode="second_touch") as store:
        await find(store, 1)
        await settled(store)
        assert set(near.chunks) == {key(1)}
        assert far.stores == []


@timeless
async def test_second_touch_forgets_what_is_evicted_and_tries_again_what_failed() -> None:
    tier = TroubledTier()
    tier.fails = {"store"}
    async with cascading(tier, mode="second_touch") as store:
        put(store, 1, 2)
        await find(store, 1, wait=0)
        await settled(store)
        assert tier.chunks == {}
        tier.fails.clear()
        await find(store, 1, wait=0)
        await settled(store)
        assert set(tier.chunks) == {key(1)}
        store.host.release("reader", [1])
        store.host.drop()
        put(store, 2)
        await settled(store)
        assert set(tier.chunks) == {key(1)}
        assert store.cascades[0].dropped == 0


# ---------------------------------------------------------------- on evict


@timeless
async def test_on_evict_stores_nothing_while_there_is_room() -> None:
    tier = TroubledTier()
    async with cascading(tier, mode="on_evict", pages=32) as store:
        put(store, *range(28))
        await settled(store)
        assert tier.stores == []


@timeless
async def test_on_evict_stores_the_coldest_ahead_of_their_eviction() -> None:
    tier = TroubledTier()
    async with cascading(tier, mode="on_evict", pages=32) as store:
        put(store, *range(28))
        put(store, *range(28, 32))
        await settled(store)
        assert set(tier.chunks) == {key(n) for n in (24, 25, 26, 27)}  # a chain's tail goes first
        for start in range(100, 200, 4):
            put(store, *range(start, start + 4))
            await settled(store)
        assert store.host.evicted == 100
        assert store.cascades[0].dropped == 0
        gone = [k for k in map(key, range(200)) if k in tier.chunks and store.host.get(k) is None]
        assert len(gone) == 100  # nothing was lost, though all was evicted synchronously


@timeless
async def test_a_chunk_that_must_go_before_it_was_stored_is_lost_and_counted() -> None:
    tier = TroubledTier()
    tier.hangs = {"store"}
    async with cascading(tier, mode="on_evict", pages=32) as store:
        for start in range(0, 64, 4):
            put(store, *range(start, start + 4))
            await asyncio.sleep(0.01)
        assert store.host.evicted == 32
        # The batch being stored is in use, and stays.
        assert store.cascades[0].dropped == 32
        tier.release()


@timeless
async def test_what_a_tier_gave_up_is_stored_again_ahead_of_its_eviction() -> None:
    tier = TroubledTier()
    async with cascading(tier, mode="on_evict", pages=32) as store:
        put(store, *range(32))
        await settled(store)
        kept = list(tier.chunks)
        assert len(kept) == 4
        tier.chunks.clear()
        store.lost("troubled", kept)
        put(store, *range(100, 104))
        await settled(store)
        assert store.cascades[0].dropped == 4
        assert all(k in tier.chunks for k in map(key, range(24, 28)))


@timeless
async def test_what_is_only_in_memory_is_stored_before_the_end_the_hottest_first() -> None:
    tier = TroubledTier()
    async with cascading(tier, mode="on_evict", pages=32) as store:
        for n in range(20):
            put(store, n)
        await find(store, 3, wait=0)
        store.host.release("reader", [1])
        await settled(store)
        assert tier.stores == []
        store.cascades[0].flush()
        await settled(store)
        assert len(tier.chunks) == 20
        assert [item.key for item in tier.stores[0]][:2] == [key(3), key(19)]


# ---------------------------------------------------------------- all modes


@timeless
@pytest.mark.parametrize("mode", ["write_through", "second_touch", "on_evict"])
async def test_a_tier_that_only_reads_has_no_cascade(mode: CascadeMode) -> None:
    async with cascading(TroubledTier(writable=False), mode=mode) as store:
        assert store.cascades == []


@timeless
async def test_a_full_queue_drops_stores_and_counts_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvstrata.node.cascade._QUEUE_KEYS", 4)
    store = make_store(TroubledTier())
    put(store, *range(10))
    (cascade,) = store.cascades
    assert (cascade.waiting, cascade.dropped) == (4, 6)
    assert len(await find(store, *range(10), wait=0)) == 10
    await store.close()


@timeless
async def test_stores_tell_which_chunk_extends_which() -> None:
    tier = TroubledTier()
    async with cascading(tier, mode="write_through") as store:
        await find(store, 1, 2, 3, wait=0)
        put(store, 1, 2, 3, 9)
        await settled(store)
        parents = {item.key: item.parent for batch in tier.stores for item in batch}
        assert parents == {key(1): None, key(2): key(1), key(3): key(2), key(9): None}


@timeless
async def test_batches_are_bounded_by_the_share_of_the_region() -> None:
    one, two = TroubledTier("one"), TroubledTier("two")
    async with cascading(one, two, mode="write_through", pages=32) as store:
        put(store, *range(32))
        await settled(store)
        sizes = [sum(len(i.view) for i in batch) for tier in (one, two) for batch in tier.stores]
        assert max(sizes) == 4 * PAGE
