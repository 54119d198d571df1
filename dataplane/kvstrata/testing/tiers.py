"""The contract of a tier as a test suite.

    class TestMyTier(TierTests):
        async def open_tier(self, tmp_path, context):
            return await MyTier.open({"root": str(tmp_path)}, context)

Say with `durable` whether chunks outlive a tier object, with `sizes` which payloads it takes.
Give `damage` and `open_bounded` if the tier can be damaged or bounded: their tests are skipped
otherwise. A tier that only reads (`writable = False`) gives `fill`. Needs pytest-asyncio.
"""

from __future__ import annotations

import asyncio
import enum
import hashlib
import mmap
import random
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import ClassVar

import pytest
import pytest_asyncio

from kvstrata.errors import LinkBroken
from kvstrata.keys import Key
from kvstrata.testing.chunks import a_namespace
from kvstrata.testing.clock import FakeClock
from kvstrata.tiers.base import Item, Outcome, Tier, TierContext, checksum

__all__ = ["Damage", "TierTests", "aligned", "payload"]

STORED, PRESENT, LOADED = Outcome.STORED, Outcome.PRESENT, Outcome.LOADED
MISSING, CORRUPT = Outcome.MISSING, Outcome.CORRUPT
NO_ROOM, FAILED = Outcome.NO_ROOM, Outcome.FAILED

PAGE = mmap.PAGESIZE


class Damage(enum.StrEnum):
    """What can happen to a stored object behind a tier's back."""

    FLIP = "flip"  # a bit of the payload
    TRUNCATE = "truncate"  # its second half is gone
    SWAP = "swap"  # it has changed places with another chunk's object


def aligned(nbytes: int, fill: int = 0) -> memoryview:
    """Page-aligned memory of `nbytes`, like a slot, every byte of it `fill`."""
    view = memoryview(mmap.mmap(-1, max(nbytes, 1)))[:nbytes]
    view[:] = bytes([fill]) * nbytes
    return view


def payload(key: Key, nbytes: int) -> bytes:
    """The bytes this suite stores under a key."""
    return random.Random(key).randbytes(nbytes)  # noqa: S311


