"""Several servers on one PostgreSQL: what one is told the others know, and any of them may die."""

import asyncio
import contextlib
import signal
import time

import pytest
from replicas_kit import USE, Process, beat, told, two, until
from server_kit import NAMESPACE, TTL, TurnedClock, held, host, join, keys, report, running, store
from sqlalchemy import text

from kvstrata import api
from kvstrata.control import ControlPlane
from kvstrata.errors import Busy, Expired, KVStrataError, Missing
from kvstrata.testing import waiting
from kvstrata_server.placement.following import LOG_RETENTION
from kvstrata_server.sql.changes import TrimLog
from kvstrata_server.sql.database import Database


async def ask(server, chunk):
    return await server.control.lookup(api.LookupRequest(keys=keys(chunk)))


async def test_what_one_is_told_the_other_answers(postgres_address):
    async with two(postgres_address) as (first, second):
        await first.control.register(
            api.NodeRegistration(
                id="a", incarnation="i1", stores=[api.StoreRef(id="s", tier="fs")], version="1.2.3"
            )
        )
        await first.control.report("a", report(0, host(keys(0, 1)), store("s", keys(1, 2))))
        await first.control.heartbeat("a", beat())
        await told(first, second)
        assert await held(second.control, keys(0, 1, 2)) == {"a": {"host": 2, "fs": 2}}
        info = await second.control.node("a")
        assert (info.state, info.host, info.version) == (api.NodeState.UP, USE, "1.2.3")
        assert (await second.control.namespaces()).namespaces[0].document["model"] == "tiny"
        await first.control.report("a", report(1, host(removed=keys(0))))
        await first.control.report("a", report(2, host(keys(7)), snapshot="only"))
        await told(first, second)
        assert await held(second.control, keys(0, 1, 2, 7)) == {"a": {"host": 1}}
        await first.control.deregister("a")
        await told(first, second)
        assert (await second.control.node("a")).state is api.NodeState.GONE


async def test_a_database_that_can_not_be_read_is_seen_in_the_health(postgres_address, monkeypatch):
    async with two(postgres_address) as (first, _):
        read, database = first.state.database.rows, first.state.database

        async def rows(select):
            raise Busy("the database did not answer within 5 s: see /healthz")

        monkeypatch.setattr(database, "rows", rows)
        await waiting.until(lambda: first.state.health().status == "degraded")
        (sick,) = [task for task in first.state.health().tasks if not task.healthy]
        assert (sick.name, sick.detail) == (
            "database",
            "the database did not answer within 5 s: see /healthz",
        )
        monkeypatch.setattr(database, "rows", read)
        await waiting.until(lambda: first.state.health().status == "ok")
        assert first.state.health().restarts == 0


async def test_what_is_too_much_for_one_read_is_read_in_parts(postgres_address, monkeypatch):
    async with two(postgres_address) as (first, second):
        await join(first.control, "a")
        for n in range(60):
            await first.control.report("a", report(n, host(keys(n))))
        await first.state.writer.flushed(5)
        read, database = second.state.database.rows, second.state.database

        async def rows(select):
            """No more than 20 entries can be read in time."""
            found = await read(select)
            if len(found) > 20:
                raise Busy("the database did not answer")
            return found

        monkeypatch.setattr(database, "rows", rows)
        for _ in range(20):
            with contextlib.suppress(Busy):
                if not await second.state.follower.read():
                    break
        assert await held(second.control, keys(*range(60))) == {"a": {"host": 60}}


async def test_what_waited_long_for_sql_is_still_read_by_others(postgres_address):
    async with two(postgres_address) as (first, second):
        await join(first.control, "a")
        await told(first, second)
        may_write, write_batch = asyncio.Event(), first.state.writer.write_batch

        async def late():
            await may_write.wait()
            await write_batch()

        first.state.writer.write_batch = late
        await first.control.report("a", report(0, host(keys(0))))
        first.clock.advance(2 * LOG_RETENTION)
        may_write.set()
        await first.state.writer.flushed(5)

        async def trim(age):
            second.state.writer.put(TrimLog(age))
            await second.state.writer.flushed(5)

        await trim(LOG_RETENTION)
        await first.control.heartbeat("a", beat())
        await told(first, second)
        assert await held(second.control, keys(0)) == {"a": {"host": 1}}
        await trim(0.0)
        assert await second.state.database.rows(text("SELECT id FROM change_log")) == []


