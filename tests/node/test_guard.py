"""A tier that hangs or fails costs its node that tier, for that time, and nothing else."""

from __future__ import annotations

import asyncio

import pytest
from tier_kit import PAGE, TroubledTier, find, key, make_store, now, payload, put, timeless

from kvstrata.host import NO_ROOM
from kvstrata.node.breaker import Kind
from kvstrata.node.status import tier_statuses
from kvstrata.testing.waiting import until


def holding(tier: TroubledTier, *numbers: int) -> TroubledTier:
    tier.chunks = {key(n): payload(key(n)) for n in numbers}
    return tier


# ---------------------------------------------------------------- lookups


@timeless
async def test_a_hung_lookup_leaves_later_tiers_their_time() -> None:
    bad, good = TroubledTier("bad"), holding(TroubledTier("good"), 1)
    bad.hangs = {"lookup"}
    store = make_store(bad, good)
    assert len(await find(store, 1, wait=1.0)) == 1
    assert 0 < now() <= 0.55  # an even share of the second
    assert len(await find(store, 1, wait=20.0)) == 1
    store.host.release("reader", [1])
    store.host.drop()
    began = now()
    assert len(await find(store, 1, wait=20.0)) == 1
    assert now() - began <= 2.05  # never more than its `lookup_deadline`
    await asyncio.sleep(2.0)
    store.host.release("reader", [1])
    store.host.drop()
    began, asked = now(), len(bad.calls)
    assert len(await find(store, 1, wait=20.0)) == 1
    assert (now() - began, len(bad.calls)) == (pytest.approx(0, abs=0.01), asked)
    bad.release()
    await store.close()


@timeless
async def test_a_tier_is_not_asked_when_another_has_used_up_the_time() -> None:
    class Threaded(TroubledTier):
        async def lookup(self, keys, deadline=None):  # type: ignore[no-untyped-def]
            answers = await super().lookup(keys, deadline)
            await asyncio.sleep(0.01)
            return answers

    bad, good = holding(TroubledTier("bad"), 1), holding(Threaded("good"), 1, 2)
    bad.hangs = {"load"}
    store = make_store(bad, good)
    assert await find(store, 1, wait=1.0) == {}
    await asyncio.sleep(2.1)  # the load is overdue, and the question with it
    assert not store.guards[0].allows(Kind.LOAD)
    assert (store.guards[1].overdue, store.guards[1].trouble) == (0, "")
    assert "lookup" not in good.calls
    assert len(await find(store, 1, 2)) == 2
    bad.release()
    await store.close()


@timeless
async def test_a_tier_that_always_answers_too_late_is_not_asked_for_a_while() -> None:
    class Slow(TroubledTier):
        seconds = 3.0

        async def lookup(self, keys, deadline=None):  # type: ignore[no-untyped-def]
            answers = await super().lookup(keys, deadline)
            await asyncio.sleep(self.seconds)
            return answers

    tier = holding(Slow(), 1)
    store = make_store(tier)
    for _ in range(3):
        assert await find(store, 1, wait=10.0) == {}
    began = now()
    assert await find(store, 1, wait=10.0) == {}
    assert now() == began  # computed at once, instead of waited for in vain
    assert "3 times lookup, last: no answer in 2 s" in store.guards[0].trouble
    tier.seconds = 0.1
    await asyncio.sleep(40.0)
    assert len(await find(store, 1)) == 1
    assert store.guards[0].trouble == ""
    await store.close()


@timeless
async def test_while_all_tiers_are_degraded_a_miss_is_one_at_once() -> None:
    tier = holding(TroubledTier(), 1)
    tier.hangs = {"lookup"}
    store = make_store(tier)
    assert await find(store, 1, wait=0.1) == {}
    await asyncio.sleep(2.5)
    states, _ = store.lookup("reader", 1, [key(1)], "all", 9.0, lambda keys, chunks: None)
    assert [int(state) for state in states] == [0]
    tier.release()
    await store.close()


# ---------------------------------------------------------------- loads


@timeless
async def test_a_hung_load_is_a_miss_and_its_slot_is_nobody_elses() -> None:
    tier = holding(TroubledTier(), 1, 2)
    tier.hangs = {"load"}
    store = make_store(tier, pages=8)
    assert await find(store, 1, 2, wait=1.0) == {}
    assert now() == pytest.approx(1.0, abs=0.05)
    await asyncio.sleep(2.5)
    usage = store.host.usage()
    assert (usage.writing, usage.quarantined) == (0, 2 * PAGE)
    # Engines compute what was not found, and fill the region: all but those two slots.
    put(store, 1, 2)
    offsets = store.host.reserve("engine", [(key(n), PAGE) for n in range(10, 18)])
    assert sum(offset != NO_ROOM for offset in offsets) == 6
    contents = bytes(store.region)
    tier.release()
    await store.quiesce()
    changed = [i for i in range(8) if store.region[i * PAGE] != contents[i * PAGE]]
    assert {i * PAGE for i in changed}.isdisjoint(offsets)
    assert store.host.usage().quarantined == 0
    await store.close()


