"""Whose transfer is handed out, as nodes and requesters see it."""

import pytest
from msgspec.structs import replace
from server_kit import CHUNK_BYTES, DOCUMENT, NAMESPACE, host, join, keys, report, running, store

from kvstrata import api
from kvstrata.api import Outcome, TransferState
from kvstrata.errors import Malformed

RED, BLUE = (replace(NAMESPACE, tenant=tenant) for tenant in ("red", "blue"))


def key(namespace, number):
    return namespace.key(0, number.to_bytes(8, "big")).hex()


async def cluster(r, *sources):
    """Each source holds the first hundred chunks of every tenant; `t` holds none."""
    documents = (DOCUMENT, RED.document.decode(), BLUE.document.decode())
    everything = [key(n, i) for n in (NAMESPACE, RED, BLUE) for i in range(100)]
    for source in sources:
        await join(r.control, source)
        await r.control.report(source, report(0, host(everything), namespaces=documents))
    await join(r.control, "t")


async def ask(r, namespace, number, **more):
    r.clock.advance(0.01)  # so that one is older than the next
    request = api.TransferRequest(target="t", keys=[key(namespace, number)], **more)
    return (await r.control.create_transfer(request)).id


async def handed_out(r):
    return [c.transfer for c in (await r.control.commands("t", "i1")).commands]


async def finish(r, transfer):
    await r.control.progress("t", api.Progress(incarnation="i1", transfer=transfer, final=True))


async def test_a_node_gets_so_many_at_once_and_the_next_when_one_ends(tmp_path):
    async with running(tmp_path, transfers_per_node=3) as r:
        await cluster(r, "a")
        asked = [await ask(r, NAMESPACE, i) for i in range(5)]
        assert await handed_out(r) == asked[:3]
        assert await handed_out(r) == []
        await finish(r, asked[1])
        assert await handed_out(r) == [asked[3]]
        await r.control.cancel_transfer(asked[0])
        told = (await r.control.commands("t", "i1")).commands
        assert [(c.kind, c.transfer) for c in told] == [("cancel", asked[0]), ("pull", asked[4])]


async def test_a_link_carries_so_many_and_others_pass_by(tmp_path):
    async with running(tmp_path, transfers_per_link=2) as r:
        await cluster(r, "a", "b")
        from_a = [await ask(r, NAMESPACE, i, source="a") for i in range(4)]
        from_b = await ask(r, NAMESPACE, 50, source="b")
        assert await handed_out(r) == [*from_a[:2], from_b]
        await finish(r, from_a[0])
        assert await handed_out(r) == [from_a[2]]


async def test_what_is_offered_again_needs_no_second_place(tmp_path):
    async with running(tmp_path, transfers_per_node=1) as r:
        await cluster(r, "a")
        first = await ask(r, NAMESPACE, 0)
        await ask(r, NAMESPACE, 1)
        assert await handed_out(r) == [first]
        r.clock.advance(5)  # the answer was lost
        assert await handed_out(r) == [first]


async def test_what_has_a_place_is_offered_again_before_what_is_more_urgent(tmp_path):
    async with running(tmp_path, transfers_per_node=1) as r:
        await cluster(r, "a")
        first = await ask(r, NAMESPACE, 0)
        assert await handed_out(r) == [first]
        await ask(r, NAMESPACE, 1, priority=9)
        r.clock.advance(5)  # the answer was lost
        assert await handed_out(r) == [first]


async def test_what_has_a_place_is_offered_again_however_many_wait_for_its_link(tmp_path):
    async with running(tmp_path, transfers_per_node=4, transfers_per_link=1) as r:
        await cluster(r, "a")
        first = await ask(r, NAMESPACE, 0)
        assert await handed_out(r) == [first]
        for i in range(32):
            await ask(r, NAMESPACE, 1 + i, priority=9)
        r.clock.advance(5)
        assert await handed_out(r) == [first]


