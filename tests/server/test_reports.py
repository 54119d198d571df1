"""Placements as soft state: what nodes report, and what is offered of it."""

import pytest
from server_kit import (
    TTL,
    held,
    host,
    join,
    keys,
    prefixes,
    report,
    running,
    store,
)

from kvstrata import api
from kvstrata.errors import Expired, Malformed, Missing

USE = api.HostUse(used_bytes=100, capacity_bytes=1000, chunks=3)


def beat(incarnation: str = "i1", **more: object) -> api.HeartbeatRequest:
    return api.HeartbeatRequest(incarnation=incarnation, host=USE, **more)


async def test_reports_change_what_is_offered(place):
    async with running(place) as r:
        assert (await join(r.control, "a", stores=("s",))).next_seq == 0
        reply = await r.control.report("a", report(0, host(keys(0, 1)), store("s", keys(1, 2))))
        assert (reply.applied, reply.next_seq, reply.snapshot_wanted) == (True, 1, False)
        assert await held(r.control, keys(0, 1, 2, 3)) == {"a": {"host": 2, "fs": 2}}
        await r.control.report("a", report(1, host(removed=keys(0))))
        assert await held(r.control, keys(0, 1, 2)) == {"a": {"host": 1, "fs": 2}}


async def test_a_key_in_both_lists_is_there(place):
    async with running(place) as r:
        await join(r.control, "a")
        await r.control.report("a", report(0, host(keys(0), removed=keys(0))))
        assert await prefixes(r.control, keys(0)) == {"a": 1}


async def test_a_repeated_report_is_harmless(place):
    async with running(place) as r:
        await join(r.control, "a")
        first = report(0, host(keys(0)))
        await r.control.report("a", first)
        await r.control.report("a", report(1, host(removed=keys(0))))
        reply = await r.control.report("a", first)
        assert (reply.applied, reply.next_seq, reply.snapshot_wanted) == (False, 2, False)
        assert await held(r.control, keys(0)) == {}


async def test_after_a_gap_only_a_snapshot_is_applied(place):
    async with running(place) as r:
        await join(r.control, "a", stores=("s",))
        await r.control.report("a", report(0, host(keys(0, 1)), store("s", keys(5))))
        lost = await r.control.report("a", report(2, host(keys(2))))
        assert (lost.applied, lost.next_seq, lost.snapshot_wanted) == (False, 1, True)
        # The number it waited for doesn't help any more: what was in 2 is lost.
        late = await r.control.report("a", report(1, host(keys(3))))
        assert (late.applied, late.snapshot_wanted) == (False, True)
        assert (await r.control.heartbeat("a", beat())).snapshot_wanted
        assert await held(r.control, keys(0, 1, 2, 3)) == {"a": {"host": 2}}
        whole = await r.control.report("a", report(3, host(keys(1, 2)), snapshot="only"))
        assert (whole.applied, whole.next_seq) == (True, 4)
        assert not (await r.control.heartbeat("a", beat())).snapshot_wanted
        assert await held(r.control, keys(0, 1, 2, 5)) == {"a": {"host": 2}}


async def test_a_snapshot_in_parts_replaces_at_its_last(place):
    async with running(place) as r:
        await join(r.control, "a", stores=("s",))
        await r.control.report("a", report(0, host(keys(9))))
        for seq, part, change in (
            (4, "first", host(keys(0))),  # it may skip numbers
            (5, "more", host(keys(1))),
        ):
            reply = await r.control.report("a", report(seq, change, snapshot=part))
            assert reply.applied
            assert await held(r.control, keys(0, 1, 9)) == {"a": {"host": 1}}
        await r.control.report("a", report(6, store("s", keys(2)), snapshot="last"))
        assert await held(r.control, keys(0, 1, 2, 9)) == {"a": {"host": 2, "fs": 1}}


@pytest.mark.parametrize(
    ("seq", "part"),
    [(1, "more"), (1, "last"), (3, "more")],
    ids=["more without first", "last without first", "gap"],
)
async def test_parts_out_of_place_ask_for_a_new_snapshot(place, seq, part):
    async with running(place) as r:
        await join(r.control, "a")
        await r.control.report("a", report(0, host(keys(0))))
        reply = await r.control.report("a", report(seq, host(keys(1)), snapshot=part))
        assert (reply.applied, reply.snapshot_wanted) == (False, True)
        assert await held(r.control, keys(0, 1)) == {"a": {"host": 1}}


async def test_a_change_between_the_parts_spoils_a_snapshot(place):
    async with running(place) as r:
        await join(r.control, "a")
        await r.control.report("a", report(0, host(keys(0)), snapshot="first"))
        reply = await r.control.report("a", report(1, host(keys(5))))
        assert (reply.applied, reply.snapshot_wanted) == (False, True)


async def test_a_new_incarnation_voids_host_memory_but_not_stores(place):
    async with running(place) as r:
        await join(r.control, "a", stores=("s",))
        await r.control.report("a", report(0, host(keys(0)), store("s", keys(1))))
        assert (await join(r.control, "a", "i2", stores=("s",))).next_seq == 0
        assert await held(r.control, keys(0, 1)) == {"a": {"fs": 1}}
        with pytest.raises(Expired, match="i2"):
            await r.control.report("a", report(1, host(keys(0))))
        with pytest.raises(Expired):
            await r.control.heartbeat("a", beat("i1"))
        assert (await r.control.report("a", report(0, host(keys(3)), incarnation="i2"))).applied


