"""How nodes are emptied: what is written back, what is moved where, and why the rest remains."""

from __future__ import annotations

import pytest
from drain_kit import PLAIN, SHARING, begin, by_hand, cluster, draining, settle, step
from msgspec.structs import replace
from server_kit import CHUNK_BYTES, DOCUMENT, NAMESPACE, TTL, host, keys, store

from kvstrata import api
from kvstrata.api import DrainState, LeftReason, Outcome
from kvstrata_server.draining import emptying as emptying_module

__all__ = ["by_hand"]

S = DrainState


def left(info: api.DrainInfo) -> dict[LeftReason, int]:
    return {each.why: each.chunks for each in info.left}


# ------------------------------------------------------------ written back


async def test_it_is_written_back_where_others_have_the_store(tmp_path):
    held = host(keys(0, 1)), store("nfs", keys(1))
    async with draining(tmp_path, SHARING, *held) as (r, a, b):
        assert await b.told("pull") == []
        order = await a.store()
        assert (order.keys, order.stores) == (keys(0), ["nfs"])
        info = await step(r)
        assert (info.state, info.stored, info.moved) == (S.DRAINED, {"nfs": 1}, {})


async def test_what_is_in_its_own_store_goes_too_when_it_goes_for_good(tmp_path):
    held = host(keys(0)), store("sa", keys(0, 1))
    async with draining(tmp_path, SHARING, *held) as (r, a, _):
        order = await a.store()
        assert sorted(order.keys) == sorted(keys(0, 1))
        assert order.keys[0] == keys(0)[0]  # what is in host memory first
        assert (await step(r)).state is S.DRAINED


async def test_for_a_restart_its_own_stores_are_enough(tmp_path):
    held = host(keys(0, 1, 2)), store("sa", keys(1, 9))
    async with draining(tmp_path, SHARING, *held, for_="restart") as (r, a, b):
        info = await r.control.drain_of("a")
        assert (info.for_, info.remaining.chunks) == ("restart", 2)
        order = await a.store()
        assert sorted(order.keys) == sorted(keys(0, 2))
        assert order.stores == ["nfs", "sa"]
        assert (await step(r)).may_stop
        assert await b.told("pull") == []


async def test_what_no_store_takes_is_moved(tmp_path):
    async with draining(tmp_path, SHARING, host(keys(0)), for_="restart") as (r, a, b):
        await a.store(Outcome.NO_ROOM)
        r.clock.advance(1)
        await step(r)
        assert await b.pull() == keys(0)
        assert (await step(r)).state is S.DRAINED


async def test_a_store_that_fails_is_tried_twice_and_one_that_says_nothing_given_up(tmp_path):
    async with draining(tmp_path, SHARING, host(keys(0))) as (r, a, b):
        await a.store(Outcome.FAILED)
        r.clock.advance(1)
        await step(r)
        (order,) = await a.told("store")
        assert await a.told("store") == []
        r.clock.advance(5)
        assert await a.told("store") == [order.model_copy(update={"deadline_in": 55.0})]
        for _ in range(11):
            r.clock.advance(6)
            await settle(a)
            await b.beat()
        await step(r)
        late = api.StoreResult(incarnation="i1", outcomes={keys(0)[0]: Outcome.STORED})
        reply = await r.control.store_result("a", order.transfer, late)
        assert not reply.wanted
        r.clock.advance(1)
        await step(r)
        assert await b.pull() == keys(0)
        assert (await step(r)).state is S.DRAINED


# ------------------------------------------------------------ moved