@timeless
async def test_a_load_that_comes_late_is_kept_if_nobody_else_has_it() -> None:
    class Slow(TroubledTier):
        async def load(self, batch, deadline=None):  # type: ignore[no-untyped-def]
            await asyncio.sleep(20)
            return await super().load(batch, deadline)

    tier = holding(Slow(), 1, 2)
    store = make_store(tier)
    assert await find(store, 1, 2, wait=1.0) == {}
    await asyncio.sleep(3.0)
    put(store, 2)
    await asyncio.sleep(20)
    assert len(await find(store, 1, 2, wait=0)) == 2
    assert store.host.usage().used == 2 * PAGE
    assert store.guards[0].trouble == ""  # all that was overdue has returned
    await store.close()


@timeless
async def test_what_a_stuck_load_holds_is_its_own_tiers_budget() -> None:
    bad, good = (
        holding(TroubledTier("bad"), *range(8)),
        holding(TroubledTier("good"), *range(50, 54)),
    )
    bad.hangs = {"load"}
    store = make_store(bad, good, pages=16, promotion_budget=0.5)
    stuck = asyncio.create_task(find(store, *range(8), lease=1, wait=1.0))
    await until(lambda: bad.loads)
    began = now()
    assert len(await find(store, *range(50, 54), lease=2)) == 4
    assert now() - began < 0.1
    assert await stuck == {}
    await asyncio.sleep(10)
    assert store.guards[0].stuck_bytes == 4 * PAGE
    assert len(bad.loads) == 1  # the rest was not even begun
    assert store.guards[0].room == 0
    assert not store.guards[0].allows(Kind.LOOKUP)
    bad.release()
    await store.close()


@timeless
async def test_a_probe_that_is_answered_opens_the_way_for_what_room_is_left() -> None:
    tier = holding(TroubledTier(), 1, 2, 3)
    tier.hangs = {"load"}
    store = make_store(tier, pages=16)
    assert await find(store, 1, wait=0.5) == {}
    await asyncio.sleep(2.1)
    guard = store.guards[0]
    assert not guard.allows(Kind.LOAD)
    tier.hangs.clear()  # the next one would work, but the first still does not return
    await asyncio.sleep(2)
    assert guard.allows(Kind.LOAD)
    assert "calls that have not returned: 1" in guard.trouble
    assert len(await find(store, 2, 3)) == 2
    assert guard.stuck_bytes == PAGE
    tier.release()
    await asyncio.sleep(0.01)
    assert (guard.stuck_bytes, guard.trouble) == (0, "")
    await store.close()


@timeless
async def test_probes_of_a_tier_that_hangs_do_not_pile_up() -> None:
    tier = TroubledTier()
    tier.hangs = {"lookup"}
    store = make_store(tier)
    await find(store, 1, wait=0.5)
    await asyncio.sleep(600)
    assert tier.calls == ["lookup", "lookup"]
    tier.release()
    await asyncio.sleep(0.01)
    assert store.guards[0].trouble == ""
    await store.close()


@timeless
async def test_a_slow_tier_has_as_long_for_a_probe_as_for_a_lookup() -> None:
    class Slow(TroubledTier):
        async def lookup(self, keys, deadline=None):  # type: ignore[no-untyped-def]
            answers = await super().lookup(keys, deadline)
            await asyncio.sleep(1.5)
            return answers

    tier = holding(Slow(), 1)
    tier.fails = {"load"}
    store = make_store(tier)
    for _ in range(3):
        assert await find(store, 1) == {}
    assert not store.guards[0].allows(Kind.LOAD)
    tier.fails = set()
    await asyncio.sleep(3.0)
    assert len(await find(store, 1)) == 1
    assert store.guards[0].trouble == ""
    await store.close()


# ---------------------------------------------------------------- failures


