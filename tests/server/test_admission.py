import asyncio

import pytest
from msgspec.structs import replace
from server_kit import CHUNK_BYTES, NAMESPACE, TTL, host, join, report, running, store

from kvstrata import api
from kvstrata.api import Outcome, TransferState
from kvstrata.errors import Busy, Malformed, NoSpace
from kvstrata.testing.waiting import until
from kvstrata_server.scheduling.outgoing import Outgoing

ACME, OTHER = replace(NAMESPACE, tenant="acme"), replace(NAMESPACE, tenant="other")
DOCUMENTS = tuple(n.document.decode() for n in (ACME, OTHER))


def acme(*numbers):
    return [ACME.key(0, n.to_bytes(8, "big")).hex() for n in numbers]


def other(*numbers):
    return [OTHER.key(0, n.to_bytes(8, "big")).hex() for n in numbers]


async def cluster(r, chunks):
    """`a` holds six chunks of two tenants each; `b` has one of acme's. Acme, which thus holds
    seven, may hold `chunks`."""
    await join(r.control, "a", stores=("sa",))
    await join(r.control, "b")
    held = host([*acme(*range(6)), *other(*range(6))])
    await r.control.report("a", report(0, held, namespaces=DOCUMENTS))
    await r.control.report("b", report(0, host(acme(0))))
    await r.control.put_quota("acme", api.QuotaRequest(max_bytes=chunks * CHUNK_BYTES))
    await r.state.usage.refresh()


async def ask(r, names, idempotency_key=None, **more):
    asked = api.TransferRequest(target="b", keys=names, **more)
    return await r.control.create_transfer(asked, idempotency_key)


async def told(r, node="b"):
    return (await r.control.commands(node, "i1")).commands


async def end(r, transfer, names, outcome="stored"):
    progress = api.Progress(
        incarnation="i1", transfer=transfer, final=True, outcomes=dict.fromkeys(names, outcome)
    )
    await r.control.progress("b", progress)


async def test_what_fits_is_moved_and_the_rest_has_no_room(place):
    async with running(place) as r:
        await cluster(r, 9)
        dry = await ask(r, acme(0, 1, 2, 3), dry_run=True)
        assert [k.outcome for k in dry.keys] == ["present", "pending", "pending", "no_room"]
        assert dry.bytes == 2 * CHUNK_BYTES
        assert "no room for 1 of 4 chunks: tenant 'acme' holds" in dry.detail
        made = await ask(r, acme(0, 1, 2, 3))
        assert made.detail == dry.detail
        (command,) = await told(r)
        assert command.byte_budget == 2 * CHUNK_BYTES
        await end(r, made.id, acme(3), "no_room")
        assert (await r.control.get_transfer(made.id)).detail == dry.detail


async def test_where_nothing_fits_it_is_refused_with_what_to_do(tmp_path):
    async with running(tmp_path) as r:
        await cluster(r, 5)
        await r.control.report("b", report(1, host(acme(0))))
        said = (
            f"holds {7 * CHUNK_BYTES} bytes of the {5 * CHUNK_BYTES} that its quota allows, "
            f"{2 * CHUNK_BYTES} too many, so 0 more may come"
        )
        with pytest.raises(NoSpace, match=said):
            await ask(r, acme(1, 2))
        body = {"target": "b", "keys": acme(1)}
        answer = await r.http.post("/v1/transfers", json=body)
        assert (answer.status_code, answer.json()["code"]) == (507, "no_space")
        assert not answer.json()["retryable"]
        asked = {"node": "b", "keys": acme(1)}
        await r.control.report("b", report(2, host(), namespaces=DOCUMENTS))
        await join(r.control, "b", stores=("sb",))
        await r.control.report("b", report(3, store("sb", acme(1))))
        for path in ("/v1/prefetches", "/v1/leases"):
            assert (await r.http.post(path, json=asked)).status_code == 507
        # What is there already takes no room, and may be leased.
        assert (await r.http.post("/v1/leases", json={"node": "b", "keys": acme(0)})).is_success
        assert (await ask(r, other(1))).state is TransferState.QUEUED


