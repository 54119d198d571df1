"""Servers on one PostgreSQL share transfers, prefetches, leases and evictions: any may do all."""

import asyncio
import random
import signal

import pytest
from replicas_kit import Process, told, two, until
from server_kit import host, join, keys, report, running

from kvstrata import api
from kvstrata.api import EvictionState, Outcome, TransferState
from kvstrata.control import ControlPlane
from kvstrata.errors import Expired, KVStrataError, Missing, PeerRefused

S = TransferState


async def pair(first, *others):
    """`a` holds chunks 0 to 9; `b` is the target."""
    await join(first.control, "a")
    await join(first.control, "b")
    await first.control.report("a", report(0, host(keys(*range(10)))))
    await told(first, *others)


def asked(*numbers, **more):
    return api.TransferRequest(target="b", keys=keys(*numbers), **more)


def progress(transfer, final=False, **more):
    return api.Progress(**({"incarnation": "i1", "transfer": transfer, "final": final} | more))


def all_of(outcome, *numbers):
    return dict.fromkeys(keys(*numbers), outcome)


async def commands(server, node="b", incarnation="i1"):
    return [
        (c.kind, c.transfer) for c in (await server.control.commands(node, incarnation)).commands
    ]


async def outcomes(server, transfer):
    return [key.outcome for key in (await server.control.get_transfer(transfer)).keys]


async def test_made_at_one_handed_out_and_done_at_another(postgres_address):
    async with two(postgres_address) as (first, second):
        await pair(first, second)
        made = await first.control.create_transfer(asked(0, 1, hold=30))
        await told(second)
        assert await commands(second) == [("pull", made.id)]
        # What one was told is asked of the other at once.
        said = progress(made.id, outcomes=all_of("stored", 0), sources={keys(0)[0]: "a"}, bytes=10)
        assert (await second.control.progress("b", said)).state is S.RUNNING
        await second.state.writer.flushed(10)
        shown = await first.control.get_transfer(made.id)
        assert (shown.state, shown.bytes) == (S.RUNNING, 10)
        assert [(k.outcome, k.source) for k in shown.keys] == [("stored", "a"), ("pending", None)]
        await told(first)
        assert await commands(first) == []  # it is taken
        # The target goes back, and tells the rest only.
        said = progress(made.id, final=True, outcomes=all_of("present", 1), bytes=30)
        assert (await first.control.progress("b", said)).state is S.DONE
        for server in (first, second):
            shown = await server.control.get_transfer(made.id)
            assert (shown.state, shown.bytes, shown.counts) == (
                S.DONE,
                30,
                {Outcome.STORED: 1, Outcome.PRESENT: 1},
            )
            (listed,) = (await server.control.transfers()).transfers
            assert listed == api.TransferSummary(**shown.model_dump(exclude={"keys"}))
        await told(first, second)
        assert [server.state.transfers.active for server in (first, second)] == [0, 0]
        assert await commands(first) == await commands(second) == []


async def test_what_one_made_another_cancels(postgres_address):
    async with two(postgres_address) as (first, second):
        await pair(first, second)
        made = await first.control.create_transfer(asked(0, 1))
        assert await commands(first) == [("pull", made.id)]
        # Before the second has heard of it.
        cancelled = await second.control.cancel_transfer(made.id)
        assert (cancelled.state, cancelled.counts) == (S.CANCELLED, {Outcome.CANCELLED: 2})
        assert (await first.control.get_transfer(made.id)).state is S.CANCELLED
        await told(first, second)
        # Whichever the target asks next tells it, until it answers that one.
        for server in (first, second):
            assert await commands(server) == [("cancel", made.id)]
            reply = await server.control.progress("b", progress(made.id, final=True))
            assert reply.state is S.CANCELLED
            server.clock.advance(6)
            assert await commands(server) == []
        assert await outcomes(first, made.id) == [Outcome.CANCELLED] * 2


async def test_progress_here_and_the_end_there_lose_no_outcome(postgres_address):
    async with two(postgres_address) as (first, second):
        await pair(first, second)
        made = await first.control.create_transfer(asked(0, 1, 2))
        await told(second)
        await first.control.progress("b", progress(made.id, outcomes=all_of("stored", 0)))
        await first.state.writer.flushed(10)  # and the second has not read it
        said = progress(made.id, final=True, outcomes=all_of("corrupt", 1))
        assert (await second.control.progress("b", said)).state is S.PARTIAL
        for server in (first, second):
            assert await outcomes(server, made.id) == ["stored", "corrupt", "failed"]