async def test_registering_again_changes_nothing_that_is_held(place):
    async with running(place) as r:
        await join(r.control, "a")
        await r.control.report("a", report(0, host(keys(0))))
        assert (await join(r.control, "a")).next_seq == 1
        assert await held(r.control, keys(0)) == {"a": {"host": 1}}


async def test_a_silent_node_is_not_offered_until_it_speaks(place):
    async with running(place) as r:
        await join(r.control, "a")
        await r.control.report("a", report(0, host(keys(0))))
        r.clock.advance(TTL + 1)
        assert (await r.control.node("a")).state is api.NodeState.SILENT
        assert await held(r.control, keys(0)) == {}
        await r.control.heartbeat("a", beat())
        assert (await r.control.node("a")).state is api.NodeState.UP
        assert await held(r.control, keys(0)) == {"a": {"host": 1}}


async def test_a_shared_store_is_offered_for_every_node_that_is_up(place):
    async with running(place) as r:
        await join(r.control, "a", stores=("mount",))
        await join(r.control, "b", stores=("mount",))
        await join(r.control, "c")
        await r.control.report("a", report(0, store("mount", keys(0, 1))))
        assert await held(r.control, keys(0, 1)) == {"a": {"fs": 2}, "b": {"fs": 2}}
        r.clock.advance(TTL - 1)
        await r.control.heartbeat("b", beat())
        r.clock.advance(2)
        assert await held(r.control, keys(0, 1)) == {"b": {"fs": 2}}


async def test_one_that_evicts_from_a_shared_store_speaks_for_all(place):
    async with running(place) as r:
        await join(r.control, "a", stores=("mount",))
        await join(r.control, "b", stores=("mount",))
        await r.control.report("a", report(0, store("mount", keys(0, 1))))
        await r.control.report("b", report(0, store("mount", removed=keys(0))))
        assert await held(r.control, keys(0, 1)) == {"a": {"fs": 1}, "b": {"fs": 1}}


async def test_a_snapshot_leaves_what_others_found_in_a_shared_store(place):
    async with running(place) as r:
        await join(r.control, "a", stores=("mount",))
        await join(r.control, "b", stores=("mount",))
        await r.control.report("a", report(0, store("mount", keys(0, 1))))
        await r.control.report("b", report(0, store("mount", keys(2)), snapshot="only"))
        assert (await held(r.control, keys(0, 1, 2)))["b"] == {"fs": 3}


async def test_what_a_departed_node_said_of_a_store_gives_way_to_a_snapshot(place):
    async with running(place) as r:
        await join(r.control, "a", stores=("mount",))
        await join(r.control, "b", stores=("mount",))
        await r.control.report("a", report(0, store("mount", keys(0, 1))))
        await r.control.deregister("a")
        assert await held(r.control, keys(0, 1)) == {"b": {"fs": 2}}
        await r.control.report("b", report(0, store("mount", keys(1)), snapshot="only"))
        assert await held(r.control, keys(0, 1)) == {"b": {"fs": 1}}


async def test_a_detached_store_is_not_offered_for_the_node(place):
    async with running(place) as r:
        await join(r.control, "a", stores=("s", "t"))
        await r.control.report("a", report(0, store("s", keys(0)), store("t", keys(1))))
        await join(r.control, "a", stores=("t",))
        assert await held(r.control, keys(0, 1)) == {"a": {"fs": 1}}
        with pytest.raises(Malformed, match="'s'"):
            await r.control.report("a", report(1, store("s", keys(3))))


async def test_a_wrong_report_changes_nothing(place):
    async with running(place) as r:
        await join(r.control, "a")
        with pytest.raises(Malformed):
            await r.control.report("a", report(0, host(keys(0)), store("nowhere", keys(1))))
        with pytest.raises(Malformed):
            await r.control.report("a", report(0, host(keys(0)), namespaces=('{"schema":1}',)))
        assert await held(r.control, keys(0, 1)) == {}
        assert (await r.control.report("a", report(0, host(keys(0))))).applied


async def test_deregistering(place):
    async with running(place) as r:
        await join(r.control, "a")
        await r.control.report("a", report(0, host(keys(0))))
        with pytest.raises(Expired):
            await r.control.deregister("a", "another")
        assert (await r.control.deregister("a", "i1")).state is api.NodeState.GONE
        assert await held(r.control, keys(0)) == {}
        with pytest.raises(Missing):
            await r.control.heartbeat("a", beat())
        # One that was alive after all comes back, and has to say what it holds.
        await join(r.control, "a")
        reply = await r.control.report("a", report(1, host(keys(1))))
        assert (reply.applied, reply.snapshot_wanted) == (False, True)
        assert (await r.control.report("a", report(1, host(keys(0)), snapshot="only"))).applied
        assert await held(r.control, keys(0)) == {"a": {"host": 1}}