@timeless
@pytest.mark.parametrize("how", ["raises", "fails"])
async def test_a_tier_that_keeps_failing_to_load_is_not_asked_for_a_while(how: str) -> None:
    tier, other = holding(TroubledTier("bad"), 1), holding(TroubledTier("other"), 1)
    setattr(tier, how, {"load"})
    store = make_store(tier, other)
    for _ in range(5):
        assert len(await find(store, 1)) == 1
        store.host.release("reader", [1])
        store.host.drop()
    assert tier.calls.count("load") == 3
    guard = store.guards[0]
    assert "no load since 19" in guard.trouble or "no load since 20" in guard.trouble
    assert "3 times load, last: " in guard.trouble
    assert guard.allows(Kind.STORE)
    await asyncio.sleep(1.1)  # a probe was answered: tried again, and it fails again
    assert len(await find(store, 1)) == 1
    assert tier.calls.count("load") == 4
    assert not guard.allows(Kind.LOAD)
    store.host.release("reader", [1])
    store.host.drop()
    setattr(tier, how, set())
    await asyncio.sleep(3)
    assert len(await find(store, 1)) == 1
    assert (tier.calls.count("load"), guard.trouble) == (5, "")
    assert store.counters.tier_hits == {"bad": 1, "other": 6}
    await store.close()


@timeless
async def test_a_call_that_had_no_time_is_not_held_against_the_tier() -> None:
    class Slow(TroubledTier):
        async def load(self, batch, deadline=None):  # type: ignore[no-untyped-def]
            await asyncio.sleep(0.1)
            return await super().load(batch, deadline)

    tier = holding(Slow(), 1)
    tier.fails = {"load"}
    store = make_store(tier)
    for _ in range(5):
        assert await find(store, 1, wait=0.05) == {}
        await asyncio.sleep(0.2)
    assert len(tier.loads) == 5
    assert store.guards[0].trouble == ""
    await store.close()


@timeless
async def test_stores_that_fail_do_not_stop_loads() -> None:
    tier = holding(TroubledTier(), 100)
    tier.raises = {"store"}
    store = make_store(tier)
    (cascade,) = store.cascades
    running = asyncio.create_task(cascade.run())
    for n in range(5):
        put(store, n)
        await asyncio.sleep(0.01)
    assert tier.calls.count("store") == 3
    assert (cascade.failed, cascade.waiting) == (3, 2)
    assert len(await find(store, 100)) == 1
    status = tier_statuses(store)[1]
    assert not status.healthy
    assert status.detail.startswith("no store since ")
    assert "OSError: store is broken" in status.detail
    tier.raises.clear()
    await asyncio.sleep(2)
    assert (cascade.stored, cascade.waiting) == (2, 0)
    assert tier_statuses(store)[1].healthy
    await store.close()
    await running


@timeless
async def test_a_tier_that_takes_no_stores_can_be_emptied() -> None:
    tier = holding(TroubledTier(), 100)
    tier.fails = {"store"}
    store = make_store(tier)
    running = asyncio.create_task(store.cascades[0].run())
    for n in range(3):
        put(store, n)
        await asyncio.sleep(0.01)
    assert not store.guards[0].allows(Kind.STORE)
    assert await store.drop(["troubled"], None) == {"troubled": 1}
    await store.close()
    await running


# ---------------------------------------------------------------- stores


@timeless
async def test_a_stuck_store_pins_a_bounded_part_of_the_region() -> None:
    tier = TroubledTier()
    tier.hangs = {"store"}
    store = make_store(tier, pages=16)
    (cascade,) = store.cascades
    running = asyncio.create_task(cascade.run())
    put(store, *range(16))
    await asyncio.sleep(600)
    # A probe was answered after the first was overdue, and let another one go; not a third.
    assert [len(batch) for batch in tier.stores] == [4, 4]
    assert cascade.pinned == store.guards[0].stuck_bytes == 8 * PAGE
    assert store.host.drop() == 8
    put(store, *range(100, 108))
    tier.release()
    await cascade.drain()
    assert cascade.pinned == 0
    assert set(tier.chunks) == {key(n) for n in (*range(8), *range(100, 108))}
    assert store.host.drop() == 16
    await store.close()
    await running


@timeless
async def test_a_stuck_store_of_one_tier_is_nothing_to_another() -> None:
    bad, good = TroubledTier("bad"), TroubledTier("good")
    bad.hangs = {"store"}
    store = make_store(bad, good, pages=16)
    loops = [asyncio.create_task(cascade.run()) for cascade in store.cascades]
    put(store, *range(16))
    await store.cascades[1].drain()
    assert len(good.chunks) == 16
    assert [len(batch) for batch in bad.stores] == [2]  # all tiers together pin a quarter
    bad.release()
    await asyncio.gather(*(cascade.drain() for cascade in store.cascades))
    assert len(bad.chunks) == 16
    await store.close()
    await asyncio.gather(*loops)