async def test_one_key_makes_one_transfer_however_many_are_asked(postgres_address):
    async with two(postgres_address, transfers_per_link=8) as servers:
        await pair(*servers)
        for n in range(5):
            made = await asyncio.gather(
                *(s.control.create_transfer(asked(n), f"k{n}") for s in servers * 2)
            )
            assert len({each.id for each in made}) == 1
            for server in servers:
                again = await server.control.create_transfer(asked(n), f"k{n}")
                assert again.id == made[0].id
                with pytest.raises(PeerRefused, match="another key"):
                    await server.control.create_transfer(asked(9), f"k{n}")
        differ = await asyncio.gather(
            *(s.control.create_transfer(asked(i), "other") for i, s in enumerate(servers)),
            return_exceptions=True,
        )
        assert {type(each) for each in differ} == {api.TransferInfo, PeerRefused}
        await told(*servers)
        assert [len((await s.control.transfers()).transfers) for s in servers] == [6, 6]
        handed = [set(await commands(s)) for s in servers]
        assert handed[0] == handed[1]
        assert len(handed[0]) == 6


async def test_a_retry_waits_for_what_it_repeats_and_is_not_held_against_a_quota(postgres_address):
    async with two(postgres_address) as (first, second):
        await pair(first, second)
        asked_of = []

        class Counting:
            def budget(self, keys, byte_budget):
                asked_of.append(keys)
                return byte_budget

            def admit(self, transfer, planned, byte_budget):
                pass

        create = first.state.transfers.create
        both = await asyncio.gather(*(create(asked(0), "k", Counting()) for _ in range(3)))
        assert len({made.id for made in both}) == len(asked_of) == 1
        assert first.state.transfers.active == 1
        await told(first, second)
        first.state.transfers.sweep()
        assert (await create(asked(0), "k", Counting())).id == both[0].id
        assert not first.state.transfers._records._by_key


async def test_a_retry_after_the_end_makes_no_second_one(postgres_address):
    async with two(postgres_address) as (first, second):
        await pair(first, second)
        made = await first.control.create_transfer(asked(0), "k")
        said = progress(made.id, final=True, outcomes=all_of("stored", 0))
        await second.control.progress("b", said)
        again = await second.control.create_transfer(asked(0), "k")
        assert (again.id, again.state) == (made.id, S.DONE)


async def test_the_deadline_is_everyones(postgres_address):
    async with two(postgres_address) as (first, second):
        await pair(first, second)
        made = await first.control.create_transfer(asked(0, deadline=10))
        await told(second)
        assert await commands(second) == [("pull", made.id)]
        first.clock.advance(10)
        for server in (second, first):
            assert (await server.control.get_transfer(made.id)).state is S.EXPIRED
        await told(first, second)
        for server in (first, second):
            assert await commands(server) == [("cancel", made.id)]
        ended = await first.control.get_transfer(made.id)
        assert ended.ended == first.clock()
        assert ended.detail.startswith("its deadline passed before its target took it")
        text = [(await s.http.get("/metrics")).text for s in (first, second)]
        counted = [t.count('kvstrata_transfers_total{state="expired"} 1.0') for t in text]
        assert sum(counted) == 1


async def test_a_lease_made_at_one_is_released_at_another_and_stays_so(postgres_address):
    async with two(postgres_address) as (first, second):
        await pair(first, second)
        body = {"node": "b", "keys": keys(0), "ttl": 600}
        made = (await first.http.post("/v1/leases", json=body)).json()
        await told(second)
        assert await commands(second) == [("pull", made["id"])]
        done = progress(made["id"], final=True, outcomes=all_of("present", 0))
        await second.control.progress("b", done)
        at = f"/v1/leases/{made['id']}"
        for server in (first, second):
            assert (await server.http.get(at)).json()["state"] == "held"
        assert (await second.http.delete(at)).json()["state"] == "ended"
        assert (await first.http.get(at)).json()["state"] == "ended"
        await told(first, second)
        assert await commands(first) == [("cancel", made["id"])]
        # And who starts later knows of it: the target may not have been told.
        async with running(postgres_address, first.clock) as third:
            assert (await third.http.get(at)).json()["state"] == "ended"
            assert (await third.control.get_transfer(made["id"])).state is S.DONE
            assert await commands(third) == [("cancel", made["id"])]


