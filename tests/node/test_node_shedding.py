"""Chunks given up by the byte, in host memory and in tiers that keep an order."""

import asyncio

import pytest

from kvstrata.config import HostSettings
from kvstrata.errors import Malformed
from kvstrata.keys import DIGEST_BYTES
from kvstrata.node import shedding
from kvstrata.node.namespaces import Namespaces
from kvstrata.node.reported import Shed
from kvstrata.node.shedding import shed
from kvstrata.node.store import Store
from kvstrata.testing.chunks import a_namespace
from kvstrata.testing.clock import FakeClock
from kvstrata.tiers.base import Item, TierContext
from kvstrata.tiers.fs import FsTier

PAGE = 4096
ACME, OTHER = a_namespace(PAGE, tenant="acme"), a_namespace(PAGE, tenant="other")
SIZES = {ACME.digest + bytes(4): PAGE}


def acme(*numbers):
    return [ACME.key(0, n.to_bytes(4, "big")) for n in numbers]


def other(*numbers):
    return [OTHER.key(0, n.to_bytes(4, "big")) for n in numbers]


@pytest.fixture
async def parts(tmp_path):
    """A node's store and its fs tier, which two tenants use in turns."""
    clock, namespaces = FakeClock(), Namespaces()
    for namespace in (ACME, OTHER):
        namespaces.add(namespace)
    store = Store(memoryview(bytearray(64 * PAGE)), HostSettings(), namespaces, clock)
    context = TierContext("a", clock, namespaces.get, lambda keys: gone.extend(keys))
    gone: list = []
    tier = await FsTier.open({"root": str(tmp_path / "fs")}, context)
    store.attach(tier)
    for n in range(6):
        for key in (*acme(n), *other(n)):
            (offset,) = store.host.reserve("engine", [(key, PAGE)])
            store.host.commit("engine", [key])
            await tier.store([Item(key, store.region[offset : offset + PAGE], offset)])
    yield store, tier, gone
    await store.close()


async def test_the_coldest_of_one_tenant_goes_and_nothing_of_another(parts):
    store, tier, _ = parts
    store.host.lease("reader", 1, acme(0), 60)  # used, and so the youngest
    store.host.release("reader", [1])
    asked = Shed(SIZES, {"host": 2 * PAGE})
    assert await shed(store.host, store.guards, asked) == {"host": 2}
    assert sorted(store.host.keys()) == sorted([*acme(0, 3, 4, 5), *other(*range(6))])
    assert len(tier.keys()) == 12


async def test_in_a_tier_by_its_own_order(parts):
    store, tier, gone = parts
    item = store.item(store.host.get(acme(0)[0]))
    await tier.load([item])  # used there
    asked = Shed(SIZES, {tier.store_id: PAGE + 1})
    assert await shed(store.host, store.guards, asked) == {"fs": 2}
    assert gone == acme(1, 2)
    assert sorted(tier.keys()) == sorted([*acme(0, 3, 4, 5), *other(*range(6))])
    assert len(store.host.keys()) == 12


async def test_what_is_leased_stays_wherever_it_is(parts):
    store, tier, _ = parts
    store.host.lease("reader", 1, acme(0, 2), 60)
    asked = Shed(SIZES, {tier.store_id: 100 * PAGE, "host": 100 * PAGE})
    assert await shed(store.host, store.guards, asked) == {"fs": 4, "host": 4}
    assert sorted(tier.keys()) == sorted([*acme(0, 2), *other(*range(6))])
    assert sorted(store.host.keys()) == sorted([*acme(0, 2), *other(*range(6))])


async def test_the_search_in_memory_gives_others_their_turns(parts, monkeypatch):
    """Also where none of it is the tenant's, or all is in use."""
    store, _, _ = parts
    monkeypatch.setattr(shedding, "_LOOKED_AT", 2)
    store.host.lease("reader", 1, acme(0, 1, 2, 3, 4), 60)  # of 12, which are thus the youngest
    turns, done = 0, False

    async def others():
        nonlocal turns
        while not done:
            turns += 1
            store.host.lease("other", 1, other(turns % 6), 60)
            store.host.release("other", [1])
            await asyncio.sleep(0)

    running = asyncio.create_task(others())
    nobody = {bytes(DIGEST_BYTES + 4): PAGE}
    for sizes, dropped in ((nobody, 0), (SIZES, 1)):
        before = turns
        assert await shed(store.host, [], Shed(sizes, {"host": 100 * PAGE})) == {"host": dropped}
        assert turns - before >= 6
    done = True
    await running


async def test_nothing_more_than_there_is_and_nothing_for_nothing(parts):
    store, tier, _ = parts
    nobody = {bytes(DIGEST_BYTES + 4): PAGE}
    for sizes, most, dropped in ((nobody, 100 * PAGE, 0), (SIZES, 0, 0), (SIZES, 100 * PAGE, 6)):
        asked = Shed(sizes, {"host": most, tier.store_id: most})
        assert await shed(store.host, store.guards, asked) == {"host": dropped, "fs": dropped}


async def test_a_tier_that_drops_nothing_is_not_asked_for_ever(parts, monkeypatch):
    store, _, _ = parts
    (guard,) = store.guards
    calls = []

    async def refuse(keys):
        calls.append(keys)
        return [False] * len(keys)

    monkeypatch.setattr(guard, "evict", refuse)
    asked = Shed(SIZES, {guard.store_id: 3 * PAGE})
    assert await shed(store.host, store.guards, asked) == {"fs": 0}
    assert calls == [acme(0, 1, 2)]


async def test_a_location_that_is_not_here_is_an_error(parts):
    store, _, _ = parts
    with pytest.raises(Malformed, match="and not 'fs-elsewhere'"):
        await shed(store.host, store.guards, Shed(SIZES, {"host": PAGE, "fs-elsewhere": PAGE}))
    assert len(store.host.keys()) == 12