async def test_room_goes_to_the_most_free_first_and_nothing_is_promised_twice(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(emptying_module, "_PART_KEYS", 4)
    nodes = (
        ("a", {}),
        ("full", {}),
        ("small", {"capacity": 6 * CHUNK_BYTES}),
        ("large", {"capacity": 10 * CHUNK_BYTES}),
        ("ill", {}),
    )
    async with cluster(tmp_path, *nodes) as (r, a, full, small, large, ill):
        full.used = full.capacity
        await full.beat()
        await ill.beat(healthy=False, detail="a disk")
        await a.report(host(keys(*range(20))))
        await begin(r)
        await settle(a)
        await step(r)
        first = await large.pull(reports=False)
        assert first == keys(0, 1, 2, 3)  # in the order in which they were reported
        assert await small.pull() == keys(4, 5, 6, 7)
        await large.report(host(first))
        await step(r)
        assert len(await large.pull()) == 4
        # Six and ten, less a sixteenth that is spared: nine and five chunks, of which four each
        # are gone to them, and the rest is told by heartbeats.
        await step(r)
        assert len(await small.pull()) == len(await large.pull()) == 1
        assert await full.told("pull") == await ill.told("pull") == []
        info = await step(r)
        assert info.moved == {"large": 9, "small": 5}
        assert info.remaining.chunks == 6


async def test_only_to_nodes_that_were_named(tmp_path):
    nodes = (*PLAIN, ("c", {}))
    async with draining(tmp_path, nodes, host(keys(0)), targets=["c"]) as (_, _a, b, c):
        assert await b.pull() == []
        assert await c.pull() == keys(0)


async def test_a_transfer_of_it_takes_the_turn_of_one_tenant(tmp_path):
    theirs = replace(NAMESPACE, tenant="acme")
    mixed = [*keys(0), *(theirs.key(0, bytes([n])).hex() for n in (1, 2)), *keys(3)]
    async with cluster(tmp_path, *PLAIN, ("c", {})) as (r, a, b, c):
        await a.report(host(mixed), namespaces=(DOCUMENT, theirs.document.decode()))
        await begin(r)
        await settle(a)
        await step(r)
        parts = [await node.pull(reports=False) for node in (b, c)]
        assert sorted(map(sorted, parts)) == sorted([sorted(mixed[1:3]), sorted(keys(0, 3))])


@pytest.mark.parametrize("tenant", ["", "acme"])
async def test_what_is_too_large_for_all_is_passed_over_and_told(tmp_path, tenant):
    large = replace(NAMESPACE, model="large", blocks_per_chunk=64, tenant=tenant)
    assert large.chunk_bytes[0] == 16 * CHUNK_BYTES
    nodes = (*PLAIN[:1], ("b", {"capacity": 10 * CHUNK_BYTES}), ("c", {"capacity": CHUNK_BYTES}))
    mixed = [*keys(0), large.key(0, b"1").hex(), *keys(1, 2), large.key(0, b"2").hex()]
    async with cluster(tmp_path, *nodes) as (r, a, b, c):
        await a.report(host(mixed[1:]), namespaces=(DOCUMENT, large.document.decode()))
        await begin(r)
        await settle(a)
        await step(r)
        assert sorted(await b.pull()) == sorted(keys(1, 2))
        info = await step(r)
        assert left(info) == {LeftReason.NO_ROOM: 2}
        await a.report(host(keys(0)))  # and they are not in the way of what comes later
        await step(r)
        assert await b.pull() == keys(0)
        assert await c.told("pull") == []
        while not info.state.ended:
            r.clock.advance(TTL / 2)
            await settle(a, b)
            info = await step(r)
        assert (info.state, left(info)) == (S.PARTIAL, {LeftReason.NO_ROOM: 2})
        assert "larger than what is free" in info.detail


async def test_so_many_chunks_that_were_tried_are_remembered(tmp_path, monkeypatch):
    monkeypatch.setattr(emptying_module, "_MOST_TRIED", 4)
    async with draining(tmp_path, PLAIN, host(keys(*range(10)))) as (r, _, b):
        drain = r.state.drains._in_force.get("a")
        for many in (4, 4, 2):
            pulled = await b.pull(reports=False)
            await step(r)
            assert (len(pulled), len(drain.attempts)) == (many, many)
            assert await b.told("pull") == []
            await b.report(host(pulled))
            await step(r)
        assert drain.state is S.DRAINED


async def test_where_so_many_fail_the_rest_is_not_tried(tmp_path, monkeypatch):
    monkeypatch.setattr(emptying_module, "_MOST_TRIED", 4)
    async with draining(tmp_path, PLAIN, host(keys(*range(10)))) as (r, a, b):
        info = await step(r)
        while not info.state.ended:
            assert await b.pull(Outcome.FAILED, reports=False) in ([], keys(0, 1, 2, 3))
            r.clock.advance(2)
            await settle(a, b)
            info = await step(r)
        assert left(info) == {LeftReason.FAILED: 10}


async def test_what_is_begun_at_once_is_bounded_but_for_a_chunk_larger_than_that(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(emptying_module, "_PART_BYTES", CHUNK_BYTES // 2)
    monkeypatch.setattr(emptying_module, "_MOST_MOVES", 2)
    nodes = (*SHARING, ("c", {}), ("d", {}), ("e", {}))
    async with draining(tmp_path, nodes, host(keys(*range(8)))) as (r, a, *others):
        assert (await a.store(Outcome.NO_ROOM)).keys == keys(0)
        r.clock.advance(1)
        monkeypatch.setattr(emptying_module.Emptying, "_stores", lambda *of: [])
        await step(r)
        assert len([key for node in others for key in await node.pull()]) == 2


# ------------------------------------------------------------ what can't be done


async def test_no_room_anywhere_is_partial_and_says_what_to_do(tmp_path):
    async with cluster(tmp_path, *PLAIN) as (r, a, b):
        b.used = b.capacity
        await a.report(host(keys(0, 1, 2)))
        await begin(r, deadline=600)
        for _ in range(4):
            await settle(a)
            await b.beat()
            assert (await step(r)).state is S.DRAINING
            r.clock.advance(3)
        await settle(a)
        await b.beat()
        info = await step(r)
        assert (info.state, info.may_stop, info.in_force) == (S.PARTIAL, False, True)
        assert left(info) == {LeftReason.NO_ROOM: 3}
        assert "drain again" in info.left[0].detail
        assert "3 chunks" in info.detail
        b.used = 0  # somebody made room
        await b.beat()
        again = await begin(r)
        assert again.id != info.id
        await step(r)
        await b.pull()
        await settle(a)
        assert (await step(r)).state is S.DRAINED


async def test_a_target_that_says_no_room_is_left_alone_for_a_while(tmp_path):
    async with draining(tmp_path, PLAIN, host(keys(0))) as (r, _, b):
        await b.pull(Outcome.NO_ROOM, reports=False)
        r.clock.advance(2)
        assert left(await step(r)) == {LeftReason.NO_ROOM: 1}
        assert await b.told("pull") == []
        r.clock.advance(5)
        await step(r)
        assert await b.pull() == keys(0)
        assert (await step(r)).state is S.DRAINED


async def test_what_fails_is_tried_a_few_times(tmp_path):
    async with draining(tmp_path, PLAIN, host(keys(0))) as (r, a, b):
        for _ in range(3):
            assert await b.pull(Outcome.FAILED, reports=False) == keys(0)
            await step(r)
            r.clock.advance(2)
            await settle(a, b)
            await step(r)
        assert await b.told("pull") == []
        for _ in range(2):
            r.clock.advance(TTL / 2 + 1)
            await settle(a, b)
        info = await step(r)
        assert info.state is S.PARTIAL
        assert left(info) == {LeftReason.FAILED: 1}


@pytest.mark.parametrize("alone", [True, False])
async def test_where_nothing_can_take_it(tmp_path, alone):
    nodes = PLAIN[:1] if alone else (("a", {"peers": False}), ("b", {}))
    async with draining(tmp_path, nodes, host(keys(0))) as (r, a, *_):
        for seconds in (TTL / 2, TTL / 2 + 1):
            r.clock.advance(seconds)
            await a.beat()
        info = await step(r)
        assert info.state is S.PARTIAL
        assert left(info) == {LeftReason.NO_WAY: 1}
        assert "peers.listen" in info.left[0].detail