async def test_a_heartbeat_shows_a_loss_that_no_report_would(place):
    async with running(place) as r:
        await join(r.control, "a")
        await r.control.report("a", report(0, host(keys(0))))
        assert not (await r.control.heartbeat("a", beat(next_seq=1))).snapshot_wanted
        assert (await r.control.heartbeat("a", beat(next_seq=2))).snapshot_wanted


async def test_nodes_are_listed_in_pages_with_what_they_said(place):
    async with running(place) as r:
        for node in ("c", "a", "b"):
            await join(r.control, node, stores=("s",))
        await r.control.heartbeat("a", beat(healthy=False, detail="disk is full"))
        first = await r.control.nodes(limit=2)
        assert ([n.id for n in first.nodes], first.next) == (["a", "b"], "b")
        rest = await r.control.nodes(after=first.next, limit=2)
        assert ([n.id for n in rest.nodes], rest.next) == (["c"], None)
        a = first.nodes[0]
        assert (a.host, a.healthy, a.detail) == (USE, False, "disk is full")
        assert a.stores == [api.StoreRef(id="s", tier="fs")]
        assert a.peer_address == "tcp://a.test:7801"


async def test_two_nodes_with_one_id_are_seen(tmp_path, caplog):
    async with running(tmp_path) as r:
        await r.control.register(api.NodeRegistration(id="a", incarnation="i1"))
        # A restart: nobody hears the old one again, whose long poll may still wait here.
        await r.control.register(api.NodeRegistration(id="a", incarnation="i2"))
        with pytest.raises(Expired):
            await r.control.commands("a", "i1", 0)
        assert (await r.control.node("a")).healthy
        with pytest.raises(Expired):
            await r.control.heartbeat("a", beat("i1"))
        shown = await r.control.node("a")
        assert not shown.healthy
        assert "another node has this id, too" in shown.detail
        with pytest.raises(Expired):
            await r.control.heartbeat("a", beat("i1"))
        assert caplog.text.count("give one another id") == 1
        await r.control.register(api.NodeRegistration(id="a", incarnation="i1"))
        assert not (await r.control.node("a")).healthy
        r.clock.advance(61)
        await r.control.heartbeat("a", beat("i1"))
        assert (await r.control.node("a")).healthy


async def test_a_node_of_which_the_database_knows_the_past_only_is_no_second_one(tmp_path):
    async with running(tmp_path) as r:
        await r.control.register(api.NodeRegistration(id="a", incarnation="i1"))
        r.clock.advance(60)  # restored, or the old one is long dead
        with pytest.raises(Expired):
            await r.control.heartbeat("a", beat("i2"))
        await r.control.register(api.NodeRegistration(id="a", incarnation="i2"))
        assert (await r.control.node("a")).healthy


@pytest.mark.parametrize("stores", [("s", "s"), ("host",)])
async def test_stores_must_be_told_apart(place, stores):
    async with running(place) as r:
        with pytest.raises(Malformed, match="distinct"):
            await join(r.control, "a", stores=stores)


async def test_namespaces_are_kept_and_listed(place):
    async with running(place) as r:
        await join(r.control, "a")
        await r.control.report("a", report(0, host(keys(0)), namespaces=()))
        unknown = (await r.control.namespaces()).namespaces
        assert [n.document for n in unknown] == [None]
        await r.control.report("a", report(1, host(keys(1))))
        (known,) = (await r.control.namespaces()).namespaces
        assert known.digest == unknown[0].digest
        assert known.document is not None
        assert known.document["model"] == "tiny"
    async with running(place) as r:
        assert (await r.control.namespaces()).namespaces == [known]


async def test_a_node_that_is_away_for_long_is_forgotten(place):
    async with running(place) as r:
        for node in "ab":
            await join(r.control, node, stores=("mount",))
        await r.control.report("a", report(0, host(keys(9)), store("mount", keys(0, 1))))
        r.clock.advance(1000)
        await r.control.heartbeat("b", beat())
        assert r.state.cluster.forget_old(1001) == []
        r.clock.advance(2)
        assert r.state.cluster.forget_old(1001) == ["a"]
        with pytest.raises(Missing):
            await r.control.node("a")
        # What it found in the store that they share is the other's now.
        assert await held(r.control, keys(0, 1, 9)) == {"b": {"fs": 2}}
        clock = r.clock
    async with running(place, clock) as r:
        await r.control.heartbeat("b", beat())
        assert [n.id for n in (await r.control.nodes()).nodes] == ["b"]
        assert await held(r.control, keys(0, 1, 9)) == {"b": {"fs": 2}}
        # It may come back as if it were new.
        await join(r.control, "a", "i2")
        assert (await r.control.report("a", report(0, host(keys(9)), incarnation="i2"))).applied


async def test_a_server_that_has_just_started_forgets_nobody(place):
    async with running(place) as r:
        await join(r.control, "a")
        clock = r.clock
    clock.advance(5000)
    async with running(place, clock) as r:
        assert r.state.cluster.forget_old(1000) == []
        clock.advance(1001)
        assert r.state.cluster.forget_old(1000) == ["a"]
