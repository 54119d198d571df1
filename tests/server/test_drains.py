"""Nodes emptied before they are stopped; the nodes here only say what the test has them say."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
from msgspec.structs import replace
from server_kit import (
    CHUNK_BYTES,
    DOCUMENT,
    NAMESPACE,
    TTL,
    TurnedClock,
    host,
    join,
    keys,
    report,
    running,
    store,
)
from sqlalchemy import select

from kvstrata import api
from kvstrata.api import DrainState, LeftReason, NodeState, Outcome
from kvstrata.errors import Busy, Missing, PeerRefused
from kvstrata_server.access import tokens
from kvstrata_server.access.roles import Role
from kvstrata_server.draining import drains as drains_module
from kvstrata_server.draining import emptying as emptying_module
from kvstrata_server.sql.models import DrainRow

S = DrainState
ROOM = 64 * CHUNK_BYTES


@pytest.fixture(autouse=True)
def by_hand(monkeypatch):
    """Steps are taken when the test says so."""

    async def run(self):
        return

    monkeypatch.setattr(drains_module.Drains, "run", run)


class Node:
    """A node that reports and beats on demand."""

    def __init__(self, r, name, stores=(), capacity=ROOM, peers=True, incarnation="i1") -> None:
        self.r, self.name, self.stores, self.peers = r, name, stores, peers
        self.capacity, self.used, self.seq, self.incarnation = capacity, 0, 0, incarnation
        self.draining = False

    async def join(self):
        await join(self.r.control, self.name, self.incarnation, self.stores, self.peers)
        await self.beat()
        return self

    async def report(self, *changes):
        reply = await self.r.control.report(
            self.name, report(self.seq, *changes, incarnation=self.incarnation)
        )
        assert reply.applied
        self.seq += 1

    async def beat(self, settled=None, **more):
        use = api.HostUse(used_bytes=self.used, capacity_bytes=self.capacity, chunks=0)
        reply = await self.r.control.heartbeat(
            self.name,
            api.HeartbeatRequest(
                incarnation=self.incarnation,
                host=use,
                next_seq=self.seq,
                settled=self.draining if settled is None else settled,
                **more,
            ),
        )
        self.draining = reply.draining

    async def told(self, kind):
        commands = (await self.r.control.commands(self.name, self.incarnation)).commands
        return [command for command in commands if command.kind == kind]

    async def pull(self, outcome=Outcome.STORED, reports=True):
        """Execute the transfers that wait."""
        pulled = []
        for command in await self.told("pull"):
            pulled += command.keys
            await self.r.control.progress(
                self.name,
                api.Progress(
                    incarnation=self.incarnation,
                    transfer=command.transfer,
                    final=True,
                    outcomes=dict.fromkeys(command.keys, outcome),
                    bytes=len(command.keys) * CHUNK_BYTES,
                ),
            )
            assert command.free_only
        if pulled and reports:
            await self.report(host(pulled))
        return pulled

    async def store(self, outcome=Outcome.STORED, reports=True, **more):
        """Execute the order that waits, into its first store."""
        (order,) = await self.told("store")
        result = api.StoreResult(
            incarnation=self.incarnation,
            **({"outcomes": dict.fromkeys(order.keys, outcome),
                "stores": dict.fromkeys(order.keys, order.stores[0])} | more),
        )  # fmt: skip
        await self.r.control.store_result(self.name, order.transfer, result)
        if reports and outcome is Outcome.STORED:
            await self.report(store(order.stores[0], order.keys))
        return order


@asynccontextmanager
async def cluster(place, *nodes, clock=None, **settings):
    """`nodes`: (name, more) of each."""
    async with running(place, clock, **settings) as r:
        made = [await Node(r, name, **more).join() for name, more in nodes]
        yield r, *made


async def begin(r, node="a", **more):
    return await r.control.drain(node, api.DrainRequest(**more))


async def step(r, node="a"):
    await r.state.drains.advance()
    return await r.control.drain_of(node)


async def settle(node):
    await node.beat()
    await node.beat()


PLAIN = (("a", {}), ("b", {}))
SHARING = (("a", {"stores": ("sa", "nfs")}), ("b", {"stores": ("nfs",)}))


async def test_what_only_it_holds_is_moved_to_others(place):
    async with cluster(place, *PLAIN) as (r, a, b):
        await a.report(host(keys(0, 1, 2)))
        await b.report(host(keys(2)))
        made = await begin(r, deadline=300)
        assert (made.state, made.for_, made.deadline) == (S.DRAINING, "removal", r.clock() + 300)
        assert made.remaining == api.Amount(chunks=2, bytes=2 * CHUNK_BYTES)
        assert [(left.why, left.chunks) for left in made.left] == [(LeftReason.WAITING, 2)]
        assert (await r.control.node("a")).drain is S.DRAINING
        assert (await r.control.node("b")).drain is None
        await settle(a)
        info = await step(r)
        assert (info.settled, info.state, info.may_stop) == (True, S.DRAINING, False)
        assert sorted(await b.pull()) == sorted(keys(0, 1))
        info = await step(r)
        assert (info.state, info.may_stop, info.ended) == (S.DRAINED, True, r.clock())
        assert (info.moved, info.moved_bytes) == ({"b": 2}, 2 * CHUNK_BYTES)
        assert (info.left, info.remaining.chunks) == ([], 0)


async def test_it_is_written_back_where_others_have_the_store(tmp_path):
    async with cluster(tmp_path, *SHARING) as (r, a, b):
        await a.report(host(keys(0, 1)), store("nfs", keys(1)))
        await begin(r)
        await settle(a)
        await step(r)
        assert await b.told("pull") == []
        order = await a.store()
        assert (order.keys, order.stores) == (keys(0), ["nfs"])
        info = await step(r)
        assert (info.state, info.stored, info.moved) == (S.DRAINED, {"nfs": 1}, {})


async def test_what_is_in_its_own_store_goes_too_when_it_goes_for_good(tmp_path):
    async with cluster(tmp_path, *SHARING) as (r, a, _):
        await a.report(host(keys(0)), store("sa", keys(0, 1)))
        await begin(r)
        await settle(a)
        await step(r)
        order = await a.store()
        assert sorted(order.keys) == sorted(keys(0, 1))
        assert order.keys[0] == keys(0)[0]  # what is in host memory first
        assert (await step(r)).state is S.DRAINED


async def test_for_a_restart_its_own_stores_are_enough(tmp_path):
    async with cluster(tmp_path, *SHARING) as (r, a, b):
        await a.report(host(keys(0, 1, 2)), store("sa", keys(1, 9)))
        made = await begin(r, for_="restart")
        assert (made.for_, made.remaining.chunks) == ("restart", 2)
        await settle(a)
        await step(r)
        order = await a.store()
        assert sorted(order.keys) == sorted(keys(0, 2))
        assert order.stores == ["nfs", "sa"]
        assert (await step(r)).may_stop
        assert await b.told("pull") == []


async def test_what_no_store_takes_is_moved(tmp_path):
    async with cluster(tmp_path, *SHARING) as (r, a, b):
        await a.report(host(keys(0)))
        await begin(r, for_="restart")
        await settle(a)
        await step(r)
        await a.store(Outcome.NO_ROOM)
        r.clock.advance(1)
        await step(r)
        assert await b.pull() == keys(0)
        assert (await step(r)).state is S.DRAINED


async def test_a_store_that_fails_is_tried_twice_and_one_that_says_nothing_given_up(tmp_path):
    async with cluster(tmp_path, *SHARING) as (r, a, b):
        await a.report(host(keys(0)))
        await begin(r)
        await settle(a)
        await step(r)
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


async def test_it_is_not_drained_before_the_node_has_said_all(place):
    async with cluster(place, *PLAIN) as (r, a, b):
        await begin(r)
        (beat,) = await a.told("beat")
        assert beat.transfer
        assert (await step(r)).state is S.DRAINING
        await a.beat()
        assert a.draining
        assert (await step(r)).state is S.DRAINING
        await a.beat(settled=False)  # some reports are not answered yet
        assert (await step(r)).state is S.DRAINING
        await a.report(host(keys(0)))
        await a.beat()
        info = await step(r)
        assert (info.state, info.remaining.chunks) == (S.DRAINING, 1)
        await b.pull()
        assert (await step(r)).state is S.DRAINED


async def test_a_node_that_never_says_so_makes_it_partial(tmp_path):
    async with cluster(tmp_path, *PLAIN) as (r, a, _):
        await begin(r, deadline=5)
        await a.beat(settled=False)
        r.clock.advance(5)
        info = await step(r)
        assert (info.state, info.may_stop, info.remaining.chunks) == (S.PARTIAL, False, 0)
        assert "has not said that it takes no new chunks" in info.detail


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


async def test_no_room_anywhere_is_partial_and_says_what_to_do(place):
    async with cluster(place, *PLAIN) as (r, a, b):
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
        (left,) = info.left
        assert (left.why, left.chunks) == (LeftReason.NO_ROOM, 3)
        assert "drain again" in left.detail
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
    async with cluster(tmp_path, *PLAIN) as (r, a, b):
        await a.report(host(keys(0)))
        await begin(r)
        await settle(a)
        await step(r)
        await b.pull(Outcome.NO_ROOM, reports=False)
        r.clock.advance(2)
        info = await step(r)
        assert [(left.why, left.chunks) for left in info.left] == [(LeftReason.NO_ROOM, 1)]
        assert await b.told("pull") == []
        r.clock.advance(5)
        await step(r)
        assert await b.pull() == keys(0)
        assert (await step(r)).state is S.DRAINED


async def test_what_fails_is_tried_a_few_times(tmp_path):
    async with cluster(tmp_path, *PLAIN) as (r, a, b):
        await a.report(host(keys(0)))
        await begin(r)
        for _ in range(3):
            await settle(a)
            await b.beat()
            await step(r)
            assert await b.pull(Outcome.FAILED, reports=False) == keys(0)
            await step(r)
            r.clock.advance(2)
        await step(r)
        assert await b.told("pull") == []
        for node in (a, b):
            r.clock.advance(TTL / 2 + 1)
            await a.beat()
            await node.beat()
        info = await step(r)
        assert info.state is S.PARTIAL
        assert [(left.why, left.chunks) for left in info.left] == [(LeftReason.FAILED, 1)]


@pytest.mark.parametrize("alone", [True, False])
async def test_where_nothing_can_take_it(tmp_path, alone):
    nodes = PLAIN[:1] if alone else (("a", {"peers": False}), ("b", {}))
    async with cluster(tmp_path, *nodes) as (r, a, *_):
        await a.report(host(keys(0)))
        await begin(r)
        await settle(a)
        await step(r)
        r.clock.advance(TTL / 2)
        await a.beat()
        r.clock.advance(TTL / 2 + 1)
        await a.beat()
        info = await step(r)
        assert info.state is S.PARTIAL
        assert [(left.why, left.chunks) for left in info.left] == [(LeftReason.NO_WAY, 1)]
        assert "peers.listen" in info.left[0].detail


async def test_its_deadline_ends_it_and_what_is_under_way(place):
    async with cluster(place, *PLAIN) as (r, a, b):
        await a.report(host(keys(0, 1)))
        await begin(r, deadline=8)
        await settle(a)
        await step(r)
        (pull,) = await b.told("pull")
        assert pull.deadline_in == 8
        r.clock.advance(8)
        info = await step(r)
        assert (info.state, info.remaining.chunks) == (S.PARTIAL, 2)
        assert info.left[0].why in (LeftReason.LATE, LeftReason.FAILED)
        assert (await r.control.get_transfer(pull.transfer)).state.ended


async def test_a_silent_node_is_waited_for_until_the_deadline(tmp_path):
    async with cluster(tmp_path, *PLAIN) as (r, a, b):
        await a.report(host(keys(0)))
        await begin(r, deadline=100)
        await settle(a)
        r.clock.advance(50)
        await b.beat()
        assert (await step(r)).state is S.DRAINING
        assert (await r.control.node("a")).state is NodeState.SILENT
        await a.beat()
        await step(r)
        await b.pull()
        assert (await step(r)).state is S.DRAINED


async def test_cancelled_the_node_serves_as_before(place):
    async with cluster(place, *PLAIN) as (r, a, b):
        await a.report(host(keys(0)))
        await begin(r)
        await settle(a)
        await step(r)
        (pull,) = await b.told("pull")
        info = await r.control.cancel_drain("a")
        assert (info.state, info.in_force, info.may_stop) == (S.CANCELLED, False, False)
        assert (await r.control.get_transfer(pull.transfer)).state.value == "cancelled"
        assert [c.kind for c in (await r.control.commands("a", "i1")).commands] == ["beat"]
        await a.beat()
        assert not a.draining
        assert (await r.control.node("a")).drain is None
        assert await r.control.drain_of("a") == info
        assert await r.control.cancel_drain("a") == info
        await step(r)
        assert await b.told("pull") == []


async def test_one_that_is_drained_may_serve_again(place):
    async with cluster(place, *PLAIN) as (r, a, _):
        await begin(r)
        await settle(a)
        assert (await step(r)).may_stop
        assert (await r.control.node("a")).drain is S.DRAINED
        info = await r.control.cancel_drain("a")
        assert (info.state, info.in_force, info.may_stop) == (S.DRAINED, False, False)
        await a.beat()
        assert not a.draining


async def test_it_is_no_target_and_goes_on_being_a_source(tmp_path):
    async with cluster(tmp_path, *PLAIN) as (r, a, b):
        await a.report(host(keys(0)))
        asked = api.TransferRequest(target="a", keys=keys(1))
        before = await r.control.create_transfer(asked, "once")
        await begin(r)
        for path, body in (
            ("transfers", {"target": "a"}),
            ("prefetches", {"node": "a"}),
            ("leases", {"node": "a"}),
        ):
            answer = await r.http.post(f"/v1/{path}", json={"keys": keys(0), **body})
            assert answer.status_code == 409
            assert "'a' is drained" in answer.json()["detail"]
        assert await r.control.create_transfer(asked, "once") == before  # accepted before
        made = await r.control.create_transfer(api.TransferRequest(target="b", keys=keys(0)))
        (pull,) = [c for c in await b.told("pull") if c.transfer == made.id]
        assert [source.node for source in pull.sources] == ["a"]
        await r.control.cancel_drain("a")
        await r.control.create_transfer(api.TransferRequest(target="a", keys=keys(0)))


async def test_asking_again_is_harmless_and_another_purpose_a_conflict(tmp_path):
    async with cluster(tmp_path, *PLAIN) as (r, *_):
        first = await begin(r)
        assert (await begin(r, deadline=1)).deadline == first.deadline
        with pytest.raises(PeerRefused, match="cancel that first"):
            await begin(r, for_="restart")
        with pytest.raises(Missing):
            await begin(r, "z")
        with pytest.raises(Missing):
            await r.control.drain_of("b")
        with pytest.raises(Missing):
            await begin(r, "b", targets=["z"])
        with pytest.raises(PeerRefused, match="can't take what it is to be rid of"):
            await begin(r, "b", targets=["a", "b"])


async def test_only_to_nodes_that_were_named(tmp_path):
    nodes = (*PLAIN, ("c", {}))
    async with cluster(tmp_path, *nodes) as (r, a, b, c):
        await a.report(host(keys(0)))
        await begin(r, targets=["c"])
        await settle(a)
        await step(r)
        assert await b.pull() == []
        assert await c.pull() == keys(0)


async def test_two_that_go_do_not_count_on_each_other(tmp_path):
    nodes = (("a", {"stores": ("nfs",)}), ("b", {"stores": ("nfs",)}), ("c", {}))
    async with cluster(tmp_path, *nodes) as (r, a, b, c):
        await a.report(host(keys(0)), store("nfs", keys(1)))
        await b.report(host(keys(0)))
        assert (await begin(r, "b")).remaining.chunks == 0
        assert (await begin(r, "a")).remaining.chunks == 2
        await settle(a)
        await settle(b)
        await step(r)
        assert (await r.control.drain_of("b")).remaining.chunks == 2
        moved = {*await c.pull(reports=False), *await c.pull(reports=False)}
        assert moved == set(keys(0, 1))
        await c.report(host(keys(0, 1)))
        for node in ("a", "b"):
            assert (await step(r, node)).state is S.DRAINED


async def test_what_was_safe_may_be_so_no_more(tmp_path):
    async with cluster(tmp_path, *PLAIN) as (r, a, b):
        await a.report(host(keys(0)))
        await b.report(host(keys(0)))
        await begin(r)
        await settle(a)
        assert (await step(r)).may_stop
        await b.report(host(removed=keys(0)))
        info = await r.control.drain_of("a")
        assert (info.state, info.may_stop, info.remaining.chunks) == (S.DRAINED, False, 1)
        assert "drain again" in info.detail


@pytest.mark.parametrize(
    ("held", "moved", "state"),
    [((), False, S.DRAINED), ((0,), True, S.DRAINED), ((0, 1), False, S.PARTIAL)],
)
async def test_a_node_that_starts_anew_ends_it_with_what_is_true(place, held, moved, state):
    async with cluster(place, *PLAIN) as (r, a, b):
        await a.report(host(keys(*held)))
        await begin(r)
        await settle(a)
        if held:
            await step(r)
        if moved:
            await b.pull()
        if held:
            await step(r)
        else:
            await r.state.drains.advance()
        anew = await Node(r, "a", incarnation="i2").join()
        assert not anew.draining
        info = await step(r)
        assert (info.state, info.in_force, info.may_stop) == (state, False, False)
        assert info.remaining.chunks == (len(held) if state is S.PARTIAL else 0)
        if state is S.PARTIAL:
            assert "started anew before it was drained" in info.detail
        assert (await r.control.node("a")).drain is None
        await r.control.create_transfer(api.TransferRequest(target="a", keys=keys(5)))


async def test_a_node_that_starts_anew_may_be_drained_at_once(place):
    async with cluster(place, *PLAIN) as (r, a, _):
        await a.report(host(keys(0)))
        first = await begin(r)
        a.incarnation, a.seq = "i2", 0
        await a.join()
        r.clock.advance(0.1)
        second = await begin(r)
        assert second.id != first.id
        await r.state.writer.flushed(10)
        rows = await r.state.database.rows(select(DrainRow.__table__).order_by(DrainRow.id))
        assert [(row.state, row.in_force, row.ended is None) for row in rows] == [
            ("partial", False, False),
            ("draining", True, True),
        ]
        assert "started anew" in rows[0].detail


async def test_a_node_that_leaves_ends_it(place):
    async with cluster(place, *PLAIN) as (r, a, _):
        await a.report(host(keys(0)))
        await begin(r)
        await settle(a)
        await step(r)
        await r.control.deregister("a")
        info = await step(r)
        assert (info.state, info.in_force) == (S.PARTIAL, False)
        assert "the node left" in info.detail


async def test_it_outlives_the_server(place):
    clock = TurnedClock()
    async with cluster(place, *SHARING, ("c", {}), clock=clock) as (r, a, b, c):
        await a.report(host(keys(0, 1)))
        first = await begin(r, targets=["c"])
        await settle(a)
        await step(r)
        await a.store(Outcome.NO_ROOM)
        clock.advance(1)
        await step(r)
        assert len(r.state.drains._active["a"].moves) == 1
    async with running(place, clock) as r:
        for node in (a, b, c):
            node.r = r
            await node.join()
        assert a.draining
        assert (await r.control.node("a")).drain is S.DRAINING
        await a.beat()
        await step(r)
        assert await a.told("store") == []  # though stores are asked first: they are under way
        assert sorted(await c.pull()) == sorted(keys(0, 1))
        info = await step(r)
        assert (info.id, info.state, info.moved) == (first.id, S.DRAINED, {"c": 2})


async def test_servers_of_one_database_share_them(postgres_address):
    """The one that the node talks to does the work, any of them tells and cancels."""
    clock = TurnedClock()

    async def follow():
        for server in (first, second):
            server.state.follower.tell()
            await server.state.writer.flushed(10)
        for server in (first, second):
            while await server.state.follower.read():
                pass

    async with (
        running(postgres_address, clock) as first,
        running(postgres_address, clock) as second,
    ):
        a, b = await Node(first, "a").join(), await Node(second, "b").join()
        await a.report(host(keys(0, 1)))
        await follow()
        made = await begin(second)  # to which it doesn't talk
        clock.advance(1)
        await first.state.drains.advance()
        assert (await first.control.node("a")).drain is S.DRAINING
        await settle(a)
        assert a.draining
        await second.state.drains.advance()
        assert await b.told("pull") == []  # not its business
        await first.state.drains.advance()
        await follow()
        assert sorted(await b.pull()) == sorted(keys(0, 1))
        await follow()
        # The first dies; the node comes to the second, which goes on.
        a.r = second
        clock.advance(2)
        await a.beat()
        await a.report()
        info = await step(second)
        assert (info.id, info.state, info.may_stop) == (made.id, S.DRAINED, True)
        clock.advance(1)
        assert (await step(first)).may_stop
        assert (await first.control.cancel_drain("a")).in_force is False
        clock.advance(1)
        assert (await step(second)).in_force is False
        await a.beat()
        assert not a.draining


async def test_a_node_whose_reports_have_a_gap_keeps_nothing_safe(tmp_path):
    async with cluster(tmp_path, *PLAIN) as (r, a, b):
        await a.report(host(keys(0)))
        await b.report(host(keys(0)))
        await begin(r)
        await settle(a)
        await b.beat(settled=False)
        lost = report(b.seq + 1, host([], keys(0)))
        assert (await r.control.report("b", lost)).snapshot_wanted
        assert (await step(r)).remaining.chunks == 1
        whole = report(b.seq + 2, host(keys(0)), snapshot="only")
        assert (await r.control.report("b", whole)).applied
        assert (await step(r)).may_stop


@asynccontextmanager
async def two_servers(address, clock):
    """That know of the nodes `a`, which talks to the first, and `b`, which talks to the second, and
    of two chunks that both of these have. Each has read of drains just now."""
    async with running(address, clock) as first, running(address, clock) as second:
        a, b = await Node(first, "a").join(), await Node(second, "b").join()
        for node in (a, b):
            await node.report(host(keys(0, 1)))
        for server in (first, second):
            server.state.follower.tell()
            await server.state.writer.flushed(10)
        for server in (first, second):
            while await server.state.follower.read():
                pass
        for server in (first, second):
            await server.state.drains.advance()
        yield first, second, a, b


async def test_two_nodes_that_go_at_two_servers_do_not_count_on_each_other(postgres_address):
    clock = TurnedClock()
    async with two_servers(postgres_address, clock) as (first, second, a, b):
        await begin(first, "a")
        await begin(second, "b")
        for _ in range(3):  # within the second in which neither reads again by itself
            clock.advance(0.1)
            for node in (a, b):
                await settle(node)
                await node.r.state.drains.advance()
        told = [await first.control.drain_of("a"), await second.control.drain_of("b")]
        assert not any(info.may_stop for info in told)
        assert [info.remaining.chunks for info in told] == [2, 2]


async def test_servers_that_are_asked_at_once_agree_on_one(postgres_address, monkeypatch):
    clock = TurnedClock()

    async def unread(self, at_once=False):
        return {}

    async with two_servers(postgres_address, clock) as (first, second, a, _):
        made = await begin(first)
        clock.advance(0.1)
        assert (await begin(second)).id == made.id  # as a client asks the next one again
        await second.control.cancel_drain("a")
        clock.advance(1)
        await first.state.drains.advance()
        # And where both make one before either can read of the other's:
        with monkeypatch.context() as m:
            m.setattr(drains_module.Drains, "_refresh", unread)
            one = await begin(first)
            clock.advance(0.1)
            two = await begin(second)
        assert one.id < two.id
        for _ in range(2):
            clock.advance(1)
            for server in (first, second):
                await server.state.drains.advance()
                assert (await server.control.drain_of("a")).id == two.id
        await a.beat()
        assert a.draining
        assert (await first.control.cancel_drain("a")).id == two.id
        clock.advance(1)
        for server in (first, second):
            assert not (await step(server)).in_force
        await a.beat()
        assert not a.draining
        rows = await first.state.database.rows(select(DrainRow.__table__))
        assert [(row.state, row.in_force) for row in rows] == [("cancelled", False)] * 3


async def test_one_that_is_cancelled_while_it_is_read_stays_so(postgres_address, monkeypatch):
    read, cancelled = asyncio.Event(), asyncio.Event()
    rows = drains_module.Drains._rows

    async def slow(self, *args, **more):
        found = await rows(self, *args, **more)
        read.set()
        await cancelled.wait()
        return found

    async with two_servers(postgres_address, TurnedClock()) as (first, _, a, _):
        await begin(first)
        monkeypatch.setattr(drains_module.Drains, "_rows", slow)
        reading = asyncio.create_task(first.state.drains._refresh(at_once=True))
        await read.wait()
        await first.control.cancel_drain("a")
        cancelled.set()
        await reading
        await a.beat()
        assert not a.draining


async def test_a_server_that_can_not_read_of_other_drains_calls_no_node_drained(
    postgres_address, monkeypatch
):
    clock = TurnedClock()

    async def away(self, *args, **more):
        raise Busy("the database is away")

    async with two_servers(postgres_address, clock) as (first, _, a, _):
        await begin(first)
        await settle(a)
        with monkeypatch.context() as m:
            m.setattr(drains_module.Drains, "_rows", away)
            assert (await step(first)).state is S.DRAINING
        assert (await step(first)).may_stop
        monkeypatch.setattr(drains_module.Drains, "_rows", away)
        info = await first.control.drain_of("a")
        assert (info.state, info.may_stop) == (S.DRAINED, False)
        assert "can't be read" in info.detail


async def test_one_whose_server_died_is_ended_by_another(postgres_address):
    clock = TurnedClock()
    async with running(postgres_address, clock) as first:
        await Node(first, "a").join()
        await begin(first, deadline=10)
    async with running(postgres_address, clock) as second:
        clock.advance(10)
        assert (await step(second)).state is S.DRAINING
        clock.advance(5)
        assert (await step(second)).state is S.PARTIAL


async def test_a_transfer_of_it_takes_the_turn_of_one_tenant(tmp_path):
    theirs = replace(NAMESPACE, tenant="acme")
    mixed = [*keys(0), *(theirs.key(0, bytes([n])).hex() for n in (1, 2)), *keys(3)]
    nodes = (*PLAIN, ("c", {}))
    async with cluster(tmp_path, *nodes) as (r, a, b, c):
        documents = (DOCUMENT, theirs.document.decode())
        await r.control.report("a", report(0, host(mixed), namespaces=documents))
        a.seq = 1
        await begin(r)
        await settle(a)
        await step(r)
        parts = [await node.pull(reports=False) for node in (b, c)]
        assert sorted(map(sorted, parts)) == sorted([sorted(mixed[1:3]), sorted(keys(0, 3))])


async def test_who_may(tmp_path):
    async with cluster(tmp_path, *PLAIN, token="root") as (r, *_):
        may = {}
        for role, scope in (
            (Role.READ, {}),
            (Role.ORCHESTRATE, {}),
            (Role.NODE, {"node": "a"}),
            (Role.NODE, {"node": "b"}),
            (Role.READ, {"tenants": frozenset({"acme"})}),
            (Role.ADMIN, {}),
        ):
            token = await tokens.create(
                r.state.database, f"{role}{len(may)}", role, now=r.clock(), **scope
            )
            await r.state.tokens.refresh()
            headers = {"Authorization": f"Bearer {token}"}
            order = {"incarnation": "i1"}
            may[role, scope.get("node", "") or bool(scope)] = [
                (await r.http.post("/v1/nodes/a/drain", headers=headers, json={})).is_success,
                (await r.http.get("/v1/nodes/a/drain", headers=headers)).status_code != 403,
                (await r.http.post("/v1/nodes/b/orders/x", headers=headers, json=order)).is_success,
                (await r.http.delete("/v1/nodes/a/drain", headers=headers)).is_success,
            ]
        assert may == {
            (Role.READ, False): [False, True, False, False],
            (Role.ORCHESTRATE, False): [False, True, False, False],
            (Role.NODE, "a"): [True, True, False, True],
            (Role.NODE, "b"): [False, False, True, False],
            (Role.READ, True): [False, False, False, False],
            (Role.ADMIN, False): [True, True, True, True],
        }
        root = {"Authorization": "Bearer root"}
        await r.state.writer.flushed(10)
        audit = (await r.http.get("/v1/audit?limit=1000", headers=root)).json()["entries"]
        done = [e["operation"] for e in audit if e["status"] < 300 and "drain" in e["operation"]]
        assert done == ["create_drain", "cancel_drain"] * 2


async def test_what_is_begun_at_once_is_bounded_but_for_a_chunk_larger_than_that(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(emptying_module, "_PART_BYTES", CHUNK_BYTES // 2)
    monkeypatch.setattr(emptying_module, "_MOST_MOVES", 2)
    async with cluster(tmp_path, *SHARING, *(("c", {}), ("d", {}), ("e", {}))) as (r, a, *others):
        await a.report(host(keys(*range(8))))
        await begin(r)
        await settle(a)
        await step(r)
        assert (await a.store(Outcome.NO_ROOM)).keys == keys(0)
        r.clock.advance(1)
        monkeypatch.setattr(emptying_module.Emptying, "_stores", lambda *of: [])
        await step(r)
        assert len([key for node in others for key in await node.pull()]) == 2