async def test_what_is_on_its_way_counts_until_it_is_counted(tmp_path):
    async with running(tmp_path) as r:
        await cluster(r, 9)
        first = await ask(r, acme(1, 2))
        with pytest.raises(NoSpace):
            await ask(r, acme(3))
        r.clock.advance(TTL - 1)
        await r.state.usage.refresh()
        with pytest.raises(NoSpace):  # it still moves
            await ask(r, acme(3))
        await end(r, first.id, acme(1, 2), "failed")
        with pytest.raises(NoSpace):
            await ask(r, acme(3))
        use = api.HostUse(used_bytes=0, capacity_bytes=0, chunks=0)
        for seconds in (0.5, 2):
            r.clock.advance(seconds)
            for name in ("a", "b"):
                await r.control.heartbeat(name, api.HeartbeatRequest(incarnation="i1", host=use))
            await r.state.usage.refresh()
        assert (await ask(r, acme(3))).state is TransferState.QUEUED


async def test_the_smaller_of_two_budgets_holds(tmp_path):
    async with running(tmp_path) as r:
        await cluster(r, 9)
        made = await ask(r, acme(1, 2, 3), byte_budget=CHUNK_BYTES, dry_run=True)
        assert [k.outcome for k in made.keys].count(Outcome.NO_ROOM) == 2
        assert made.detail == ""  # which is the client's own doing


async def test_a_retry_is_answered_as_before_though_there_is_no_room_now(tmp_path):
    async with running(tmp_path) as r:
        await cluster(r, 9)
        made = await ask(r, acme(1, 2), "once")
        assert (await ask(r, acme(1, 2), "once")).id == made.id
        await r.control.put_quota("acme", api.QuotaRequest(max_bytes=0))
        assert (await ask(r, acme(1, 2), "once")).id == made.id


async def test_tenants_with_quotas_are_asked_for_by_themselves(tmp_path):
    async with running(tmp_path) as r:
        await cluster(r, 9)
        with pytest.raises(Malformed, match="several tenants"):
            await ask(r, [*acme(1), *other(1)])
        await r.control.delete_quota("acme")
        await ask(r, [*acme(1), *other(1)])


async def test_as_many_transfers_at_once_as_the_quota_says(tmp_path):
    async with running(tmp_path) as r:
        await cluster(r, 100)
        await join(r.control, "c")
        await r.control.put_quota("acme", api.QuotaRequest(max_transfers=1))
        made = [await ask(r, acme(1))]
        r.clock.advance(1)
        made.append(await ask(r, acme(2)))
        elsewhere = await r.control.create_transfer(api.TransferRequest(target="c", keys=acme(3)))
        free = await ask(r, other(1))
        assert [c.transfer for c in await told(r)] == [made[0].id, free.id]
        assert await told(r, "c") == await told(r) == []
        use = (await r.control.quota("acme")).use
        assert (use.transfers, use.transfer_bytes) == (1, CHUNK_BYTES)
        poll = asyncio.create_task(r.control.commands("c", "i1", wait=20))
        await asyncio.sleep(0)
        await end(r, made[0].id, acme(1))
        assert [c.transfer for c in (await poll).commands] == [elsewhere.id]
        assert await told(r) == []
        await r.control.cancel_transfer(elsewhere.id)
        assert [c.transfer for c in await told(r)] == [made[1].id]


async def test_an_end_wakes_only_nodes_with_transfers_of_that_tenant(tmp_path, monkeypatch):
    async with running(tmp_path) as r:
        await cluster(r, 100)
        for node in "cd":
            await join(r.control, node)
        await r.control.put_quota("acme", api.QuotaRequest(max_transfers=1))
        made = [
            await r.control.create_transfer(api.TransferRequest(target=target, keys=names))
            for target, names in (("b", acme(1)), ("c", acme(2)), ("d", other(3)))
        ]
        for node in "bcd":
            await told(r, node)
        looked, look = [], Outgoing._pulls

        def watched(self, node, mailbox):
            looked.append(node.id)
            return look(self, node, mailbox)

        monkeypatch.setattr(Outgoing, "_pulls", watched)
        polls = [asyncio.create_task(r.control.commands(n, "i1", wait=20)) for n in "cd"]
        await until(lambda: sorted(looked) == ["c", "d"])
        await end(r, made[0].id, acme(1))
        assert [c.transfer for c in (await polls[0]).commands] == [made[1].id]
        assert sorted(looked) == ["c", "c", "d"]
        polls[1].cancel()