async def test_ages_are_known_to_all(postgres_address):
    async with two(postgres_address) as (first, second):
        await join(first.control, "a")
        await first.control.report("a", report(0, host(keys(0))))
        await told(first, second)
        second.clock.advance(TTL - 1)
        await first.control.heartbeat("a", beat())
        second.clock.advance(3)
        started = time.monotonic()
        await told(first, second)
        (age,) = [n.age for n in (await ask(second, 0)).nodes]
        assert 3 <= age <= 3 + time.monotonic() - started
        second.clock.advance(TTL)
        assert await held(second.control, keys(0)) == {}


async def test_who_fell_silent_while_sql_was_away_is_not_thought_to_be_up(postgres_address):
    async with two(postgres_address) as (first, second):
        for node in "ab":
            await join(first.control, node)
            await first.control.report(node, report(0, host(keys(0))))
        await told(first, second)
        may_write, write_batch = asyncio.Event(), first.state.writer.write_batch

        async def late():
            await may_write.wait()
            await write_batch()

        first.state.writer.write_batch = late
        await first.control.heartbeat("a", beat())
        first.state.follower.tell()
        waiting = first.state.writer.position
        first.clock.advance(TTL + 1)
        for _ in range(3):
            await first.control.heartbeat("b", beat())
            first.state.follower.tell()
        assert first.state.writer.position == waiting
        may_write.set()
        await told(first, second)
        assert [n.node for n in (await ask(second, 0)).nodes] == ["b"]


async def test_who_reads_late_knows_how_long_ago_nodes_were_heard(postgres_address):
    async with two(postgres_address) as (first, second):
        await join(first.control, "a")
        await first.control.report("a", report(0, host(keys(0))))
        await told(first, second)
        first.clock.advance(1)
        async with second.state.follower._reading:  # not before it has been there for a minute
            await first.control.heartbeat("a", beat())
            first.state.follower.tell()
            await first.state.writer.flushed(10)
            async with first.state.database.engine.begin() as connection:
                await connection.execute(text("UPDATE change_log SET time = time - 60"))
        await told(second)
        assert second.state.cluster.nodes["a"].last_seen <= first.clock() - 1


async def test_a_node_that_comes_over_just_goes_on(postgres_address):
    async with two(postgres_address) as (first, second):
        await join(first.control, "a")
        await first.control.report("a", report(0, host(keys(0))))
        await told(first, second)
        assert (await second.control.report("a", report(1, host(keys(1))))).applied
        await told(second, first)
        assert (await first.control.report("a", report(2, host(removed=keys(0))))).applied
        await told(first, second)
        for server in (first, second):
            assert await held(server.control, keys(0, 1)) == {"a": {"host": 1}}


async def test_a_node_that_comes_over_too_fast_is_asked_to_wait_then_for_a_snapshot(
    postgres_address,
):
    async with two(postgres_address) as (first, second):
        await join(first.control, "a")
        await told(first, second)
        # What the first was told here it takes to its grave.
        first.state.writer.put = lambda *writes: None
        await first.control.report("a", report(0, host(keys(0))))
        assert not (await second.control.heartbeat("a", beat(next_seq=1))).snapshot_wanted
        with pytest.raises(Busy, match="another server"):
            await second.control.report("a", report(1, host(keys(1))))
        second.clock.advance(3)
        reply = await second.control.report("a", report(1, host(keys(1))))
        assert (reply.applied, reply.snapshot_wanted) == (False, True)