class TierTests:
    """Inherit these tests by subclassing; see the module's docstring for the hooks."""

    pytestmark = pytest.mark.asyncio

    durable: ClassVar[bool] = True
    """Whether what was acknowledged is there when the tier is closed and opened again."""
    sizes: ClassVar[Sequence[int]] = (1, 511, 512, 4095, 4096, 4097, 65_536, 100_000)
    """Payload sizes in bytes that the tier must take."""
    size: ClassVar[int] = 10_000
    """Payload size of tests that don't vary it."""

    # ------------------------------------------------------------ hooks

    async def open_tier(self, tmp_path: Path, context: TierContext) -> Tier:
        """Open it over `tmp_path`; twice in one test means opening the same store again."""
        raise NotImplementedError

    async def open_bounded(self, tmp_path: Path, context: TierContext, capacity: int) -> Tier:
        """Open it so that it holds at most `capacity` bytes."""
        pytest.skip("this tier gives no open_bounded")

    async def damage(self, tier: Tier, key: Key, how: Damage, other: Key) -> None:
        """Damage the stored object of `key`; `other` is the chunk to swap with."""
        pytest.skip("this tier gives no damage")

    async def fill(self, tier: Tier, items: Sequence[Item]) -> None:
        """Make the tier hold these chunks."""
        assert await tier.store(items) == [STORED] * len(items)

    # ------------------------------------------------------------ fixtures and parts

    @pytest.fixture
    def clock(self) -> FakeClock:
        # Far behind time.monotonic: a tier that reads that one finds every deadline past.
        return FakeClock(-1e9)

    @pytest.fixture
    def removed(self) -> list[Key]:
        """What the tier has announced as removed."""
        return []

    @pytest.fixture
    def context(self, clock: FakeClock, removed: list[Key]) -> TierContext:
        loop_thread = threading.get_ident()
        namespace = a_namespace()

        def on_removed(keys: Sequence[Key]) -> None:
            assert threading.get_ident() == loop_thread, "on_removed called off the event loop"
            removed.extend(keys)

        return TierContext(
            node_id="node",
            clock=clock,
            namespace_of=lambda digest: namespace if digest == namespace.digest else None,
            on_removed=on_removed,
        )

    @pytest_asyncio.fixture
    async def tier(self, tmp_path: Path, context: TierContext) -> AsyncIterator[Tier]:
        tier = await self.open_tier(tmp_path, context)
        yield tier
        await tier.close()

    def key(self, i: int, group: int = 0) -> Key:
        """The i-th key of a chain."""
        return a_namespace().key(group, hashlib.sha256(b"%d" % i).digest())

    def item(self, key: Key, size: int | None = None) -> Item:
        """A chunk ready to be stored."""
        view = aligned(self.size if size is None else size)
        view[:] = payload(key, view.nbytes)
        return Item(key, view)

    def items(self, start: int, stop: int) -> list[Item]:
        return [self.item(self.key(i)) for i in range(start, stop)]

    def blank(self, items: Sequence[Item]) -> list[Item]:
        """Memory to load these chunks into."""
        return [Item(item.key, aligned(item.view.nbytes, fill=0xAA)) for item in items]

    def check_bytes(self, items: Sequence[Item], outcomes: Sequence[Outcome]) -> None:
        """Every `LOADED` item holds the bytes that were stored under its key."""
        assert len(outcomes) == len(items)
        for item, outcome in zip(items, outcomes, strict=True):
            if outcome is LOADED:
                assert item.view == payload(item.key, item.view.nbytes), "wrong bytes were served"

    async def check_loads(self, tier: Tier, items: Sequence[Item]) -> None:
        """All of them can be found and loaded, and are right."""
        assert await tier.lookup([item.key for item in items]) == [True] * len(items)
        blank = self.blank(items)
        outcomes = await tier.load(blank)
        assert outcomes == [LOADED] * len(items)
        self.check_bytes(blank, outcomes)

    def needs_store(self, tier: Tier) -> None:
        if not tier.writable:
            pytest.skip("this tier only reads")

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

    # ------------------------------------------------------------ damage

    @pytest.mark.parametrize("how", list(Damage))
    async def test_damaged_is_corrupt_then_missing(
        self, tier: Tier, removed: list[Key], how: Damage
    ) -> None:
        items = self.items(0, 4)
        await self.fill(tier, items)
        await self.damage(tier, items[1].key, how, other=items[2].key)
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
        await self.damage(tier, items[0].key, Damage.FLIP, other=items[1].key)
        await tier.load(self.blank(items))
        assert tier.usage().counters["corrupt"] == before + 1

    @pytest.mark.parametrize("how", list(Damage))
    async def test_damaged_can_be_stored_again(self, tier: Tier, how: Damage) -> None:
        self.needs_store(tier)
        items = self.items(0, 3)
        await self.fill(tier, items)
        await self.damage(tier, items[0].key, how, other=items[1].key)
        await tier.load(self.blank(items))
        assert set(await tier.store(items)) <= {STORED, PRESENT}
        await self.check_loads(tier, items)

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

    # ------------------------------------------------------------ many at once

    async def test_parallel_batches(self, tier: Tier) -> None:
        self.needs_store(tier)
        batches = [self.items(8 * i, 8 * i + 8) for i in range(16)]
        outcomes = await asyncio.gather(*(tier.store(batch) for batch in batches))
        assert outcomes == [[STORED] * 8] * 16
        await asyncio.gather(*(self.check_loads(tier, batch) for batch in batches))
        assert tier.usage().chunks == 128

    async def test_parallel_stores_of_the_same_chunks(self, tier: Tier) -> None:
        self.needs_store(tier)
        items = self.items(0, 8)
        outcomes = await asyncio.gather(*(tier.store(items) for _ in range(8)))
        assert {o for batch in outcomes for o in batch} <= {STORED, PRESENT}
        assert tier.usage().chunks == 8
        await self.check_loads(tier, items)

    async def test_loads_beside_evictions(self, tier: Tier) -> None:
        self.needs_store(tier)
        items = self.items(0, 16)
        await self.fill(tier, items)
        blanks = [self.blank(items) for _ in range(8)]
        loads = asyncio.gather(*(tier.load(blank) for blank in blanks))
        evicts = asyncio.gather(*(tier.evict([item.key]) for item in items))
        outcomes, _ = await asyncio.gather(loads, evicts)
        for blank, outcome in zip(blanks, outcomes, strict=True):
            assert set(outcome) <= {LOADED, MISSING}
            self.check_bytes(blank, outcome)
        assert await tier.lookup([item.key for item in items]) == [False] * 16

    @pytest.mark.parametrize("seed", range(4))
    async def test_random_walk(self, tier: Tier, seed: int) -> None:
        """Any order of calls: a chunk that was stored and not evicted loads, with its bytes."""
        self.needs_store(tier)
        rng = random.Random(seed)  # noqa: S311
        held: set[Key] = set()
        for _ in range(60):
            some = [self.item(self.key(rng.randrange(20))) for _ in range(rng.randrange(6))]
            keys = [item.key for item in some]
            match rng.choice(["store", "load", "evict", "lookup"]):
                case "store":
                    outcomes = await tier.store(some)
                    assert set(outcomes) <= {STORED, PRESENT}
                    stored = {k for k, o in zip(keys, outcomes, strict=True) if o is STORED}
                    assert stored == set(keys) - held
                    held |= set(keys)
                case "load":
                    blank = self.blank(some)
                    outcomes = await tier.load(blank)
                    assert outcomes == [LOADED if k in held else MISSING for k in keys]
                    self.check_bytes(blank, outcomes)
                case "evict":
                    keys = list(dict.fromkeys(keys))
                    assert await tier.evict(keys) == [k in held for k in keys]
                    held -= set(keys)
                case "lookup":
                    assert await tier.lookup(keys) == [k in held for k in keys]
            assert set(tier.keys()) == held
            assert tier.usage().chunks == len(held)

    # ------------------------------------------------------------ deadlines

    async def test_store_after_its_deadline(self, tier: Tier, clock: FakeClock) -> None:
        self.needs_store(tier)
        items = self.items(0, 8)
        outcomes = await tier.store(items, deadline=clock() - 1)
        assert set(outcomes) <= {STORED, FAILED}
        blank = self.blank(items)
        loaded = await tier.load(blank)
        self.check_bytes(blank, loaded)
        assert all(
            after is LOADED
            for before, after in zip(outcomes, loaded, strict=True)
            if before is STORED
        )

    async def test_load_after_its_deadline(self, tier: Tier, clock: FakeClock) -> None:
        items = self.items(0, 8)
        await self.fill(tier, items)
        blank = self.blank(items)
        outcomes = await tier.load(blank, deadline=clock() - 1)
        assert set(outcomes) <= {LOADED, FAILED}
        self.check_bytes(blank, outcomes)
        await self.check_loads(tier, items)

    async def test_lookup_after_its_deadline(self, tier: Tier, clock: FakeClock) -> None:
        await self.fill(tier, self.items(0, 2))
        found = await tier.lookup([self.key(i) for i in range(4)], deadline=clock() - 1)
        assert len(found) == 4
        assert found[2:] == [False, False]

    async def test_deadlines_are_in_the_contexts_clock(self, tier: Tier, clock: FakeClock) -> None:
        self.needs_store(tier)
        items = self.items(0, 2)
        assert await tier.store(items, deadline=clock() + 60) == [STORED] * 2
        assert await tier.load(self.blank(items), deadline=clock() + 60) == [LOADED] * 2

    # ------------------------------------------------------------ the end

    async def test_drain_of_an_idle_tier(self, tier: Tier, clock: FakeClock) -> None:
        await tier.drain()
        await tier.drain(deadline=clock() + 60)

    async def test_drained_means_stored(self, tier: Tier) -> None:
        self.needs_store(tier)
        items = self.items(0, 32)
        call = asyncio.ensure_future(tier.store(items))
        await asyncio.sleep(0)
        await tier.drain()
        assert await tier.lookup([item.key for item in items]) == [True] * 32
        assert await call == [STORED] * 32

    async def test_close_is_idempotent(self, tier: Tier) -> None:
        await tier.close()
        await tier.close()

    async def test_closed_refuses_every_call(self, tier: Tier) -> None:
        item = self.item(self.key(0))
        await tier.close()
        for call in (
            lambda: tier.lookup([item.key]),
            lambda: tier.store([item]),
            lambda: tier.load([item]),
            lambda: tier.evict([item.key]),
            lambda: tier.drain(),
        ):
            with pytest.raises(LinkBroken):
                await call()
        with pytest.raises(LinkBroken):
            tier.keys()
        with pytest.raises(LinkBroken):
            tier.usage()

    async def test_close_waits_for_running_calls(self, tier: Tier) -> None:
        items = self.items(0, 32)
        await self.fill(tier, items)
        blank = self.blank(items)
        call = asyncio.ensure_future(tier.load(blank))
        await asyncio.sleep(0)
        await asyncio.gather(tier.close(), tier.close())
        for item in blank:
            item.view[:] = b"\x55" * item.view.nbytes
        # Whatever the call may still do, it must not write any more.
        outcomes = await asyncio.gather(call, return_exceptions=True)
        assert isinstance(outcomes[0], list | LinkBroken)
        for item in blank:
            assert item.view == b"\x55" * item.view.nbytes, "memory touched after close"