async def test_what_moves_counts_once(tmp_path):
    async with running(tmp_path) as r:
        await cluster(r, 11)  # of which it has seven
        room = r.state.admission.room
        assert room("acme") == 4 * CHUNK_BYTES
        made = await ask(r, acme(1, 2, 3))
        assert room("acme") == CHUNK_BYTES
        await r.control.report("b", report(1, host(acme(1, 2))))
        await r.state.usage.refresh()
        assert (r.state.usage.of("acme").chunks, room("acme")) == (9, CHUNK_BYTES)
        counting = asyncio.create_task(r.state.usage.refresh())
        await r.control.report("b", report(2, host(acme(3), removed=acme(1))))
        await counting
        assert room("acme") <= CHUNK_BYTES  # whatever of this the count has
        await r.state.usage.refresh()
        assert (r.state.usage.of("acme").chunks, room("acme")) == (9, CHUNK_BYTES)
        await end(r, made.id, acme(1, 2, 3))
        await r.state.usage.refresh()
        r.clock.advance(2)
        await r.state.usage.refresh()
        assert room("acme") == 2 * CHUNK_BYTES


async def test_after_a_start_nobody_seems_to_hold_nothing(tmp_path):
    async with running(tmp_path) as r:
        await cluster(r, 7)
        clock = r.clock
    async with running(tmp_path, clock) as r:
        await join(r.control, "c")
        asked = api.TransferRequest(target="c", source="a", keys=acme(1))
        await r.state.usage.refresh()
        assert r.state.usage.of("acme").chunks == 7
        with pytest.raises(NoSpace):
            await r.control.create_transfer(asked)
        await r.control.put_quota("acme", api.QuotaRequest(max_bytes=5 * CHUNK_BYTES))
        for node, seconds in (("a", 0), ("b", TTL)):
            r.clock.advance(seconds)
            use = api.HostUse(used_bytes=0, capacity_bytes=0, chunks=0)
            await r.control.heartbeat(node, api.HeartbeatRequest(incarnation="i1", host=use))
            await r.state.usage.refresh()
            await r.state.shedding.look()
            # Of `b` it is not known whether it is there, and so whether `a` has to give any up.
            assert bool(r.state.evictions.shedding("acme")) == (node == "b")


async def test_before_the_first_count_it_is_asked_again(tmp_path):
    async with running(tmp_path) as r:
        await cluster(r, 9)
        r.state.usage.counted_at = None
        with pytest.raises(Busy, match="not counted yet"):
            await ask(r, acme(1))
        await ask(r, other(1))


async def test_who_waits_behind_a_large_one_has_its_turn_when_that_has_begun(tmp_path):
    async with running(tmp_path) as r:
        await cluster(r, 100)
        await join(r.control, "c")
        await r.control.put_quota("acme", api.QuotaRequest(max_transfer_bytes=4 * CHUNK_BYTES))
        made = [await ask(r, acme(1, 2))]
        r.clock.advance(1)
        made.append(await ask(r, acme(3, 4, 5)))
        r.clock.advance(1)
        small = await r.control.create_transfer(api.TransferRequest(target="c", keys=acme(1)))
        assert [c.transfer for c in await told(r)] == [made[0].id]
        poll = asyncio.create_task(r.control.commands("c", "i1", wait=20))
        await asyncio.sleep(0)
        await end(r, made[0].id, acme(1, 2))
        assert [c.transfer for c in await told(r)] == [made[1].id]
        async with asyncio.timeout(3):  # otherwise it would be looked at after five
            assert [c.transfer for c in (await poll).commands] == [small.id]
