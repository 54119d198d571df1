"""What is lent to peers: never a slot that may hold something else by now."""

from __future__ import annotations

import asyncio

from kvstrata.config import HostSettings
from kvstrata.keys import Key
from kvstrata.node.grants import Grants
from kvstrata.node.namespaces import Namespaces
from kvstrata.node.store import Store
from kvstrata.testing.chunks import a_namespace
from kvstrata.testing.clock import FakeClock
from kvstrata.tiers.base import checksum

PAGE = 4096
TTL = 30.0
NAMESPACE = a_namespace(PAGE)


def key(n: int) -> Key:
    return NAMESPACE.key(0, n.to_bytes(4, "big"))


def make_store(clock: FakeClock, pages: int) -> Store:
    namespaces = Namespaces()
    namespaces.add(NAMESPACE)
    settings = HostSettings(lease_ttl=TTL)
    return Store(memoryview(bytearray(pages * PAGE)), settings, namespaces, clock)


def put(store: Store, *numbers: int) -> None:
    keys = [key(n) for n in numbers]
    offsets = store.host.reserve("engine", [(k, PAGE) for k in keys])
    for n, offset in zip(numbers, offsets, strict=True):
        store.region[offset : offset + PAGE] = bytes([n]) * PAGE
    assert all(store.host.commit("engine", keys))


async def test_a_grant_tells_where_the_bytes_are_and_what_they_are() -> None:
    store = make_store(FakeClock(), 4)
    put(store, 1)
    grants = Grants(store, TTL)
    grant = await grants.grant("peer", [key(1), key(2)], 60.0, 0.0)
    here, absent = grant.chunks
    assert absent is None
    assert here is not None
    assert here.checksum == checksum(store.region[here.offset : here.offset + here.nbytes])
    assert grant.ttl == TTL
    assert grants.authorize(grant.lease, here.offset, here.nbytes)
    assert not grants.authorize(grant.lease, here.offset, here.nbytes + 1)


async def test_a_chunk_lost_while_another_was_waited_for_is_not_granted() -> None:
    clock = FakeClock()
    store = make_store(clock, 2)
    put(store, 1)
    store.host.reserve("engine", [(key(2), PAGE)])
    asking = asyncio.create_task(Grants(store, TTL).grant("peer", [key(1), key(2)], TTL, 10.0))
    await asyncio.sleep(0)
    # The wait outlives the lease on what was here at once, and its slot gets another chunk.
    clock.advance(TTL + 1)
    store.host.expire()
    put(store, 3)
    store.host.commit("engine", [key(2)])
    lost, waited_for = (await asking).chunks
    assert waited_for is not None
    assert lost is None


async def test_what_is_granted_is_held_for_as_long_as_was_said() -> None:
    clock = FakeClock()
    store = make_store(clock, 2)
    put(store, 1)
    store.host.reserve("engine", [(key(2), PAGE)])
    asking = asyncio.create_task(Grants(store, TTL).grant("peer", [key(1), key(2)], TTL, 0.01))
    await asyncio.sleep(0)
    clock.advance(TTL - 1)  # waiting for the other one, in vain
    grant = await asking
    clock.advance(grant.ttl - 0.1)
    store.host.expire()
    assert store.host.drop([key(1)]) == 0
