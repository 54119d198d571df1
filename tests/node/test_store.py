"""Lookups, promotions and cascades over a tier whose answers the test controls."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from kvstrata.config import HostSettings
from kvstrata.errors import ConfigError, Malformed, Missing
from kvstrata.host import Chunk, State
from kvstrata.keys import Key, make_key
from kvstrata.node.namespaces import Namespaces
from kvstrata.node.store import Store
from kvstrata.testing.chunks import a_namespace
from kvstrata.testing.clock import FakeClock
from kvstrata.testing.waiting import until
from kvstrata.tiers.base import Item, Outcome, Tier, TierContext, Usage

PAGE = 4096
NAMESPACE = a_namespace(PAGE)


def key(n: int) -> Key:
    return NAMESPACE.key(0, n.to_bytes(4, "big"))


def payload(k: Key) -> bytes:
    return (k * PAGE)[:PAGE]


class HeldTier(Tier):
    """Chunks in a dict; `gate` holds loads and stores back, `outcomes` overrides loads."""

    name = "held"

    def __init__(self, store_id: str = "held-1", name: str = "held") -> None:
        self.store_id = store_id
        self.name = name
        self.chunks: dict[Key, bytes] = {}
        self.outcomes: dict[Key, Outcome] = {}
        self.loads: list[list[Key]] = []
        self.stores: list[list[Key]] = []
        self.lookups: list[list[Key]] = []
        self.storing = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()

    @classmethod
    async def open(cls, options: dict[str, Any], context: TierContext) -> Tier:
        return cls()

    async def lookup(self, keys: Sequence[Key], deadline: float | None = None) -> list[bool]:
        self.lookups.append(list(keys))
        return [k in self.chunks for k in keys]

    async def store(self, batch: Sequence[Item], deadline: float | None = None) -> list[Outcome]:
        self.stores.append([item.key for item in batch])
        self.storing.set()
        await self.gate.wait()
        for item in batch:
            self.chunks[item.key] = bytes(item.view)
        return [Outcome.STORED] * len(batch)

    async def load(self, batch: Sequence[Item], deadline: float | None = None) -> list[Outcome]:
        self.loads.append([item.key for item in batch])
        await self.gate.wait()
        answers = []
        for item in batch:
            outcome = self.outcomes.get(item.key, Outcome.LOADED)
            if outcome is Outcome.LOADED:
                item.view[:] = self.chunks[item.key]
            answers.append(outcome)
        return answers

    async def evict(self, keys: Sequence[Key]) -> list[bool]:
        return [self.chunks.pop(k, None) is not None for k in keys]

    def keys(self) -> list[Key]:
        return list(self.chunks)

    def usage(self) -> Usage:
        return Usage(0, len(self.chunks))

    async def drain(self, deadline: float | None = None) -> None:
        return None

    async def close(self) -> None:
        return None


def make_store(
    *tiers: Tier, pages: int = 16, promotion_budget: float = 0.5, clock: FakeClock | None = None
) -> Store:
    namespaces = Namespaces()
    namespaces.add(NAMESPACE)
    settings = HostSettings(promotion_budget=promotion_budget)
    store = Store(memoryview(bytearray(pages * PAGE)), settings, namespaces, clock or FakeClock())
    store.placements.enabled = True
    for tier in tiers:
        store.attach(tier)
    return store


def put(store: Store, *numbers: int) -> None:
    keys = [key(n) for n in numbers]
    for k, offset in zip(
        keys, store.host.reserve("engine", [(k, PAGE) for k in keys]), strict=True
    ):
        store.region[offset : offset + PAGE] = payload(k)
    assert all(store.host.commit("engine", keys))


def data(store: Store, chunk: Chunk) -> bytes:
    return bytes(store.item(chunk).view)


async def find(
    store: Store, *numbers: int, want: Any = "prefix", lease: int = 1, wait: float = 5.0
) -> dict[Key, Chunk]:
    return await store.find("reader", lease, [key(n) for n in numbers], want, wait)


async def miss_while_loading(store: Store, tier: HeldTier, lease: int = 1) -> None:
    """Look chunk 1 up, whose load has begun and is held back beyond the wait."""
    before = len(tier.loads)
    waiting = asyncio.create_task(find(store, 1, lease=lease, wait=0.3))
    await until(lambda: len(tier.loads) > before)
    assert await waiting == {}


def tally(store: Store) -> dict[str, int]:
    c = store.counters
    assert c.asked == c.host_hits + sum(c.tier_hits.values()) + c.misses
    return {"host": c.host_hits, **c.tier_hits, "miss": c.misses}


async def test_a_host_hit_is_immediate_and_leased() -> None:
    store = make_store(HeldTier())
    put(store, 1, 2)
    states, chunks = store.lookup("reader", 1, [key(1), key(2)], "prefix", 5, _never)
    assert states == [State.READY, State.READY]
    assert data(store, chunks[0]) == payload(key(1))  # type: ignore[arg-type]
    assert store.host.drop() == 0
    assert tally(store) == {"host": 2, "held": 0, "miss": 0}


async def test_a_miss_is_promoted_from_the_tier_that_has_it() -> None:
    tier = HeldTier()
    tier.chunks = {key(n): payload(key(n)) for n in (1, 2)}
    store = make_store(tier)
    found = await find(store, 1, 2, 3)
    assert {k: data(store, c) for k, c in found.items()} == tier.chunks
    assert tally(store) == {"host": 0, "held": 2, "miss": 1}
    assert store.host.drop() == 0  # leased by the reader
    store.host.release("reader", [1])
    assert store.host.drop() == 2


async def test_a_prefix_lookup_does_not_promote_past_the_first_gap() -> None:
    tier = HeldTier()
    tier.chunks = {key(n): payload(key(n)) for n in (1, 3, 4)}
    store = make_store(tier)
    assert list(await find(store, 1, 2, 3, 4)) == [key(1)]
    assert tier.loads == [[key(1)]]


async def test_an_all_lookup_promotes_whatever_there_is() -> None:
    tier = HeldTier()
    tier.chunks = {key(n): payload(key(n)) for n in (1, 3)}
    store = make_store(tier)
    assert set(await find(store, 1, 2, 3, want="all")) == {key(1), key(3)}


async def test_tiers_are_asked_in_order_and_the_first_hit_wins() -> None:
    first, second = HeldTier("a", "first"), HeldTier("b", "second")
    first.chunks = {key(1): payload(key(1))}
    second.chunks = {key(n): payload(key(n)) for n in (1, 2)}
    store = make_store(first, second)
    assert set(await find(store, 1, 2)) == {key(1), key(2)}
    assert (first.loads, second.loads) == ([[key(1)]], [[key(2)]])
    assert second.lookups == [[key(2)]]


async def test_a_chunk_one_tier_cannot_deliver_is_taken_from_the_next() -> None:
    first, second = HeldTier("a", "first"), HeldTier("b", "second")
    first.chunks = {key(1): payload(key(1))}
    first.outcomes = {key(1): Outcome.CORRUPT}
    second.chunks = {key(1): payload(key(1))}
    store = make_store(first, second)
    found = await find(store, 1)
    assert data(store, found[key(1)]) == payload(key(1))
    assert tally(store) == {"host": 0, "first": 0, "second": 1, "miss": 0}


async def test_a_corrupt_chunk_is_a_miss_and_its_slot_goes_back() -> None:
    tier = HeldTier()
    tier.chunks = {key(n): payload(key(n)) for n in (1, 2)}
    tier.outcomes = {key(1): Outcome.CORRUPT}
    store = make_store(tier)
    assert set(await find(store, 1, 2)) == {key(2)}
    assert store.host.usage().used == PAGE


async def test_a_tier_that_raises_is_a_miss() -> None:
    class Broken(HeldTier):
        async def load(self, batch: Sequence[Item], deadline: float | None = None) -> Any:
            raise RuntimeError("a bug")

    tier = Broken()
    tier.chunks = {key(1): payload(key(1))}
    store = make_store(tier)
    assert await find(store, 1) == {}
    assert store.host.usage().used == 0
    assert store.counters.tier_errors == 1


async def test_one_promotion_serves_all_who_wait() -> None:
    tier = HeldTier()
    tier.chunks = {key(1): payload(key(1))}
    tier.gate.clear()
    store = make_store(tier)
    waits = [asyncio.create_task(store.find(f"r{i}", 1, [key(1)], "all", 5)) for i in range(3)]
    await asyncio.sleep(0)
    tier.gate.set()
    assert [list(found) for found in await asyncio.gather(*waits)] == [[key(1)]] * 3
    assert len(tier.loads) == 1
    assert store.host.usage().leases == 3


async def test_a_wait_that_is_over_is_a_miss_and_the_slot_stays_until_the_tier_is_done() -> None:
    tier = HeldTier()
    tier.chunks = {key(1): payload(key(1))}
    tier.gate.clear()
    store = make_store(tier)
    await miss_while_loading(store, tier)
    assert store.host.usage().writing == PAGE
    assert store.counters.late_promotions == 1
    tier.gate.set()
    await store.quiesce()
    assert data(store, store.host.get(key(1))) == payload(key(1))  # type: ignore[arg-type]


async def test_a_chunk_being_written_is_pending_until_commit() -> None:
    store = make_store()
    store.host.reserve("engine", [(key(1), PAGE)])
    waiting = asyncio.create_task(find(store, 1))
    await asyncio.sleep(0)
    assert not waiting.done()
    store.host.commit("engine", [key(1)])
    assert list(await waiting) == [key(1)]


async def test_a_chunk_whose_writer_gives_up_is_a_miss_at_once() -> None:
    store = make_store()
    store.host.reserve("engine", [(key(1), PAGE)])
    waiting = asyncio.create_task(find(store, 1))
    await asyncio.sleep(0)
    store.host.abort("engine", [key(1)])
    assert await waiting == {}


async def test_a_probe_without_waiting_asks_no_tier() -> None:
    tier = HeldTier()
    tier.chunks = {key(1): payload(key(1))}
    store = make_store(tier)
    assert await find(store, 1, wait=0) == {}
    assert tier.lookups == []


async def test_promotions_stay_within_their_budget() -> None:
    tier = HeldTier()
    tier.chunks = {key(n): payload(key(n)) for n in range(8)}
    tier.gate.clear()
    store = make_store(tier, pages=16, promotion_budget=0.25)
    waiting = asyncio.create_task(find(store, *range(8)))
    await until(lambda: tier.loads)
    assert store.host.usage().writing == 4 * PAGE
    tier.gate.set()
    assert len(await waiting) == 8
    assert [len(load) for load in tier.loads] == [4, 4]


async def test_no_room_for_a_promotion_is_a_miss() -> None:
    tier = HeldTier()
    tier.chunks = {key(n): payload(key(n)) for n in range(6)}
    store = make_store(tier, pages=4, promotion_budget=1.0)
    assert len(await find(store, *range(6))) == 4
    assert store.counters.no_room == 2


async def test_an_abandoned_lookup_leases_nothing_later() -> None:
    tier = HeldTier()
    tier.chunks = {key(1): payload(key(1))}
    tier.gate.clear()
    store = make_store(tier)
    store.lookup("r", 1, [key(1)], "all", 5, _never)
    other = asyncio.create_task(store.find("r", 2, [key(1)], "all", 5))
    await asyncio.sleep(0)
    store.abandon("r", 1)
    tier.gate.set()
    assert list(await other) == [key(1)]
    assert store.host.usage().leases == 1
    store.abandon("r", 2)
    assert store.host.drop() == 1


async def test_forgetting_an_owner_ends_its_waits() -> None:
    tier = HeldTier()
    tier.chunks = {key(1): payload(key(1))}
    tier.gate.clear()
    store = make_store(tier)
    settled: list[Key] = []
    store.lookup("gone", 1, [key(1)], "all", 5, lambda keys, chunks: settled.extend(keys))
    await asyncio.sleep(0)
    store.forget("gone")
    tier.gate.set()
    await store.quiesce()
    assert settled == []
    assert store.host.drop() == 1


async def test_what_an_engine_commits_is_written_through() -> None:
    tier = HeldTier()
    store = make_store(tier)
    (cascade,) = store.cascades
    running = asyncio.create_task(cascade.run())
    put(store, 1, 2, 3)
    await cascade.drain()
    assert tier.chunks == {key(n): payload(key(n)) for n in (1, 2, 3)}
    assert cascade.stored == 3
    assert {c.location: set(c.added) for c in store.placements.take()} == {
        "host": {key(1), key(2), key(3)},
        "held-1": {key(1), key(2), key(3)},
    }
    await store.close()
    await running


async def test_what_came_from_a_tier_is_not_written_back_to_it() -> None:
    first, second = HeldTier("a", "first"), HeldTier("b", "second")
    first.chunks = {key(1): payload(key(1))}
    store = make_store(first, second)
    loops = [asyncio.create_task(cascade.run()) for cascade in store.cascades]
    await find(store, 1)
    await asyncio.gather(*(cascade.drain() for cascade in store.cascades))
    assert (first.stores, second.stores) == ([], [[key(1)]])
    await store.close()
    await asyncio.gather(*loops)


async def test_a_slow_tier_pins_one_batch_and_no_more() -> None:
    tier = HeldTier()
    tier.gate.clear()
    store = make_store(tier, pages=16)
    (cascade,) = store.cascades
    running = asyncio.create_task(cascade.run())
    put(store, *range(16))
    await tier.storing.wait()
    assert tier.stores == [[key(0), key(1), key(2), key(3)]]  # a quarter of the region
    assert store.host.drop() == 12
    tier.gate.set()
    await cascade.drain()
    assert cascade.dropped == 12
    await store.close()
    await running


async def test_keys_of_an_unknown_namespace_are_refused() -> None:
    store = make_store()
    with pytest.raises(Missing, match="no namespace"):
        store.lookup("r", 1, [make_key(b"x" * 16, 0, b"h")], "all", 1, _never)
    with pytest.raises(Missing, match="no group of namespace"):
        store.lookup("r", 1, [NAMESPACE.key(9, b"h")], "all", 1, _never)


async def test_drop_names_its_tiers() -> None:
    tier = HeldTier()
    tier.chunks = {key(1): b""}
    store = make_store(tier)
    put(store, 1, 2)
    assert await store.drop(["host", "held"], None) == {"held": 1, "host": 2}
    with pytest.raises(Malformed, match=r"no tier 'ssd'.*held.*host"):
        await store.drop(["ssd"], None)


async def test_drop_of_a_namespace_takes_what_each_tier_has_of_it() -> None:
    tier = HeldTier()
    other = make_key(b"x" * 16, 0, b"h" * 32)
    tier.chunks = {key(1): b"", key(3): b"", other: b""}
    store = make_store(tier)
    put(store, 1, 2)
    asked = [key(1), key(1), other]
    dropped = await store.drop(["host", "held"], asked, {NAMESPACE.digest})
    assert dropped == {"held": 3, "host": 2}
    assert tier.chunks == {}
    assert store.host.keys() == []


@pytest.mark.parametrize("by", ["all", "keys", "namespace"])
async def test_others_have_their_turns_while_much_is_dropped(by: str) -> None:
    store = make_store(pages=5000)
    put(store, *range(5000))
    left: list[int] = []

    async def others() -> None:
        while store.host.keys():
            left.append(len(store.host.keys()))
            await asyncio.sleep(0)

    watching = asyncio.create_task(others())
    keys = {"all": None, "keys": store.host.keys(), "namespace": []}[by]
    digests = {NAMESPACE.digest} if by == "namespace" else set()
    assert await store.drop(["host"], keys, digests) == {"host": 5000}
    await watching
    assert max(a - b for a, b in itertools.pairwise([5000, *left, 0])) <= 1024


async def test_one_store_can_be_attached_once() -> None:
    with pytest.raises(ConfigError, match="twice"):
        make_store(HeldTier("a"), HeldTier("a"))


def _never(keys: Sequence[Key], chunks: Sequence[Chunk | None]) -> None:
    raise AssertionError("nothing was pending")


async def test_a_key_asked_for_twice_is_answered_twice_and_counted_once() -> None:
    tier = HeldTier()
    tier.chunks = {key(2): payload(key(2))}
    store = make_store(tier)
    put(store, 1)
    settled: list[Key] = []
    states, found = store.lookup(
        "reader",
        1,
        [key(1), key(2), key(1), key(2), key(3), key(3)],
        "all",
        5.0,
        lambda keys, chunks: settled.extend(keys),
    )
    ready, pending = State.READY, State.WRITING
    assert states == [ready, pending, ready, pending, pending, pending]
    assert found[0] is found[2] is not None
    await store.quiesce()
    assert sorted(settled) == [key(2), key(3)]
    assert tally(store) == {"host": 1, "held": 1, "miss": 1}


class ShortTier(HeldTier):
    """Answers with one word less than it was asked for."""

    async def lookup(self, keys: Sequence[Key], deadline: float | None = None) -> list[bool]:
        answers = await super().lookup(keys, deadline)
        return answers[: len(answers) - (self.short == "lookup")]

    async def load(self, batch: Sequence[Item], deadline: float | None = None) -> list[Outcome]:
        answers = await super().load(batch, deadline)
        return answers[: len(answers) - (self.short == "load")]

    async def store(self, batch: Sequence[Item], deadline: float | None = None) -> list[Outcome]:
        answers = await super().store(batch, deadline)
        return answers[: len(answers) - (self.short == "store")]

    short = ""


@pytest.mark.parametrize("short", ["lookup", "load"])
async def test_a_tier_that_answers_too_little_is_a_failed_one(short: str) -> None:
    bad, good = ShortTier("bad", "bad"), HeldTier("good", "good")
    bad.short = short
    for tier in (bad, good):
        tier.chunks = {key(n): payload(key(n)) for n in (1, 2)}
    store = make_store(bad, good)
    chunks = await find(store, 1, 2)
    assert [data(store, c) for c in chunks.values()] == [payload(key(1)), payload(key(2))]
    assert store.counters.tier_errors == 1
    assert store.host.usage().writing == 0
    assert tally(store) == {"host": 0, "bad": 0, "good": 2, "miss": 0}


async def test_a_tier_that_answers_too_little_does_not_end_its_cascade() -> None:
    tier = ShortTier()
    tier.short = "store"
    store = make_store(tier)
    task = asyncio.create_task(store.cascades[0].run())
    put(store, 1)
    await store.cascades[0].drain()
    assert not task.done()
    assert (store.cascades[0].stored, store.cascades[0].failed) == (0, 1)
    await store.close()


async def test_a_load_that_outlives_its_slot_is_not_given_it_twice() -> None:
    """The second load must not write where the first one still does."""
    clock, tier = FakeClock(), HeldTier()
    tier.chunks = {key(1): payload(key(1))}
    tier.gate.clear()
    store = make_store(tier, clock=clock)
    await miss_while_loading(store, tier)
    clock.advance(61)
    store.host.expire()
    put(store, 1)  # an engine computed it meanwhile, and it was dropped again
    clock.advance(61)
    store.host.expire()
    assert store.host.drop() == 1
    await miss_while_loading(store, tier, lease=2)
    assert len(tier.loads) == 2
    assert store.host.usage().quarantined == PAGE
    assert store.host.usage().writing == PAGE
    tier.outcomes[key(1)] = Outcome.FAILED
    tier.gate.set()
    await store.quiesce()
    assert store.host.usage().used == 0


async def test_a_load_overtaken_by_an_engine_leaves_nothing_pending() -> None:
    clock, tier = FakeClock(), HeldTier()
    tier.chunks = {key(1): payload(key(1))}
    tier.gate.clear()
    store = make_store(tier, clock=clock)
    await miss_while_loading(store, tier)
    clock.advance(61)
    store.host.expire()
    put(store, 1)
    tier.gate.set()
    await store.quiesce()
    assert store.host.usage().used == PAGE
    clock.advance(61)
    store.host.expire()
    assert store.host.drop() == 1
    chunks = await find(store, 1, lease=2)
    assert data(store, chunks[key(1)]) == payload(key(1))


async def test_what_is_too_late_evicts_nothing() -> None:
    clock, tier = FakeClock(), HeldTier()
    tier.chunks = {key(n): payload(key(n)) for n in range(1, 9)}
    tier.gate.clear()
    store = make_store(tier, pages=4, promotion_budget=0.25, clock=clock)
    put(store, 11, 12, 13)
    waiting = asyncio.create_task(find(store, 1, 2, wait=0.5))
    await until(lambda: tier.loads)
    clock.advance(1)
    assert await waiting == {}
    tier.gate.set()
    await store.quiesce()
    assert tier.loads == [[key(1)]]
    assert store.host.evicted == 0


async def test_one_tier_that_does_not_close_keeps_no_other_open() -> None:
    class Stuck(HeldTier):
        async def close(self) -> None:
            raise OSError("stuck")

    class Closing(HeldTier):
        closed = False

        async def close(self) -> None:
            self.closed = True

    good = Closing("good", "good")
    store = make_store(Stuck("bad", "bad"), good)
    await store.close()
    assert good.closed


@pytest.mark.parametrize("names", [("held", "held"), ("held", "host")])
async def test_a_name_is_that_of_one_tier(names: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match=f"two tiers are called {names[1]}: give one"):
        make_store(*(HeldTier(str(n), name) for n, name in enumerate(names)))


async def test_tiers_of_one_kind_are_dropped_from_and_counted_apart() -> None:
    one, two = HeldTier("1", "one"), HeldTier("2", "two")
    one.chunks = {key(1): payload(key(1))}
    two.chunks = {key(n): payload(key(n)) for n in (1, 2)}
    store = make_store(one, two)
    assert len(await find(store, 1, 2)) == 2
    assert tally(store) == {"host": 0, "one": 1, "two": 1, "miss": 0}
    assert await store.drop(["two"], None) == {"two": 2}
    assert list(one.chunks) == [key(1)]


async def test_a_long_lookup_full_of_misses_is_quick() -> None:
    tier = HeldTier()
    store = make_store(tier)
    keys = [key(n) for n in range(20_000)]
    async with asyncio.timeout(20):
        assert await store.find("reader", 1, keys, "all", 5.0) == {}