async def test_late_words_of_one_do_not_undo_what_another_was_told(postgres_address):
    async with two(postgres_address) as (first, second):
        await join(first.control, "a")
        await told(first, second)
        late = []
        put = first.state.writer.put
        first.state.writer.put = lambda *writes: late.append(writes)
        await first.control.report("a", report(0, host(keys(0, 1))))
        await second.control.report("a", report(1, host(keys(1, 2)), snapshot="only"))
        await told(second)
        first.state.writer.put = put
        for writes in late:
            put(*writes)
        await told(first, second)
        for server in (first, second):
            reply = await server.control.lookup(api.LookupRequest(keys=keys(0, 1, 2), mode="all"))
            assert reply.nodes[0].keys == keys(1, 2)
        rows = await first.state.database.rows(
            text("SELECT c.namespace || c.chunk FROM placements p JOIN chunks c ON c.id = chunk_id")
        )
        assert sorted(row[0].hex() for row in rows) == keys(1, 2)


async def test_what_has_ended_is_not_ended_again_by_who_started_later(postgres_address):
    clock = TurnedClock()
    async with running(postgres_address, clock) as first:
        await join(first.control, "a")
        transfer = await first.control.create_transfer(
            api.TransferRequest(target="a", keys=keys(0), deadline=10)
        )
        eviction = await first.control.create_eviction(
            api.EvictionRequest(chunks=api.OfKeys(keys=keys(0)), nodes=["a"], deadline=10)
        )
        async with running(postgres_address, clock) as second:
            await first.control.progress(
                "a",
                api.Progress(
                    incarnation="i1",
                    transfer=transfer.id,
                    final=True,
                    outcomes={keys(0)[0]: api.Outcome.STORED},
                ),
            )
            dropped = api.EvictionResult(incarnation="i1", dropped={"host": 0})
            await first.control.eviction_result("a", eviction.id, dropped)
            clock.advance(11)
            second.state.transfers.expire()
            second.state.evictions.expire()
            await second.state.writer.flushed(10)
        async with running(postgres_address, clock) as third:
            ended = await third.control.get_transfer(transfer.id)
            assert (ended.state, ended.keys[0].outcome) == (
                api.TransferState.DONE,
                api.Outcome.STORED,
            )
            assert (await third.control.eviction(eviction.id)).state is api.EvictionState.DONE


async def test_a_new_incarnation_at_one_is_new_to_all(postgres_address):
    async with two(postgres_address) as (first, second):
        await join(first.control, "a", stores=("s",))
        await first.control.report("a", report(0, host(keys(0)), store("s", keys(1))))
        await told(first, second)
        await join(second.control, "a", "i2", stores=("s",))
        await told(second, first)
        assert await held(first.control, keys(0, 1)) == {"a": {"fs": 1}}
        with pytest.raises(Expired):
            await first.control.heartbeat("a", beat("i1"))


async def test_forgotten_nodes_are_forgotten_by_all_and_their_finds_inherited(postgres_address):
    async with two(postgres_address) as (first, second):
        for node in "ab":
            await join(first.control, node, stores=("mount",))
        await first.control.report("a", report(0, host(keys(9)), store("mount", keys(0, 1))))
        await told(first, second)
        first.clock.advance(3600)
        await first.control.heartbeat("b", beat())
        assert first.state.cluster.forget_old(1800) == ["a"]
        await told(first, second)
        for server in (first, second):
            with pytest.raises(Missing):
                await server.control.node("a")
            assert await held(server.control, keys(0, 1, 9)) == {"b": {"fs": 2}}
    async with running(postgres_address, first.clock) as later:
        assert set(later.state.cluster.nodes) == {"b"}
        await later.control.heartbeat("b", beat())
        assert await held(later.control, keys(0, 1, 9)) == {"b": {"fs": 2}}


async def test_who_could_not_read_for_long_loads_everything_again(postgres_address):
    async with two(postgres_address) as (first, second):
        await join(first.control, "a")
        await first.control.report("a", report(0, host(keys(0))))
        await first.state.writer.flushed(10)
        second.state.cluster.clear()
        second.state.follower.position = (
            await second.state.database.rows(text("SELECT max(id) FROM change_log"))
        )[0][0]
        second.state.follower._read_at = -1e9
        await second.state.follower.read()
        assert second.state.index.keys_at(second.state.places.location("a", None)) == [
            NAMESPACE.key(0, bytes(8))
        ]


