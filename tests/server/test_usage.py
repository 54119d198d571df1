import asyncio
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from server_kit import NAMESPACE, TTL
from world_kit import NODES, TIERS, World

from kvstrata import api
from kvstrata.bulk import KeyRun
from kvstrata.keys import Field, Group
from kvstrata_server.placement.index import PlacementIndex
from kvstrata_server.tenancy.usage import Held, Medium

ACME = replace(NAMESPACE, tenant="acme")
OTHER = replace(
    NAMESPACE,
    tenant="other",
    groups=(
        Group(0, "full", ("l0",), (Field("kv", 2, 64),), 16),
        Group(1, "sliding_window", ("l1",), (Field("kv", 2, 32),), 16, window=32),
    ),
)
LATER = replace(ACME, revision="r2")
KEYS = [
    namespace.key(group, bytes([n]) * size)
    for namespace in (NAMESPACE, ACME, OTHER, LATER)
    for group in range(len(namespace.groups))
    for n, size in enumerate((8, 8, 32))
]


class CountedWorld(World):
    def count(self) -> dict[str, Held]:
        asyncio.run(self.usage.refresh())
        return dict(self.usage.tenants)

    def naive(self) -> dict[str, Held]:
        """The same from a list of all placements."""
        places, found = self.cluster.places, set()
        for location, keys in self.cluster.index.dump():
            reporter, store = places.describe(location)
            up = {node.id: node.stores for node in self.cluster.up()}
            if store is None and reporter in up:
                found |= {(Medium(node=reporter), key) for key in keys}
            if store is not None and any(store in stores for stores in up.values()):
                found |= {(Medium(store=store), key) for key in keys}
        held: dict[str, Held] = {}
        for medium, key in found:
            namespace = self.cluster.namespaces._known[key[:16]]
            if namespace is not None:
                size = namespace.chunk_bytes[int.from_bytes(key[16:20], "big")]
                of = held.setdefault(namespace.tenant, Held())
                tier = TIERS.get(medium.store, "host")
                of.chunks, of.bytes = of.chunks + 1, of.bytes + size
                of.tiers[tier] = of.tiers.get(tier, 0) + size
        return held


_some = st.lists(st.sampled_from(KEYS), max_size=8)
_place = st.sampled_from([(n, loc) for n, stores in NODES.items() for loc in ("host", *stores)])
_steps = st.lists(
    st.one_of(
        st.tuples(st.just("report"), _place, _some, _some),
        st.tuples(st.just("rejoin"), st.sampled_from(list(NODES)), st.sampled_from(["i1", "i2"])),
        st.tuples(st.just("leave"), st.sampled_from(list(NODES))),
        st.tuples(st.just("silence"), st.sampled_from(list(NODES))),
        st.tuples(st.just("count")),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(_steps)
def test_what_is_counted_is_what_a_list_of_all_placements_says(steps):
    world = CountedWorld()
    for node in NODES:
        world.join(node)
    world.report("a", namespaces=(NAMESPACE, ACME, OTHER))  # not LATER: nobody knows whose it is
    for step in steps:
        kind, *rest = step
        if kind == "report":
            (node, location), added, removed = rest
            if not world.cluster.nodes[node].gone:
                world.report(node, location, set(added) - set(removed), removed)
        elif kind == "rejoin":
            world.join(*rest)
        elif kind == "leave" and not world.cluster.nodes[rest[0]].gone:
            world.cluster.deregister(rest[0], None)
        elif kind == "silence":
            world.cluster.nodes[rest[0]].last_seen = -1e9
        elif kind == "count":
            assert world.count() == world.naive()
    assert world.count() == world.naive()
    for tenant, held in world.usage.tenants.items():
        shares = asyncio.run(world.usage.shares(tenant))
        assert sum(share.nbytes for share in shares.values()) == held.bytes
        assert sum(share.chunks for share in shares.values()) == held.chunks
        by_tier: dict[str, int] = {}
        for medium, share in shares.items():
            tier = TIERS.get(medium.store, "host")
            by_tier[tier] = by_tier.get(tier, 0) + share.nbytes
            assert share.sizes
            for prefix, size in share.sizes.items():
                assert world.cluster.namespaces.tenant_and_size(prefix) == (tenant, size)
        assert by_tier == held.tiers


def test_a_shared_store_counts_once_and_a_silent_node_not_at_all():
    world = CountedWorld()
    world.join("a")
    world.join("b")
    keys = [ACME.key(0, bytes([n])) for n in range(4)]
    size = ACME.chunk_bytes[0]
    world.report("a", "s1", keys[:3], namespaces=(ACME,))
    world.report("b", "s1", keys[1:])
    world.report("b", "host", keys[:1])
    assert world.count() == {"acme": Held(5 * size, 5, {"fs": 4 * size, "host": size})}
    assert world.usage.age == 0
    world.clock.advance(TTL + 1)
    assert world.usage.age == TTL + 1
    world.reports.heartbeat(
        "a",
        api.HeartbeatRequest(
            incarnation="i1", host=api.HostUse(used_bytes=0, capacity_bytes=0, chunks=0)
        ),
    )
    assert world.count() == {"acme": Held(4 * size, 4, {"fs": 4 * size})}


def test_what_does_not_change_is_not_counted_again(monkeypatch):
    world = CountedWorld()
    world.join("a")
    world.join("b")
    world.report("a", "host", [ACME.key(0, b"1")], namespaces=(ACME,))
    world.report("b", "host", [ACME.key(0, b"1")])
    first = world.count()
    asked = []
    families_at = PlacementIndex.families_at

    def watched(index, locations, size=100_000):
        asked.append([world.cluster.places.describe(location) for location in locations])
        return families_at(index, locations, size)

    monkeypatch.setattr(PlacementIndex, "families_at", watched)
    assert (world.count(), asked) == (first, [])
    world.report("b", "host", [ACME.key(0, b"2")], [ACME.key(0, b"1")])
    assert (world.count(), asked) == (first, [[("b", None)]])


@pytest.mark.parametrize("locations", [[1], [1, 2, 3]])
def test_parts_have_each_chunk_once(locations):
    index = PlacementIndex()
    keys = [ACME.key(n % 2, n.to_bytes(8, "big")) for n in range(1000)]
    for location in (1, 2, 3):
        index.add(location, keys[: 400 * location])
    parts = list(index.families_at(locations, 64))
    families = np.concatenate(parts)
    expected = 400 if locations == [1] else 1000
    assert len(families) == expected
    assert max(map(len, parts)) <= 64
    assert np.bincount(families)[1:].tolist() == [expected // 2] * 2


async def test_others_have_their_turns_while_it_counts():
    world = CountedWorld()
    world.join("a")
    hashes = np.arange(1_000_000, dtype=">u8").tobytes()
    world.cluster.namespaces.learn([ACME])
    location, index = world.cluster.places.location("a", None), world.cluster.index
    index.add(location, index.families.of_runs([KeyRun(ACME.digest, 0, 8, hashes)]))
    turns = []
    task = asyncio.create_task(world.usage.refresh())
    while not task.done():
        turns.append(time.perf_counter())
        await asyncio.sleep(0)
    assert len(turns) >= 3
    assert world.usage.of("acme").chunks == 1_000_000
