"""Tests of a tier: calls beside each other, deadlines, a medium that hangs, and the end."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstrata.errors import Expired, LinkBroken
from kvstrata.keys import Key
from kvstrata.testing.clock import FakeClock
from kvstrata.testing.tier_hooks import TierHooks
from kvstrata.tiers.base import Item, Outcome, Tier, TierContext

STORED, PRESENT, LOADED = Outcome.STORED, Outcome.PRESENT, Outcome.LOADED
MISSING, CORRUPT = Outcome.MISSING, Outcome.CORRUPT
NO_ROOM, FAILED = Outcome.NO_ROOM, Outcome.FAILED


class TimeTests(TierHooks):
    """Part of `TierTests`."""

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

    async def test_many_calls_at_once(self, tier: Tier) -> None:
        items = self.items(0, 8)
        await self.fill(tier, items)
        keys = [item.key for item in items]
        blanks = [self.blank(items) for _ in range(24)]
        lookups = asyncio.gather(*(tier.lookup([*keys, self.key(50)]) for _ in range(60)))
        loads = asyncio.gather(*(tier.load(blank) for blank in blanks))
        found, outcomes = await asyncio.gather(lookups, loads)
        assert found == [[True] * 8 + [False]] * 60
        for blank, outcome in zip(blanks, outcomes, strict=True):
            assert outcome == [LOADED] * 8
            self.check_bytes(blank, outcome)

    async def test_loads_beside_stores(self, tier: Tier) -> None:
        self.needs_store(tier)
        items = self.items(0, 16)
        blanks = [self.blank(items) for _ in range(6)]
        stores = asyncio.gather(*(tier.store(items[i : i + 4]) for i in range(0, 16, 4)))
        loads = asyncio.gather(*(tier.load(blank) for blank in blanks))
        stored, outcomes = await asyncio.gather(stores, loads)
        assert stored == [[STORED] * 4] * 4
        for blank, outcome in zip(blanks, outcomes, strict=True):
            assert set(outcome) <= {LOADED, MISSING}
            self.check_bytes(blank, outcome)
        await self.check_loads(tier, items)

    async def test_stores_beside_evictions(self, tier: Tier, removed: list[Key]) -> None:
        self.needs_store(tier)
        items = self.items(0, 12)
        await self.fill(tier, items[:6])
        keys = [item.key for item in items]
        told: dict[Key, int] = {}

        async def store() -> None:
            outcomes = await tier.store(items)
            there = [i.key for i, o in zip(items, outcomes, strict=True) if o in (STORED, PRESENT)]
            told.update(dict.fromkeys(there, len(removed)))

        await asyncio.gather(*(store() for _ in range(4)), tier.evict(keys))
        held = set(tier.keys())
        for key in told.keys() - held:
            assert key in removed[told[key] :], "acknowledged after it was said to be gone"
        assert tier.usage().chunks == len(held)
        # One that was stored anew right after its removal may be found again, where nobody believed
        # in it any more.
        found = await tier.lookup(keys)
        assert all(there for key, there in zip(keys, found, strict=True) if key in held)
        await self.check_loads(tier, [i for i, f in zip(items, found, strict=True) if f])
        assert set(keys) - held <= set(removed), "dropped without a word"

    async def test_parallel_evictions_of_the_same_chunks(
        self, tier: Tier, removed: list[Key]
    ) -> None:
        self.needs_store(tier)
        items = self.items(0, 8)
        await self.fill(tier, items)
        keys = [item.key for item in items]
        gone = await asyncio.gather(*(tier.evict(keys) for _ in range(5)))
        assert all(any(call[i] for call in gone) for i in range(8))
        assert sorted(removed) == sorted(keys), "announced twice, or not at all"
        assert (tier.usage().used_bytes, tier.usage().chunks) == (0, 0)

    async def test_cancelled_calls_leave_the_tier_whole(self, tier: Tier) -> None:
        self.needs_store(tier)
        items = self.items(0, 24)
        await self.fill(tier, items[:12])
        keys = [item.key for item in items]
        calls: list[asyncio.Future[object]] = [
            asyncio.ensure_future(tier.lookup(keys)),
            asyncio.ensure_future(tier.store(items)),
            asyncio.ensure_future(tier.load(self.blank(items))),
            asyncio.ensure_future(tier.evict(keys[:3])),
        ]
        await asyncio.sleep(0)
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        await tier.drain()
        held = set(tier.keys())
        assert held <= set(keys)
        assert tier.usage().chunks == len(held)
        await self.check_loads(tier, [item for item in items if item.key in held])
        assert set(await tier.store(items)) <= {STORED, PRESENT}
        await self.check_loads(tier, items)

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

    async def test_a_past_deadline_harms_no_later_call(self, tier: Tier, clock: FakeClock) -> None:
        items = self.items(0, 4)
        await self.fill(tier, items[:2])
        past = clock() - 1
        await tier.lookup([self.key(0), self.key(9)], deadline=past)
        await tier.load(self.blank(items), deadline=past)
        await tier.store(items, deadline=past)
        if tier.writable:
            assert set(await tier.store(items)) <= {STORED, PRESENT}
        await self.check_loads(tier, items[:2])

    async def test_drain_of_an_idle_tier_after_its_deadline(
        self, tier: Tier, clock: FakeClock
    ) -> None:
        with contextlib.suppress(Expired):
            await asyncio.wait_for(tier.drain(deadline=clock() - 1), 10)
        await tier.drain()

    # ------------------------------------------------------------ a medium that hangs

    async def test_a_hung_load_ends_when_the_medium_answers(
        self, tier: Tier, clock: FakeClock
    ) -> None:
        items = self.items(0, 4)
        await self.fill(tier, items)
        blank = self.blank(items)
        with self.stall(tier):
            call = asyncio.ensure_future(tier.load(blank, deadline=clock() + 60))
            done, _ = await asyncio.wait([call], timeout=0.05)
            assert not done
            assert tier.usage().chunks == 4
            assert len(tier.keys()) == 4
            with pytest.raises(Expired):
                await tier.drain(deadline=clock() + 0.05)
        outcomes = await asyncio.wait_for(call, 20)
        assert set(outcomes) <= {LOADED, FAILED}
        self.check_bytes(blank, outcomes)
        await self.check_loads(tier, items)

    async def test_a_hung_store_holds_up_no_lookup(self, tier: Tier, clock: FakeClock) -> None:
        self.needs_store(tier)
        items = self.items(0, 4)
        await self.fill(tier, items[:2])
        with self.stall(tier):
            call = asyncio.ensure_future(tier.store(items[2:], deadline=clock() + 60))
            done, _ = await asyncio.wait([call], timeout=0.05)
            assert not done
            found = await asyncio.wait_for(tier.lookup([self.key(0), self.key(1)]), 20)
            assert found == [True, True]
        outcomes = await asyncio.wait_for(call, 20)
        assert set(outcomes) <= {STORED, FAILED}
        await self.check_loads(tier, items[:2])

    async def test_a_hung_call_past_its_deadline(self, tier: Tier, clock: FakeClock) -> None:
        items = self.items(0, 4)
        await self.fill(tier, items)
        blank = self.blank(items)
        with self.stall(tier):
            call = asyncio.ensure_future(tier.load(blank, deadline=clock() + 1))
            await asyncio.wait([call], timeout=0.05)
            clock.advance(2)
        outcomes = await asyncio.wait_for(call, 20)
        assert set(outcomes) <= {LOADED, FAILED, MISSING}
        self.check_bytes(blank, outcomes)
        await self._untouched(tier, blank)

    async def test_close_while_the_medium_hangs(self, tier: Tier, clock: FakeClock) -> None:
        items = self.items(0, 4)
        await self.fill(tier, items)
        blank = self.blank(items)
        with self.stall(tier):
            call = asyncio.ensure_future(tier.load(blank, deadline=clock() + 60))
            await asyncio.wait([call], timeout=0.05)
            closing = asyncio.ensure_future(tier.close())
            await asyncio.wait([closing], timeout=0.05)
            with pytest.raises(LinkBroken):
                await tier.lookup([items[0].key])
        await asyncio.wait_for(closing, 20)
        for item in blank:
            item.view[:] = b"\x55" * item.view.nbytes
        await asyncio.gather(call, return_exceptions=True)
        for item in blank:
            assert item.view == b"\x55" * item.view.nbytes, "memory touched after close"

    async def _untouched(self, tier: Tier, items: Sequence[Item]) -> None:
        for item in items:
            item.view[:] = b"\x55" * item.view.nbytes
        await tier.drain()
        for item in items:
            assert item.view == b"\x55" * item.view.nbytes, "memory touched after its call"

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

    async def test_close_waits_for_running_stores(
        self, tier: Tier, tmp_path: Path, context: TierContext
    ) -> None:
        self.needs_store(tier)
        items = self.items(0, 32)
        call = asyncio.ensure_future(tier.store(items))
        await asyncio.sleep(0)
        await tier.close()
        for item in items:
            item.view[:] = b"\x55" * item.view.nbytes
        [outcomes] = await asyncio.gather(call, return_exceptions=True)
        assert isinstance(outcomes, list | LinkBroken)
        again = await self.open_tier(tmp_path, context)
        try:
            blank = self.blank(items)
            loaded = await again.load(blank)
            self.check_bytes(blank, loaded)  # of memory that was read too late it would differ
            if self.durable and isinstance(outcomes, list):
                kept = zip(outcomes, loaded, strict=True)
                assert all(after is LOADED for before, after in kept if before is STORED)
        finally:
            await again.close()

    async def test_close_beside_calls_of_every_kind(self, tier: Tier) -> None:
        items = self.items(0, 8)
        await self.fill(tier, items)
        keys = [item.key for item in items]
        calls = asyncio.gather(
            tier.lookup([*keys, self.key(70)]),
            tier.store(self.items(8, 16)),
            tier.load(self.blank(items)),
            tier.evict(keys[:2]),
            return_exceptions=True,
        )
        await asyncio.sleep(0)
        await tier.close()
        for answer in await asyncio.wait_for(calls, 20):
            assert isinstance(answer, list | LinkBroken)