async def test_a_node_may_go_to_any_server_the_moment_it_registered_at_one(postgres_address):
    async with two(postgres_address) as (first, second):
        for incarnation in ("i1", "i2"):
            await join(first.control, "b", incarnation)
            assert await commands(second, incarnation=incarnation) == []
            await join(first.control, "a", incarnation)
            reply = await second.control.report(
                "a", report(0, host(keys(0)), incarnation=incarnation)
            )
            assert reply.applied
        with pytest.raises(Expired):
            await commands(second, incarnation="i1")


async def test_bounds_count_what_others_handed_out(postgres_address):
    async with two(postgres_address, transfers_per_node=3, transfers_per_link=1) as (first, second):
        await pair(first, second)
        await join(first.control, "c")
        await first.control.report("c", report(0, host(keys(*range(10)))))
        made = []
        for n, source in enumerate("aac"):
            made.append((await first.control.create_transfer(asked(n, source=source))).id)
            first.clock.advance(0.01)
        await told(first, second)
        handed = await commands(first)
        assert handed == [("pull", made[0]), ("pull", made[2])]
        for _, transfer in handed:
            await first.control.progress("b", progress(transfer))
        await told(first, second)
        assert await commands(second) == []  # the links are busy
        await second.control.progress("b", progress(made[0], final=True))
        assert await commands(second) == [("pull", made[1])]


async def test_an_eviction_made_at_one_is_carried_out_at_another(postgres_address):
    async with two(postgres_address) as (first, second):
        await pair(first, second)
        request = api.EvictionRequest(chunks=api.OfKeys(keys=keys(0)), nodes=["a", "b"])
        made = await first.control.create_eviction(request)
        late = await first.control.create_eviction(
            api.EvictionRequest(chunks=api.OfKeys(keys=keys(1)), nodes=["a"], deadline=5)
        )
        await told(second)
        assert await commands(second, "a") == [("evict", made.id), ("evict", late.id)]
        # Both at once, each at another server: no answer is lost.
        answers = await asyncio.gather(
            *(
                server.control.eviction_result(
                    node, made.id, api.EvictionResult(incarnation="i1", dropped={"host": n})
                )
                for n, (server, node) in enumerate([(first, "a"), (second, "b")])
            )
        )
        assert EvictionState.DONE in {answer.state for answer in answers}
        for server in (first, second):
            shown = await server.control.eviction(made.id)
            assert shown.state is EvictionState.DONE
            assert [n.dropped for n in shown.nodes] == [{"host": 0}, {"host": 1}]
        await told(first, second)
        assert await commands(first, "a") == [("evict", late.id)]
        assert await commands(first, "b") == []
        first.clock.advance(5)
        for server in (first, second):
            assert (await server.control.eviction(late.id)).state is EvictionState.EXPIRED
            with pytest.raises(Missing, match="does not ask node 'b'"):
                await server.control.eviction_result(
                    "b", late.id, api.EvictionResult(incarnation="i1", dropped={})
                )


async def test_who_could_not_read_for_long_learns_of_all_work(postgres_address):
    async with two(postgres_address) as (first, second):
        await pair(first, second)
        over, stays = [await first.control.create_transfer(asked(n)) for n in (0, 1)]
        await told(second)
        assert second.state.transfers.active == 2
        await first.control.cancel_transfer(over.id)
        new = await first.control.create_transfer(asked(2))
        request = api.EvictionRequest(chunks=api.OfKeys(keys=keys(0)), nodes=["b"])
        eviction = await first.control.create_eviction(request)
        # As if the entries of that had been dropped meanwhile.
        await second.state.follower.begin()
        second.state.follower._read_at = -1e9
        await second.state.follower.read()
        assert second.state.transfers.active == 2
        assert set(await commands(second)) == {
            ("cancel", over.id),
            ("pull", stays.id),
            ("pull", new.id),
            ("evict", eviction.id),
        }


