"""Drains as they are asked for, told and ended. What goes where is `test_emptying`'s."""

from __future__ import annotations

import pytest
from drain_kit import PLAIN, SHARING, Node, begin, by_hand, cluster, draining, settle, step
from server_kit import CHUNK_BYTES, TurnedClock, host, keys, report, running, store
from sqlalchemy import select

from kvstrata import api
from kvstrata.api import DrainState, LeftReason, NodeState, Outcome
from kvstrata.errors import Missing, PeerRefused
from kvstrata_server.access import tokens
from kvstrata_server.access.roles import Role
from kvstrata_server.draining.in_force import InForce
from kvstrata_server.sql.models import DrainRow

__all__ = ["by_hand"]

S = DrainState


# ------------------------------------------------------------ its way


async def test_from_its_beginning_to_the_word_that_the_node_may_be_stopped(place):
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


async def test_cancelled_the_node_serves_as_before(place):
    async with draining(place, PLAIN, host(keys(0))) as (r, a, b):
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


async def test_one_that_is_drained_may_serve_again(tmp_path):
    async with draining(tmp_path, PLAIN) as (r, a, _):
        assert (await r.control.drain_of("a")).may_stop
        assert (await r.control.node("a")).drain is S.DRAINED
        info = await r.control.cancel_drain("a")
        assert (info.state, info.in_force, info.may_stop) == (S.DRAINED, False, False)
        await a.beat()
        assert not a.draining


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


# ------------------------------------------------------------ its end


async def test_it_is_not_drained_before_the_node_has_said_all(tmp_path):
    async with cluster(tmp_path, *PLAIN) as (r, a, b):
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


async def test_a_node_that_takes_its_word_back_is_not_drained(tmp_path):
    """A server that had not heard of its drain had it take new chunks for a moment."""
    async with draining(tmp_path, PLAIN, host(keys(0))) as (r, a, b):
        await a.beat(settled=False)
        await b.pull()
        info = await step(r)
        assert (info.state, info.settled, info.remaining.chunks) == (S.DRAINING, False, 0)
        await a.beat()
        assert (await step(r)).may_stop
        await a.beat(settled=False)
        info = await r.control.drain_of("a")
        assert (info.state, info.settled, info.may_stop) == (S.DRAINED, False, False)
        assert "has not said" in info.detail
        await a.beat()
        assert (await r.control.drain_of("a")).may_stop


async def test_a_word_that_is_taken_back_while_it_is_acted_upon_is_waited_for(
    tmp_path, monkeypatch
):
    knows = InForce.knows_of_others

    async def slow(self, drain):
        await a.beat(settled=False)
        return await knows(self, drain)

    async with draining(tmp_path, PLAIN, host(keys(0))) as (r, a, b):
        await b.pull()
        with monkeypatch.context() as m:
            m.setattr(InForce, "knows_of_others", slow)
            assert (await step(r)).state is S.DRAINING
        await a.beat()
        assert (await step(r)).may_stop


async def test_a_node_whose_own_reports_have_a_gap_has_not_said_all(tmp_path):
    async with draining(tmp_path, PLAIN) as (r, a, _):
        assert (await r.control.drain_of("a")).may_stop
        lost = report(a.seq + 1, host([], keys(9)))
        assert (await r.control.report("a", lost)).snapshot_wanted
        await a.beat(next_seq=a.seq + 1)
        info = await r.control.drain_of("a")
        assert (info.settled, info.may_stop) == (False, False)
        a.seq += 2
        await a.report(host(keys(0)), snapshot="only")
        await a.beat()
        info = await r.control.drain_of("a")
        assert (info.settled, info.may_stop, info.remaining.chunks) == (True, False, 1)


async def test_its_deadline_ends_it_and_what_is_under_way(tmp_path):
    async with draining(tmp_path, PLAIN, host(keys(0, 1)), deadline=8) as (r, _, b):
        (pull,) = await b.told("pull")
        assert pull.deadline_in == 8
        r.clock.advance(8)
        info = await step(r)
        assert (info.state, info.remaining.chunks) == (S.PARTIAL, 2)
        assert info.left[0].why in (LeftReason.LATE, LeftReason.FAILED)
        assert (await r.control.get_transfer(pull.transfer)).state.ended


