import asyncio
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from replicas_kit import told as heard
from replicas_kit import two
from server_kit import CHUNK_BYTES, NAMESPACE, host, join, report, running, store

from kvstrata import api
from kvstrata.errors import Busy
from kvstrata_server.scheduling import evictions
from kvstrata_server.tenancy.shedding import split
from kvstrata_server.tenancy.usage import Medium, Share

ACME, OTHER = replace(NAMESPACE, tenant="acme"), replace(NAMESPACE, tenant="other")
DOCUMENTS = tuple(n.document.decode() for n in (ACME, OTHER))
SIZES = {ACME.digest.hex() + "00000000": CHUNK_BYTES}
USE = api.HostUse(used_bytes=0, capacity_bytes=0, chunks=0)


def names(count, namespace=ACME):
    return [namespace.key(0, n.to_bytes(8, "big")).hex() for n in range(count)]


async def put(r, node, seq, **chunks):
    """So many of acme's at each location; and one of another tenant, which is to stay."""
    changes = [
        (host if location == "host" else lambda added, s=location: store(s, added))(
            [*names(count), *names(1, OTHER)]
        )
        for location, count in chunks.items()
    ]
    await r.control.report(node, report(seq, *changes, namespaces=DOCUMENTS))


async def look(r, seconds=1.0):
    """Some time passes, in which nodes are heard, and it is counted and acted upon."""
    r.clock.advance(seconds)
    while (
        r.state.database.shared and await r.state.follower.read()
    ):  # who has not read for long asks for nothing
        pass
    for node in r.state.cluster.up():
        beat = api.HeartbeatRequest(incarnation=node.incarnation, host=USE)
        await r.control.heartbeat(node.id, beat)
    await r.state.usage.refresh()
    await r.state.shedding.look()


async def told(r, node):
    return (await r.control.commands(node, "i1")).commands


async def say(r, node, command, chunks, reported=False):
    """The node dropped the first so many of what it holds in memory."""
    result = api.EvictionResult(incarnation="i1", dropped={"host": chunks}, reported=reported)
    await r.control.eviction_result(node, command.transfer, result)


async def limit(r, chunks):
    await r.control.put_quota("acme", api.QuotaRequest(max_bytes=chunks * CHUNK_BYTES))


_shares = st.dictionaries(
    st.integers(0, 9).map(lambda n: Medium(node=f"n{n}") if n % 2 else Medium(store=f"s{n}")),
    st.tuples(st.integers(1, 50), st.integers(1, 4)).map(
        lambda each: Share(each[0] * each[1] * 100, each[0], {})
    ),
    min_size=1,
)