@pytest.mark.parametrize("source", ["a", "any"])
async def test_however_many_wait_for_a_link_others_behind_them_are_handed_out(tmp_path, source):
    async with running(tmp_path, transfers_per_node=4, transfers_per_link=1) as r:
        await cluster(r, "a")
        await join(r.control, "b")
        await r.control.report("b", report(0, host([key(NAMESPACE, 200)])))
        first = await ask(r, NAMESPACE, 0, source=source)
        waiting = [await ask(r, NAMESPACE, 1 + i, source=source, priority=9) for i in range(70)]
        behind = await ask(r, NAMESPACE, 200, source="any", priority=1)
        # A poll that may wait looks at all of them; how much it does at once is bounded.
        polls = [(await r.control.commands("t", "i1", wait=5)).commands]
        if source == "any":  # where each may come from is seen by planning only
            polls.append((await r.control.commands("t", "i1", wait=5)).commands)
        assert [c.transfer for told in polls for c in told] == [waiting[0], behind]
        # And what waits is handed out when the link is free, or when another source is there.
        await finish(r, waiting[0])
        assert await handed_out(r) == [waiting[1]]
        if source == "any":
            await r.control.deregister("a")
            await join(r.control, "c")
            everything = [key(NAMESPACE, i) for i in range(100)]
            await r.control.report("c", report(0, host(everything)))
            r.clock.advance(5)
            assert set(await handed_out(r)) >= {waiting[2]}
        assert first not in await handed_out(r)


async def test_an_expired_transfer_makes_room(tmp_path):
    async with running(tmp_path, transfers_per_node=1) as r:
        await cluster(r, "a")
        await ask(r, NAMESPACE, 0, deadline=10)
        second = await ask(r, NAMESPACE, 1)
        await handed_out(r)
        r.clock.advance(10)
        told = (await r.control.commands("t", "i1")).commands
        assert [c.transfer for c in told if c.kind == "pull"] == [second]


async def test_tenants_take_turns(tmp_path):
    async with running(tmp_path, transfers_per_node=1) as r:
        await cluster(r, "a")
        red = [await ask(r, RED, i) for i in range(4)]
        blue = [await ask(r, BLUE, i) for i in range(2)]
        order = []
        for _ in range(6):
            (transfer,) = await handed_out(r)
            order.append(transfer)
            await finish(r, transfer)
        assert order == [red[0], blue[0], red[1], blue[1], red[2], red[3]]


async def test_turns_go_on_after_a_restart(tmp_path):
    async with running(tmp_path, transfers_per_node=1) as r:
        await cluster(r, "a")
        first = await ask(r, NAMESPACE, 0)
        second = await ask(r, NAMESPACE, 1)
        assert await handed_out(r) == [first]
        clock = r.clock
    async with running(tmp_path, clock, transfers_per_node=1) as r:
        await join(r.control, "t")
        assert await handed_out(r) == [first]
        await finish(r, first)
        assert await handed_out(r) == [second]


async def test_a_prefetch_is_a_transfer_that_asks_no_other_node(tmp_path):
    async with running(tmp_path) as r:
        await cluster(r, "a")
        await join(r.control, "n", stores=("disk",))
        await r.control.report("n", report(0, store("disk", keys(0, 1))))
        body = {"node": "n", "keys": keys(0, 1, 2), "hold": 30, "deadline": 10}
        plan = (await r.http.post("/v1/prefetches", json=body | {"dry_run": True})).json()
        assert [(k["outcome"], k["source"]) for k in plan["keys"]] == [
            ("pending", "n"),
            ("pending", "n"),
            ("missing", None),  # `a` has it; that is what transfers are for
        ]
        assert plan["bytes"] == 2 * CHUNK_BYTES
        headers = {"Idempotency-Key": "warm-1"}
        made = await r.http.post("/v1/prefetches", json=body, headers=headers)
        again = await r.http.post("/v1/prefetches", json=body, headers=headers)
        assert made.status_code == 202
        assert made.json()["id"] == again.json()["id"]
        assert made.headers["location"] == f"/v1/transfers/{made.json()['id']}"
        (command,) = (await r.control.commands("n", "i1")).commands
        assert (command.kind, command.sources, command.hold) == ("pull", [], 30.0)
        outcomes = dict.fromkeys(keys(0, 1), Outcome.STORED) | {keys(2)[0]: Outcome.MISSING}
        done = api.Progress(
            incarnation="i1", transfer=command.transfer, final=True, outcomes=outcomes
        )
        assert (await r.control.progress("n", done)).state is TransferState.PARTIAL


@pytest.mark.parametrize("name", ["any", "own"])
async def test_no_node_has_a_name_that_means_others(tmp_path, name):
    async with running(tmp_path) as r:
        with pytest.raises(Malformed, match="can't be named"):
            await join(r.control, name)