@timeless
async def test_a_store_steps_back_for_loads_but_not_for_ever() -> None:
    tier = holding(TroubledTier(), 100)
    tier.hangs = {"load"}
    store = make_store(tier)
    running = asyncio.create_task(store.cascades[0].run())
    loading = asyncio.create_task(find(store, 100, wait=3.0))
    await until(lambda: tier.loads)
    put(store, 1)
    await asyncio.sleep(0.9)
    assert tier.stores == []
    await asyncio.sleep(0.2)
    assert len(tier.stores) == 1
    tier.release()
    await loading
    await store.close()
    await running


@timeless
async def test_what_steps_back_waits_on_when_the_tier_is_not_asked_any_more() -> None:
    tier = holding(TroubledTier(), 100)
    tier.hangs = {"load"}
    store = make_store(tier)
    cascade = store.cascades[0]
    running = asyncio.create_task(cascade.run())
    assert await find(store, 100, wait=0.1) == {}
    await asyncio.sleep(1.9)
    put(store, 1)  # steps back, and meanwhile the load is overdue
    await asyncio.sleep(2.0)
    tier.release()
    await asyncio.sleep(0.1)
    assert (cascade.failed, cascade.stored, key(1) in tier.chunks) == (0, 1, True)
    await store.close()
    await running


# ---------------------------------------------------------------- ending


@timeless
@pytest.mark.parametrize("call", ["lookup", "load", "store", "close"])
async def test_closing_waits_for_no_tier_beyond_its_deadline(call: str) -> None:
    bad, good = holding(TroubledTier("bad"), 1, 2), TroubledTier("good")
    bad.hangs = {call}
    store = make_store(bad, good)
    loops = [asyncio.create_task(cascade.run()) for cascade in store.cascades]
    put(store, 5)
    lookup = asyncio.create_task(find(store, 1, 2, wait=100.0))
    await asyncio.sleep(0.01)
    began = now()
    stuck = await store.close(4.0)
    assert now() - began <= 4.5
    assert stuck == ["bad"]
    assert good.closed
    await lookup
    await asyncio.gather(*loops)
    bad.release()
    await asyncio.sleep(0.01)
    assert await store.close(1.0) == []
    assert store.host.usage().writing == store.host.usage().quarantined == 0


@timeless
async def test_a_promotion_that_fails_keeps_no_tier_from_being_closed() -> None:
    tier = holding(TroubledTier(), 1)
    tier.hangs = {"lookup"}
    store = make_store(tier)
    lookup = asyncio.create_task(find(store, 1, wait=1.5))
    await asyncio.sleep(0.01)
    store.namespaces._most = 0
    store.namespaces.prune(set())  # nobody is there who uses it
    closing = asyncio.create_task(store.close(4.0))
    await asyncio.sleep(0.01)
    tier.release()
    assert await closing == []
    assert tier.closed
    assert await lookup == {}


@timeless
async def test_dropping_from_a_tier_that_hangs_comes_to_an_end() -> None:
    tier = holding(TroubledTier(), 1)
    tier.hangs = {"evict"}
    store = make_store(tier)
    assert await store.drop(["troubled"], None) == {"troubled": 0}
    assert now() == pytest.approx(30, abs=0.1)
    assert store.guards[0].overdue == 1
    tier.release()
    await store.close()


@timeless
async def test_dropping_much_from_a_tier_that_answers_is_not_held_against_it() -> None:
    class Slow(TroubledTier):
        async def evict(self, keys):  # type: ignore[no-untyped-def]
            await asyncio.sleep(len(keys) * 1e-3)
            return await super().evict(keys)

    tier = Slow()
    tier.chunks = dict.fromkeys((key(n) for n in range(40_000)), b"")
    store = make_store(tier)
    assert await store.drop(["troubled"], None) == {"troubled": 40_000}
    assert store.guards[0].trouble == ""
    await store.close()


@timeless
async def test_a_cancelled_cascade_leaves_the_batch_pinned_until_the_tier_is_done() -> None:
    tier = TroubledTier()
    tier.hangs = {"store"}
    store = make_store(tier)
    running = asyncio.create_task(store.cascades[0].run())
    put(store, 1)
    await until(lambda: tier.stores)
    running.cancel()
    await asyncio.wait({running})
    assert store.host.drop() == 0
    tier.release()
    await asyncio.sleep(0.01)
    assert store.host.drop() == 1
    await store.close()


@timeless
async def test_a_tier_that_cancels_its_own_call_has_failed() -> None:
    class Cancelling(TroubledTier):
        async def load(self, batch, deadline=None):  # type: ignore[no-untyped-def]
            raise asyncio.CancelledError

    tier = holding(Cancelling(), 1)
    store = make_store(tier)
    assert await find(store, 1) == {}
    assert store.counters.tier_errors == 1
    assert store.host.usage().used == 0
    await store.close()