@pytest.mark.parametrize("seed", range(3))
async def test_of_two_ends_at_once_one_counts_and_all_agree(postgres_address, seed):
    """Each transfer is ended in two ways at once, at either server."""
    choice = random.Random(seed)
    async with two(postgres_address) as servers:
        await pair(*servers)
        made = [
            (await choice.choice(servers).control.create_transfer(asked(n, deadline=30))).id
            for n in range(8)
        ]
        if choice.random() < 0.7:
            await told(*servers)

        async def act(transfer, number, how, server):
            for _ in range(choice.randrange(3)):
                await asyncio.sleep(0)
            if how == "cancel":
                return (await server.control.cancel_transfer(transfer)).state
            if how == "expire":
                server.state.transfers.expire()
                return None
            said = progress(transfer, final=True, outcomes=all_of(how, number))
            return (await server.control.progress("b", said)).state

        if choice.random() < 0.3:
            servers[0].clock.advance(30)
        acts = [
            (transfer, n, how, server)
            for n, transfer in enumerate(made)
            for how, server in zip(
                choice.sample(["cancel", "stored", "missing", "cancel", "expire"], 2),
                choice.sample(servers, 2),
                strict=True,
            )
        ]
        choice.shuffle(acts)
        answers = await asyncio.gather(*(act(*each) for each in acts))
        await told(*servers)
        for (transfer, *_), answer in zip(acts, answers, strict=True):
            shown = [await s.control.get_transfer(transfer) for s in servers]
            assert shown[0] == shown[1]
            assert answer in (None, shown[0].state)
        for server in servers:
            left = [t.id for t in (await server.control.transfers()).transfers if not t.state.ended]
            assert server.state.transfers.active == len(left)


async def test_one_is_killed_and_the_other_ends_what_it_had(postgres_address):
    first, second = Process(postgres_address), Process(postgres_address)
    try:
        async with ControlPlane(first.url) as one, ControlPlane(second.url) as other:
            for node in "ab":
                await join(one, node)
            await one.report("a", report(0, host(keys(*range(10)))))
            runs, waits, late = [
                await one.create_transfer(asked(n, deadline=deadline), f"k{n}")
                for n, deadline in enumerate((60, 60, 2))
            ]
            eviction = await one.create_eviction(
                api.EvictionRequest(chunks=api.OfKeys(keys=keys(9)), nodes=["b"])
            )
            handed = {c.transfer for c in (await one.commands("b", "i1")).commands}
            assert handed >= {runs.id, waits.id, eviction.id}
            assert (await one.progress("b", progress(runs.id))).state is S.RUNNING
            first.end(signal.SIGKILL)

            async def told_the_rest():
                # What runs may be offered again: whether its taking was written is not known.
                nonlocal offered
                try:
                    offered |= {c.transfer for c in (await other.commands("b", "i1")).commands}
                except KVStrataError:
                    return False  # it has not heard of the node
                return offered >= {waits.id, eviction.id}

            offered: set[str] = set()
            assert await until(told_the_rest, 10) < 2.0
            again = await other.create_transfer(asked(0, deadline=60), "k0")
            assert again.id == runs.id
            for n, transfer in enumerate((runs, waits)):
                done = progress(transfer.id, final=True, outcomes=all_of("stored", n))
                assert (await other.progress("b", done)).state is S.DONE
            dropped = api.EvictionResult(incarnation="i1", dropped={"host": 1})
            ended = await other.eviction_result("b", eviction.id, dropped)
            assert ended.state is EvictionState.DONE

            async def expired():
                return (await other.get_transfer(late.id)).state is S.EXPIRED

            await until(expired, 10)
            states = [t.state for t in (await other.transfers()).transfers]
            assert states == [S.DONE, S.DONE, S.EXPIRED]
    finally:
        for server in (first, second):
            if server.process.poll() is None:
                server.end()


async def test_memory_holds_no_keys_of_requests_that_sql_has(postgres_address):
    async with two(postgres_address) as servers:
        first, second = servers
        await pair(first, second)
        made = [await first.control.create_transfer(asked(n), f"k{n}") for n in range(3)]
        # At each, as after the change log was lost.
        for server in servers:
            await server.state.transfers.load()
        await told(*servers)
        for server in servers:
            server.state.transfers.sweep()
            records = server.state.transfers._records
            assert (records._by_key, records._keys) == ({}, {})
            again = await server.control.create_transfer(asked(0), "k0")
            assert again.id == made[0].id