async def test_a_silent_node_is_waited_for_until_the_deadline(tmp_path):
    async with draining(tmp_path, PLAIN, host(keys(0)), deadline=100) as (r, a, b):
        r.clock.advance(50)
        await b.beat()
        assert (await step(r)).state is S.DRAINING
        assert (await r.control.node("a")).state is NodeState.SILENT
        await a.beat()
        await step(r)
        await b.pull()
        assert (await step(r)).state is S.DRAINED


async def test_what_was_safe_may_be_so_no_more(tmp_path):
    async with cluster(tmp_path, *PLAIN) as (r, a, b):
        for node in (a, b):
            await node.report(host(keys(0)))
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
async def test_a_node_that_starts_anew_ends_it_with_what_is_true(tmp_path, held, moved, state):
    async with draining(tmp_path, PLAIN, host(keys(*held))) as (r, _, b):
        if moved:
            await b.pull()
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
    async with draining(place, PLAIN, host(keys(0))) as (r, *_):
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


# ------------------------------------------------------------ who keeps a chunk safe


async def test_two_that_go_do_not_count_on_each_other(tmp_path):
    nodes = (("a", {"stores": ("nfs",)}), ("b", {"stores": ("nfs",)}), ("c", {}))
    async with cluster(tmp_path, *nodes) as (r, a, b, c):
        await a.report(host(keys(0)), store("nfs", keys(1)))
        await b.report(host(keys(0)))
        assert (await begin(r, "b")).remaining.chunks == 0
        assert (await begin(r, "a")).remaining.chunks == 2
        await settle(a, b)
        await step(r)
        assert (await r.control.drain_of("b")).remaining.chunks == 2
        moved = {*await c.pull(reports=False), *await c.pull(reports=False)}
        assert moved == set(keys(0, 1))
        await c.report(host(keys(0, 1)))
        for node in ("a", "b"):
            assert (await step(r, node)).state is S.DRAINED


async def test_a_node_whose_reports_have_a_gap_keeps_nothing_safe(tmp_path):
    async with cluster(tmp_path, *PLAIN) as (r, a, b):
        for node in (a, b):
            await node.report(host(keys(0)))
        await begin(r)
        await settle(a)
        lost = report(b.seq + 1, host([], keys(0)))
        assert (await r.control.report("b", lost)).snapshot_wanted
        assert (await step(r)).remaining.chunks == 1
        whole = report(b.seq + 2, host(keys(0)), snapshot="only")
        assert (await r.control.report("b", whole)).applied
        assert (await step(r)).may_stop


async def test_a_store_counts_only_at_nodes_that_can_read_it(tmp_path):
    held = host(keys(0)), store("nfs", keys(0))
    async with draining(tmp_path, SHARING, *held) as (r, _, b):
        assert (await r.control.drain_of("a")).may_stop
        await b.beat(healthy=False, detail="nfs hangs", ailing=["nfs"])
        info = await r.control.drain_of("a")
        assert (info.may_stop, info.remaining.chunks) == (False, 1)
        assert "drain again" in info.detail
        await b.report(host(keys(0)))  # its host memory is as good as ever
        assert (await r.control.drain_of("a")).may_stop
        await b.report(host(removed=keys(0)))
        await b.beat()
        assert (await r.control.drain_of("a")).may_stop


async def test_for_a_restart_what_is_in_a_store_in_trouble_is_moved(tmp_path):
    async with cluster(tmp_path, *SHARING) as (r, a, b):
        await a.report(host(keys(0, 1)), store("sa", keys(0)))
        await a.beat(healthy=False, detail="sa is gone", ailing=["sa", "nfs"])
        assert (await begin(r, for_="restart")).remaining.chunks == 2
        for _ in range(2):
            await a.beat(ailing=["sa", "nfs"])
        await step(r)
        assert await a.told("store") == []
        assert sorted(await b.pull()) == sorted(keys(0, 1))
        assert (await step(r)).may_stop