@given(_shares, st.integers(1, 30_000))
def test_the_excess_is_shared_out_by_what_each_place_holds(shares, excess):
    held = sum(share.nbytes for share in shares.values())
    excess = min(excess, held)
    parts = split(excess, shares)
    largest = max(share.nbytes // share.chunks for share in shares.values())
    assert excess <= sum(parts.values()) < excess + largest
    for medium, part in parts.items():
        share = shares[medium]
        assert 0 < part <= share.nbytes
        fair = excess * share.nbytes / held
        assert part < fair + share.nbytes / share.chunks + 1
    assert parts == split(excess, dict(reversed(list(shares.items()))))


async def test_each_place_gives_up_its_part_until_95_percent(place):
    async with running(place) as r:
        await join(r.control, "a", stores=("sa",))
        await join(r.control, "b")
        await put(r, "a", 0, host=40, sa=40)
        await put(r, "b", 0, host=20)
        await limit(r, 100)
        await look(r)
        assert await told(r, "a") == []
        await limit(r, 80)
        await look(r)
        # 100 are held, 76 are aimed at.
        (asked,) = await told(r, "a")
        assert (asked.kind, asked.keys, asked.sizes) == ("shed", [], SIZES)
        assert asked.amounts == {"host": 10 * CHUNK_BYTES, "sa": 10 * CHUNK_BYTES}
        assert asked.deadline_in == 30
        (of_b,) = await told(r, "b")
        assert of_b.amounts == {"host": 4 * CHUNK_BYTES}
        assert (await r.control.quota("acme")).eviction == asked.transfer == of_b.transfer


async def test_nothing_more_is_asked_while_one_runs_and_just_after(tmp_path):
    async with running(tmp_path) as r:
        await join(r.control, "a")
        await put(r, "a", 0, host=100)
        await limit(r, 90)
        await look(r)
        (asked,) = await told(r, "a")
        assert asked.amounts == {"host": 15 * CHUNK_BYTES}
        await look(r)
        assert await told(r, "a") == []
        await say(r, "a", asked, 5)  # it could not do more
        await look(r)
        await look(r)
        assert await told(r, "a") == []
        await r.control.report("a", report(1, host(removed=names(5))))
        await look(r, 2)
        (again,) = await told(r, "a")
        assert again.amounts == {"host": 10 * CHUNK_BYTES}
        await say(r, "a", again, 10)
        await r.control.report("a", report(2, host(removed=names(15))))
        for _ in range(4):
            await look(r, 2)
        assert await told(r, "a") == []  # 85 of 90
        assert (await r.control.quota("acme")).eviction is None


async def test_where_nothing_could_go_it_asks_less_and_less_often(tmp_path):
    async with running(tmp_path) as r:
        await join(r.control, "a")
        await put(r, "a", 0, host=10)
        await limit(r, 5)
        times = []
        for _ in range(60):
            await look(r)
            for command in await told(r, "a"):
                times.append(r.clock())
                await say(r, "a", command, 0)
        waits = [b - a for a, b in pairwise(times)]
        assert len(waits) >= 3
        assert all(2 * a <= b + 2 for a, b in pairwise(waits)), waits
        await limit(r, 100)
        await look(r)
        await limit(r, 5)
        await look(r)
        assert len(await told(r, "a")) == 1  # it was well meanwhile


async def test_what_is_gone_is_not_asked_for_again_though_reports_are_late(tmp_path):
    async with running(tmp_path) as r:
        for node in "ab":
            await join(r.control, node)
            await put(r, node, 0, host=50)
        await limit(r, 50)
        await look(r)
        for node, reported in (("a", False), ("b", True)):
            (asked,) = await told(r, node)
            await say(r, node, asked, 20, reported)
        await r.control.report("b", report(1, host(removed=names(20))))
        for _ in range(20):
            await look(r, 5)
            assert await told(r, "a") == await told(r, "b") == []
        await r.control.report("a", report(1, host(removed=names(20))))
        await look(r)
        for node in "ab":
            (asked,) = await told(r, node)
            assert asked.amounts["host"] in (6 * CHUNK_BYTES, 7 * CHUNK_BYTES)
            await say(r, node, asked, 1, reported=True)
            await r.control.report(node, report(2, host(removed=names(21)[20:])))
        await look(r)
        await look(r, 2)
        assert [c.kind for c in await told(r, "a")] == ["shed"]


async def test_where_reports_never_come_it_asks_again_in_the_end(tmp_path):
    async with running(tmp_path) as r:
        await join(r.control, "a")
        await put(r, "a", 0, host=10)
        await limit(r, 5)
        await look(r)
        (asked,) = await told(r, "a")
        await say(r, "a", asked, 6)
        times = [r.clock()]
        for _ in range(140):
            await look(r)
            times += [r.clock() for _ in await told(r, "a")]
        assert 120 <= times[1] - times[0] <= 123


async def test_what_became_of_one_is_asked_until_it_is_known(tmp_path, monkeypatch):
    async with running(tmp_path) as r:
        await join(r.control, "a")
        await put(r, "a", 0, host=10)
        await limit(r, 5)
        await look(r)
        (asked,) = await told(r, "a")
        await say(r, "a", asked, 3)
        with monkeypatch.context() as patch:

            async def away(eviction):
                raise Busy("the database did not answer in 5 seconds")

            patch.setattr(r.state.evictions, "kept", away)
            for _ in range(10):
                await look(r)
                assert await told(r, "a") == []
        await r.control.report("a", report(1, host(removed=names(3))))
        times = [r.clock()]
        for _ in range(5):
            await look(r)
            times += [r.clock() for _ in await told(r, "a")]
        assert len(times) == 2
        assert times[1] - times[0] <= 4  # and not as where nothing was dropped


async def test_of_a_shared_store_one_node_is_asked(tmp_path):
    async with running(tmp_path) as r:
        for node in ("b", "a", "c"):
            await join(r.control, node, stores=("mount",))
            await put(r, node, 0, mount=20)
        await r.control.heartbeat(
            "a", api.HeartbeatRequest(incarnation="i1", host=USE, healthy=False, detail="EIO")
        )
        await limit(r, 10)
        r.clock.advance(1)
        await r.state.usage.refresh()
        assert r.state.usage.of("acme").chunks == 20
        await r.state.shedding.look()
        (asked,) = await told(r, "b")
        assert asked.amounts == {"mount": 11 * CHUNK_BYTES}
        assert await told(r, "a") == await told(r, "c") == []


async def test_it_goes_on_after_a_restart_and_is_not_asked_twice(tmp_path):
    async with running(tmp_path) as r:
        await join(r.control, "a")
        await put(r, "a", 0, host=10)
        await limit(r, 5)
        await look(r)
        clock = r.clock
    async with running(tmp_path, clock) as r:
        await join(r.control, "a")
        await look(r)
        (asked,) = await told(r, "a")
        assert (asked.kind, asked.amounts, asked.sizes) == (
            "shed",
            {"host": 6 * CHUNK_BYTES},
            SIZES,
        )
        await say(r, "a", asked, 6)
        await r.control.report("a", report(1, host(removed=names(6))))
        await look(r, 3)
        assert await told(r, "a") == []


async def test_each_server_asks_the_nodes_that_talk_to_it(postgres_address):
    async with two(postgres_address) as (first, second):
        await join(first.control, "a")
        await put(first, "a", 0, host=10)
        await join(second.control, "b")
        await put(second, "b", 0, host=10)
        await limit(first, 10)
        await second.state.quotas.load()
        await heard(first, second)
        first.clock.advance(1)
        for server in (first, second):
            await server.state.usage.refresh()
            assert server.state.usage.of("acme").chunks == 20
            await server.state.shedding.look()
        await heard(first, second)
        commands = {n: await told(r, n) for n, r in (("a", first), ("b", second))}
        amounts = {node: [c.amounts["host"] for c in asked] for node, asked in commands.items()}
        assert {node: len(asked) for node, asked in amounts.items()} == {"a": 1, "b": 1}
        assert sum(sum(asked) for asked in amounts.values()) == 11 * CHUNK_BYTES
        for server in (first, second):
            assert len(server.state.evictions.sheds_of("acme")) == 2


async def test_after_a_restart_too_where_nodes_have_nothing_to_report(postgres_address):
    async with running(postgres_address) as r:
        for node in ("a", "b"):
            await join(r.control, node)
            await put(r, node, 0, host=10)
    async with two(postgres_address) as (first, second):
        for node, server in (("a", first), ("b", second), ("b", first), ("b", second)):
            first.clock.advance(1)
            beat = api.HeartbeatRequest(incarnation="i1", host=USE, next_seq=1)
            await server.control.heartbeat(node, beat)
            await heard(first, second)
        await limit(first, 10)
        await second.state.quotas.load()
        first.clock.advance(1)
        for server in (first, second):
            await server.state.usage.refresh()
            await server.state.shedding.look()
        await heard(first, second)
        for node, server in (("a", first), ("b", second)):
            assert [c.kind for c in await told(server, node)] == ["shed"]


@pytest.mark.parametrize("chunks", [0, 3])
async def test_a_tenant_may_be_allowed_little_or_nothing(tmp_path, chunks):
    async with running(tmp_path) as r:
        await join(r.control, "a")
        await put(r, "a", 0, host=4)
        await limit(r, chunks)
        await look(r)
        (asked,) = await told(r, "a")
        assert asked.amounts == {"host": (4 if chunks == 0 else 2) * CHUNK_BYTES}


async def test_what_sql_takes_late_is_not_asked_for_again_meanwhile(tmp_path, monkeypatch):
    monkeypatch.setattr(evictions, "_COMMIT_TIMEOUT", 0.01)
    async with running(tmp_path) as r:
        await join(r.control, "a")
        await put(r, "a", 0, host=10)
        await limit(r, 5)
        write_batch, go_on = r.state.writer.write_batch, asyncio.Event()

        async def slow():
            await go_on.wait()
            await write_batch()

        monkeypatch.setattr(r.state.writer, "write_batch", slow)
        for _ in range(4):
            await look(r, 3)
        go_on.set()
        await r.state.writer.flushed(10)
        r.state.evictions.settle()
        await look(r)
        (asked,) = await told(r, "a")
        assert asked.amounts == {"host": 6 * CHUNK_BYTES}
        await say(r, "a", asked, 6)
        for _ in range(4):
            await look(r, 3)
        assert await told(r, "a") == []


async def look_at(r, node, seconds):
    """Some time passes, and this server, which is told by one node, counts and acts."""
    r.clock.advance(seconds)
    await r.control.heartbeat(node, api.HeartbeatRequest(incarnation="i1", host=USE))
    await r.state.usage.refresh()
    await r.state.shedding.look()


async def over_by_half(first, second):
    """Each server has asked its node for its part of what is too much, and neither was told."""
    for server, node, count in ((first, "a", 60), (second, "b", 40)):
        await join(server.control, node)
        await put(server, node, 0, host=count)
    await limit(first, 50)
    await second.state.quotas.load()
    await heard(first, second)
    for server, node in ((first, "a"), (second, "b")):
        await look_at(server, node, 0.5)
    await heard(first, second)
    (of_a,), (of_b,) = await told(first, "a"), await told(second, "b")
    assert (of_a.amounts, of_b.amounts) == (
        {"host": 32 * CHUNK_BYTES},
        {"host": 21 * CHUNK_BYTES},
    )
    return of_a, of_b


async def give_up(server, node, command, chunks):
    await server.control.report(node, report(1, host(removed=names(chunks))))
    await say(server, node, command, chunks, reported=True)


async def test_who_reads_late_what_others_were_told_asks_for_nothing(postgres_address):
    async with two(postgres_address) as (first, second):
        of_a, of_b = await over_by_half(first, second)
        async with second.state.follower._reading:
            await give_up(first, "a", of_a, 32)
            await give_up(second, "b", of_b, 21)
            for _ in range(2):
                await look_at(second, "b", 3)
                assert second.state.usage.of("acme").chunks == 79
                assert await told(second, "b") == []
        for _ in range(4):
            await look_at(first, "a", 3)
            await heard(first, second)
            await look_at(second, "b", 1)
            assert await told(second, "b") == []


async def test_what_others_ask_for_is_waited_for_before_more_is(postgres_address):
    async with two(postgres_address) as (first, second):
        of_a, of_b = await over_by_half(first, second)
        may_write, write_batch = asyncio.Event(), first.state.writer.write_batch

        async def late():
            await may_write.wait()
            await write_batch()

        first.state.writer.write_batch = late
        # One that is under way may come before.
        first.state.follower.tell()
        giving = asyncio.create_task(give_up(first, "a", of_a, 32))
        await give_up(second, "b", of_b, 21)
        for _ in range(3):
            await heard(second)
            await look_at(second, "b", 3)
            assert await told(second, "b") == []
        may_write.set()
        await giving
        for _ in range(4):
            await look_at(first, "a", 3)
            await heard(first, second)
            await look_at(second, "b", 1)
            assert await told(second, "b") == []
        await put(second, "b", 2, host=40)
        await heard(first, second)
        await look_at(second, "b", 1)
        (again,) = await told(second, "b")
        assert again.amounts["host"] == 13 * CHUNK_BYTES  # of 21, as b has 40 of 68
