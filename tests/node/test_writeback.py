"""Chunks put into stores now, because the node is to be stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tier_kit import NAMESPACE, PAGE, TroubledTier, key, make_store, payload, put, timeless

from kvstrata.api import Outcome
from kvstrata.errors import Malformed
from kvstrata.keys import Key
from kvstrata.node.reported import WriteBack, Written
from kvstrata.node.store import Store
from kvstrata.node.writeback import parents_first, write_back
from kvstrata.tiers.base import Item
from kvstrata.tiers.base import Outcome as TierOutcome


class SmallTier(TroubledTier):
    """Has room for two."""

    async def store(
        self, batch: Sequence[Item], deadline: float | None = None
    ) -> list[TierOutcome]:
        answers = []
        for item in batch:
            if len(self.chunks) < 2:
                self.chunks[item.key] = bytes(item.view)
            here = item.key in self.chunks
            answers.append(TierOutcome.STORED if here else TierOutcome.NO_ROOM)
        return answers


async def written(store: Store, *numbers: int, stores: Sequence[str]) -> Written:
    told = Written()
    await write_back(store, WriteBack("o", [key(n) for n in numbers], stores), told)
    return told


@timeless
async def test_each_chunk_goes_to_the_first_store_that_takes_it() -> None:
    near, far = SmallTier("near"), TroubledTier("far")
    store = make_store(near, far, pages=8, cascade="on_evict")
    put(store, 1, 2, 3)
    told = await written(store, 1, 2, 3, 9, stores=["near-store", "far-store"])
    assert told.outcomes == {
        **{key(n): Outcome.STORED for n in (1, 2, 3)},
        key(9): Outcome.MISSING,
    }
    assert told.stores == {
        key(1): "near-store",
        key(2): "near-store",
        key(3): "far-store",
    }
    assert far.chunks == {key(3): payload(key(3))}
    placed = {change.location: set(change.added) for change in store.placements.take()}
    assert placed["far-store"] == {key(3)}
    store.cascades[1].flush()
    assert store.cascades[1].waiting == 2  # what is stored by now is not stored again


@timeless
async def test_what_only_a_disk_has_is_brought_up_and_stored_elsewhere() -> None:
    disk, bucket = TroubledTier("disk"), TroubledTier("bucket")
    disk.chunks = {key(n): payload(key(n)) for n in range(12)}
    store = make_store(disk, bucket, pages=8)
    told = await written(store, *range(12), stores=["bucket-store"])
    assert set(told.outcomes.values()) == {Outcome.STORED}
    assert bucket.chunks == disk.chunks
    assert store.host.usage().leases == 0


@timeless
async def test_a_store_that_hangs_or_fails_holds_nothing_up() -> None:
    hung, failing = TroubledTier("hung"), TroubledTier("failing")
    hung.hangs.add("store")
    failing.fails.add("store")
    store = make_store(hung, failing, pages=8, cascade="on_evict")
    put(store, 1, 2, 3, 4)
    told = await written(store, 1, 2, 3, 4, stores=["hung-store", "failing-store"])
    assert told.outcomes == {key(n): Outcome.FAILED for n in (1, 2, 3, 4)}
    assert hung.spoiled == []
    hung.release()
    await store.close()


@timeless
async def test_what_was_done_in_time_is_told() -> None:
    tier = TroubledTier()
    store = make_store(tier, pages=8, cascade="on_evict")
    put(store, 1, 2, 3, 4)
    told = Written()

    async def stores(batch: Sequence[Item], deadline: float | None = None) -> list[TierOutcome]:
        await asyncio.sleep(4)
        return [TierOutcome.STORED] * len(batch)

    tier.store = stores  # type: ignore[method-assign]
    asked = WriteBack("o", [key(n) for n in (1, 2, 3, 4)], [tier.store_id])
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(6):
            await write_back(store, asked, told)
    assert told.outcomes == {key(1): Outcome.STORED, key(2): Outcome.STORED}  # two a batch
    await store.close()
    assert [store.host.pin([key(n)])[0].io for n in (3, 4)] == [1, 1]  # pinned by nobody else


@timeless
async def test_stores_that_are_not_here_are_an_error() -> None:
    store = make_store(TroubledTier("disk"))
    with pytest.raises(Malformed, match=r"\['bucket'\] is attached here: \['disk-store'\] are"):
        await written(store, 1, stores=["bucket"])


@timeless
async def test_the_beginning_of_a_chain_is_stored_first() -> None:
    tier = TroubledTier()
    store = make_store(tier, pages=8, cascade="on_evict")
    put(store, 3, 1, 2)
    store.host.lease("e", 1, [key(n) for n in (1, 2, 3)], 10, chain=True)
    await written(store, 3, 2, 1, stores=[tier.store_id])
    assert [item.key for batch in tier.stores for item in batch] == [key(1), key(2), key(3)]


@given(st.permutations(range(12)), st.lists(st.integers(0, 11), min_size=12, max_size=12))
def test_parents_come_first_whatever_the_tree(asked: list[int], parents: list[int]) -> None:
    """`parents[n]` is what n extends: an own number, or one that makes a circle, extends nothing
    that can come before it."""

    def parent_of(child: Key) -> Key | None:
        return key(parents[numbers[child]])

    numbers = {key(n): n for n in range(12)}
    some = [key(n) for n in asked[:9]]
    ordered = parents_first([*some, *some[:3]], parent_of)
    assert sorted(ordered) == sorted(some)
    place = {each: i for i, each in enumerate(ordered)}
    for each in some:
        above, seen = parent_of(each), {each}
        while above is not None and above in place and above not in seen:
            seen.add(above)
            above = parent_of(above)
        if above in seen:
            continue  # it leads into a circle
        parent = parent_of(each)
        assert parent is None or parent not in place or place[parent] < place[each]


def test_chunks_are_of_a_page() -> None:
    assert NAMESPACE.chunk_bytes[0] == PAGE
