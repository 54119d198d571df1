"""Drains of several servers on one database: they share them, and agree on what may be stopped."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

from drain_kit import Node, begin, by_hand, settle, step
from replicas_kit import told
from server_kit import TurnedClock, host, keys, running
from sqlalchemy import select

from kvstrata.api import DrainState
from kvstrata.errors import Busy
from kvstrata_server.draining.in_force import InForce
from kvstrata_server.sql.models import DrainRow

__all__ = ["by_hand"]

S = DrainState


@asynccontextmanager
async def two_servers(address, clock, *both):
    """That know of the nodes `a`, which talks to the first, and `b`, which talks to the second, and
    of chunks that both of these have. Each has read of drains just now."""
    async with running(address, clock) as first, running(address, clock) as second:
        a, b = await Node(first, "a").join(), await Node(second, "b").join()
        for node in (a, b):
            await node.report(host(keys(*both)))
        await told(first, second)
        for server in (first, second):
            await server.state.drains.advance()
        yield first, second, a, b


async def test_the_one_that_the_node_talks_to_does_the_work_and_any_tells_and_cancels(
    postgres_address,
):
    clock = TurnedClock()
    async with two_servers(postgres_address, clock) as (first, second, a, b):
        await a.report(host(keys(0, 1)))
        await told(first, second)
        made = await begin(second)  # to which it doesn't talk
        clock.advance(1)
        await first.state.drains.advance()
        assert (await first.control.node("a")).drain is S.DRAINING
        await settle(a)
        assert a.draining
        await second.state.drains.advance()
        assert await b.told("pull") == []  # not its business
        await first.state.drains.advance()
        await told(first, second)
        assert sorted(await b.pull()) == sorted(keys(0, 1))
        await told(first, second)
        clock.advance(1)
        await b.beat(healthy=False, ailing=["sb"])
        await told(first, second)
        assert first.state.cluster.nodes["b"].ailing == ["sb"]
        # The first dies; the node comes to the second, which goes on.
        a.r = second
        clock.advance(2)
        await a.beat()
        await a.report()
        await a.beat()
        info = await step(second)
        assert (info.id, info.state, info.may_stop) == (made.id, S.DRAINED, True)
        clock.advance(1)
        assert (await step(first)).may_stop
        assert (await first.control.cancel_drain("a")).in_force is False
        clock.advance(1)
        assert (await step(second)).in_force is False
        await a.beat()
        assert not a.draining


async def test_two_nodes_that_go_at_two_servers_do_not_count_on_each_other(postgres_address):
    clock = TurnedClock()
    async with two_servers(postgres_address, clock, 0, 1) as (first, second, a, b):
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
            m.setattr(InForce, "refresh", unread)
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
    rows = InForce._rows

    async def slow(self, *args, **more):
        found = await rows(self, *args, **more)
        read.set()
        await cancelled.wait()
        return found

    async with two_servers(postgres_address, TurnedClock()) as (first, _, a, _b):
        await begin(first)
        monkeypatch.setattr(InForce, "_rows", slow)
        reading = asyncio.create_task(first.state.drains._in_force.refresh(at_once=True))
        await read.wait()
        await first.control.cancel_drain("a")
        cancelled.set()
        await reading
        await a.beat()
        assert not a.draining


async def test_a_server_that_can_not_read_of_other_drains_calls_no_node_drained(
    postgres_address, monkeypatch
):
    async def away(self, *args, **more):
        raise Busy("the database is away")

    async with two_servers(postgres_address, TurnedClock(), 0) as (first, _, a, _b):
        await begin(first)
        await settle(a)
        with monkeypatch.context() as m:
            m.setattr(InForce, "_rows", away)
            assert (await step(first)).state is S.DRAINING
        assert (await step(first)).may_stop
        monkeypatch.setattr(InForce, "_rows", away)
        info = await first.control.drain_of("a")
        assert (info.state, info.may_stop) == (S.DRAINED, False)
        assert "can't be read" in info.detail


async def test_a_server_that_can_not_read_of_drains_opens_no_node_that_settled(
    postgres_address, monkeypatch
):
    async def away(*args, **more):
        raise Busy("the database is away")

    clock = TurnedClock()
    async with two_servers(postgres_address, clock) as (first, second, a, _):
        with monkeypatch.context() as m:
            m.setattr(second.state.drains._in_force, "_rows", away)
            await begin(first)
            await settle(a)
            assert (await step(first)).may_stop
            clock.advance(6)
            await second.state.drains.advance()
            a.r = second
            await a.beat()
            assert a.draining
        await first.control.cancel_drain("a")
        await second.state.drains.advance()
        clock.advance(1)
        await second.state.drains.advance()
        await a.beat()
        assert not a.draining


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