async def test_what_could_not_be_loaded_again_is_tried_until_it_is(postgres_address, monkeypatch):
    async with two(postgres_address) as (first, second):
        await join(first.control, "a")
        await first.control.report("a", report(0, host(keys(0))))
        await told(first, second)
        follower, stream = second.state.follower, second.state.database.stream

        async def away(select):
            raise Busy("the database did not answer")
            yield

        async with follower._reading:
            monkeypatch.setattr(second.state.database, "stream", away)
            follower._read_at = -1e9
        for _ in range(3):
            with pytest.raises(Busy, match="did not answer"):
                await follower.read()
            # Nobody may change what is loaded only in part.
            with pytest.raises(Busy, match="loads"):
                await second.control.report("a", report(1, host(removed=keys(0))))
            with pytest.raises(Busy, match="loads"):
                await join(second.control, "a", "i2")
            assert (await second.http.get("/readyz")).status_code == 503
        monkeypatch.setattr(second.state.database, "stream", stream)
        await follower.read()

        async def ready() -> bool:
            return (await second.http.get("/readyz")).status_code == 200

        await until(ready, 30)  # its own loop may have failed meanwhile, too, and pause
        await second.control.heartbeat("a", beat())
        assert await held(second.control, keys(0)) == {"a": {"host": 1}}


async def test_a_node_may_register_while_another_server_loads(postgres_address, monkeypatch):
    clock, read = TurnedClock(), Database.rows
    async with running(postgres_address, clock) as first:
        await join(first.control, "a", stores=("s",))

        async def rows(database, select):
            found = await read(database, select)
            about = {table.name for table in select.get_final_froms()}
            if about <= {"nodes", "stores", "locations"}:
                await join(first.control, f"after-{about.pop()}", stores=(f"t{len(about)}", "s"))
                await first.state.writer.flushed(10)
            return found

        monkeypatch.setattr(Database, "rows", rows)
        async with running(postgres_address, clock) as second:
            monkeypatch.undo()
            await told(first, second)
            nodes = [f"after-{table}" for table in ("locations", "nodes", "stores")]
            assert sorted(second.state.cluster.nodes) == ["a", *nodes]
            for node in nodes:
                assert second.state.cluster.nodes[node].stores == {"s": "fs", "t0": "fs"}
                await second.control.report(node, report(0, host(keys(0))))


async def test_one_is_killed_and_the_other_has_it_all_within_two_seconds(postgres_address):
    first, second = Process(postgres_address), Process(postgres_address)
    try:
        async with ControlPlane(first.url) as one, ControlPlane(second.url) as other:
            await join(one, "a")
            for seq in range(20):
                await one.report("a", report(seq, host(keys(*range(100 * seq, 100 * seq + 100)))))
            whole = keys(*range(2000))

            async def agrees():
                return await held(other, whole) == {"a": {"host": 2000}}

            assert await until(agrees, 10) < 2.0
            # Killed in the middle of it: what was not written yet the node has to say again.
            for seq in range(20, 40):
                await one.report("a", report(seq, host(keys(*range(100 * seq, 100 * seq + 100)))))
            first.end(signal.SIGKILL)
            truth, seq = set(range(4000)), 40

            async def comes_over():
                nonlocal seq
                try:
                    reply = await other.report("a", report(seq, host(keys(4000))))
                    if reply.snapshot_wanted:
                        everything = host(keys(*sorted(truth)))
                        reply = await other.report("a", report(seq, everything, snapshot="only"))
                except KVStrataError:
                    return False
                seq = reply.next_seq
                return reply.applied

            await until(comes_over, 20)
            reply = await other.lookup(api.LookupRequest(keys=keys(*range(4000)), mode="all"))
            assert len(reply.nodes[0].keys) == 4000
    finally:
        for server in (first, second):
            if server.process.poll() is None:
                server.end()
    database = Database(postgres_address)
    rows = await database.rows(text("SELECT count(*) FROM placements"))
    await database.close()
    assert rows[0][0] in (4000, 4001)
