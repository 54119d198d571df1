import asyncio

import pytest
from msgspec.structs import replace
from server_kit import DOCUMENT, NAMESPACE, join, keys, report, running

from kvstrata import api
from kvstrata.api import EvictionState
from kvstrata.errors import Busy, Expired, Malformed, Missing, PeerRefused
from kvstrata_server.scheduling import evictions
from kvstrata_server.sql.changes import EvictionAnswered

S = EvictionState
NEWER = replace(NAMESPACE, revision="r2")


async def nodes(r, *names):
    for name in names:
        await join(r.control, name)
    documents = (DOCUMENT, NEWER.document.decode())
    await r.control.report(names[0], report(0, namespaces=documents))


async def ask(r, nodes=None, tiers=None, deadline=60.0, **chunks):
    asked = api.EvictionRequest(chunks=chunks, nodes=nodes, tiers=tiers, deadline=deadline)
    return await r.control.create_eviction(asked)


async def told(r, node, incarnation="i1"):
    return (await r.control.commands(node, incarnation)).commands


async def say(r, node, eviction, dropped=None, **more):
    result = api.EvictionResult(**({"incarnation": "i1", "dropped": dropped} | more))
    return await r.control.eviction_result(node, eviction, result)


async def test_from_request_to_done(tmp_path):
    async with running(tmp_path) as r:
        await nodes(r, "a", "b")
        made = await ask(r, keys=keys(1, 2, 1), tiers=["host"], deadline=30)
        assert (made.state, [n.node for n in made.nodes]) == (S.RUNNING, ["a", "b"])
        for node in ("a", "b"):
            (command,) = await told(r, node)
            assert (command.kind, command.transfer) == ("evict", made.id)
            assert (command.keys, command.tiers, command.digests) == (keys(1, 2), ["host"], [])
            assert command.deadline_in == 30
        first = await say(r, "a", made.id, {"host": 2})
        assert first.state is S.RUNNING
        last = await say(r, "b", made.id, {"host": 0})
        assert (last.state, last.ended) == (S.DONE, r.clock())
        assert [n.dropped for n in last.nodes] == [{"host": 2}, {"host": 0}]
        again = await say(r, "b", made.id, {"host": 7})
        assert again == last
        assert await told(r, "a") == []
        assert await r.control.eviction(made.id) == last


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ({"model": "tiny"}, {NAMESPACE.digest.hex(), NEWER.digest.hex()}),
        ({"model": "tiny", "revision": "r2"}, {NEWER.digest.hex()}),
        ({"digests": ["ab" * 16]}, {"ab" * 16}),
    ],
)
async def test_a_model_or_a_revision_or_a_namespace(tmp_path, what, expected):
    async with running(tmp_path) as r:
        await nodes(r, "a")
        await ask(r, **what)
        (command,) = await told(r, "a")
        assert set(command.digests) == expected
        assert command.keys == command.tiers == []


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ({"model": "huge"}, "'huge'"),
        ({"model": "tiny", "revision": "r9"}, "'tiny'"),
        ({"model": "tiny", "nodes": ["z"]}, "'z'"),
    ],
)
async def test_what_nobody_knows_is_an_error(tmp_path, what, said):
    async with running(tmp_path) as r:
        await nodes(r, "a")
        with pytest.raises(Missing, match=said):
            await ask(r, **what)
        assert await told(r, "a") == []


@pytest.mark.parametrize(
    "chunks",
    [
        {},
        {"keys": keys(1), "model": "tiny"},
        {"digests": ["ab" * 16], "revision": "r1"},
        {"keys": []},
    ],
)
async def test_it_says_in_one_way_which_chunks(tmp_path, chunks):
    async with running(tmp_path) as r:
        await nodes(r, "a")
        answer = await r.http.post("/v1/evictions", json={"chunks": chunks})
        assert answer.status_code == 422
        assert await told(r, "a") == []


async def test_nobody_to_ask_is_an_error(tmp_path):
    async with running(tmp_path) as r:
        with pytest.raises(Missing, match="no node is up"):
            await ask(r, keys=keys(1))


async def test_a_node_that_could_not_makes_it_partial(tmp_path):
    async with running(tmp_path) as r:
        await nodes(r, "a", "b")
        made = await ask(r, keys=keys(1))
        await say(r, "a", made.id, {"host": 1})
        ended = await say(r, "b", made.id, detail="no tier 'tape' here")
        assert ended.state is S.PARTIAL
        assert [n.detail for n in ended.nodes] == ["", "no tier 'tape' here"]


async def test_a_command_is_offered_again_until_it_is_answered(tmp_path):
    async with running(tmp_path) as r:
        await nodes(r, "a")
        made = await ask(r, keys=keys(1))
        assert len(await told(r, "a")) == 1
        assert await told(r, "a") == []
        r.clock.advance(5)
        (again,) = await told(r, "a")
        assert (again.transfer, again.deadline_in) == (made.id, 55)
        await join(r.control, "a", "i2")  # it started anew, and knows of nothing
        assert len(await told(r, "a", "i2")) == 1
        with pytest.raises(Expired):
            await say(r, "a", made.id, {"host": 1})


async def test_a_poll_and_memory_hold_a_bounded_number_of_keys(tmp_path, monkeypatch):
    monkeypatch.setattr(evictions, "_MOST_KEYS_PER_POLL", 5)
    monkeypatch.setattr(evictions, "_MOST_KEYS", 10)
    async with running(tmp_path) as r:
        await nodes(r, "a")
        made = [await ask(r, keys=keys(*range(n))) for n in (3, 3, 2)]
        assert [c.transfer for c in await told(r, "a")] == [made[0].id]
        assert [c.transfer for c in await told(r, "a")] == [made[1].id, made[2].id]
        with pytest.raises(Busy, match="8 keys are to be evicted"):
            await ask(r, keys=keys(1, 2, 3))
        large = await ask(r, model="tiny")
        assert [c.transfer for c in await told(r, "a")] == [large.id]
        await say(r, "a", made[0].id, {"host": 0})
        await ask(r, keys=keys(1, 2, 3))


async def test_its_deadline_ends_it(tmp_path):
    async with running(tmp_path) as r:
        await nodes(r, "a", "b")
        made = await ask(r, keys=keys(1), deadline=10)
        await say(r, "a", made.id, {"host": 1})
        r.clock.advance(10)
        ended = await r.control.eviction(made.id)
        assert (ended.state, ended.ended) == (S.EXPIRED, r.clock())
        assert await told(r, "b") == []
        assert (await say(r, "b", made.id, {"host": 1})).state is S.EXPIRED


async def test_it_outlives_the_server(tmp_path):
    async with running(tmp_path) as r:
        await nodes(r, "a", "b")
        made = await ask(r, model="tiny", revision="r2", deadline=60)
        await say(r, "a", made.id, {"host": 1})
        clock = r.clock
    async with running(tmp_path, clock) as r:
        await join(r.control, "a")
        await join(r.control, "b")
        assert await told(r, "a") == []
        (command,) = await told(r, "b")
        assert command.digests == [NEWER.digest.hex()]
        assert (await say(r, "b", made.id, {"host": 0})).state is S.DONE


async def test_lists_have_pages_and_old_ones_are_forgotten(tmp_path):
    async with running(tmp_path, transfer_retention=100.0) as r:
        await nodes(r, "a")
        made = []
        for number in range(3):
            r.clock.advance(1)
            made.append((await ask(r, keys=keys(number), deadline=10)).id)
        first = (await r.http.get("/v1/evictions?limit=2")).json()
        assert [e["id"] for e in first["evictions"]] == made[:2]
        rest = (await r.http.get(f"/v1/evictions?after={first['next']}")).json()
        assert ([e["id"] for e in rest["evictions"]], rest["next"]) == (made[2:], None)
        r.clock.advance(10)
        r.state.evictions.expire()
        r.clock.advance(100.5)
        r.state.evictions.forget_old()
        await r.state.writer.flushed(10)
        with pytest.raises(Missing):
            await r.control.eviction(made[0])


async def test_an_idempotency_key_makes_a_retry_harmless(place):
    async with running(place) as r:
        await nodes(r, "a")
        request = api.EvictionRequest(chunks=api.OfKeys(keys=keys(1)))
        both = await asyncio.gather(*(r.control.create_eviction(request, "k") for _ in range(3)))
        assert len({made.id for made in both}) == 1
        assert [c.transfer for c in await told(r, "a")] == [both[0].id]
        with pytest.raises(PeerRefused, match="another key"):
            await r.control.create_eviction(request.model_copy(update={"deadline": 7.0}), "k")
        await say(r, "a", both[0].id, {"host": 1})
        again = await r.control.create_eviction(request, "k")
        assert (again.id, again.state) == (both[0].id, S.DONE)


async def test_what_was_accepted_too_late_to_say_so_is_carried_out(tmp_path, monkeypatch):
    monkeypatch.setattr(evictions, "_COMMIT_TIMEOUT", 0.01)
    async with running(tmp_path) as r:
        await nodes(r, "a")
        write_batch, go_on = r.state.writer.write_batch, asyncio.Event()

        async def slow():
            await go_on.wait()
            await write_batch()

        monkeypatch.setattr(r.state.writer, "write_batch", slow)
        with pytest.raises(Busy, match=r"did not take a write .* may be written still"):
            await ask(r, keys=keys(1))
        go_on.set()
        await r.state.writer.flushed(10)
        r.state.evictions.settle()
        (command,) = await told(r, "a")
        assert command.keys == keys(1)


async def test_what_runs_is_told_while_sql_is_behind_and_what_is_over_once_it_says_so(
    tmp_path, monkeypatch
):
    async with running(tmp_path) as r:
        await nodes(r, "a", "b")
        made = await ask(r, keys=keys(1), deadline=10)
        r.clock.advance(1)  # ids are in order of creation
        other = await ask(r, keys=keys(2), deadline=60)
        monkeypatch.setattr(evictions, "_COMMIT_TIMEOUT", 0.01)
        write_batch, go_on = r.state.writer.write_batch, asyncio.Event()

        async def slow():
            await go_on.wait()
            await write_batch()

        monkeypatch.setattr(r.state.writer, "write_batch", slow)
        r.state.evictions.forget_old()
        with pytest.raises(Busy):
            await say(r, "a", made.id, {"host": 1})
        # Nobody was told that it is taken.
        assert await r.control.eviction(made.id) == made
        assert (await r.state.evictions.page(None, 10)).evictions == [made, other]
        r.clock.advance(10)
        for ask_for in (r.control.eviction(made.id), r.state.evictions.page(None, 10)):
            with pytest.raises(Busy, match="did not take a write"):
                await ask_for
        assert await r.control.eviction(other.id) == other
        go_on.set()
        await r.state.writer.flushed(10)
        ended = await r.control.eviction(made.id)
        assert (ended.state, ended.nodes[0].dropped) == (S.EXPIRED, {"host": 1})
        r.state.evictions.settle()
        assert r.state.evictions._unwritten == {}


async def test_answers_may_be_faster_than_the_server_that_was_asked(tmp_path, monkeypatch):
    async with running(tmp_path) as r:
        await nodes(r, "a", "b")
        write_batch = r.state.writer.write_batch

        async def answered_elsewhere():
            await write_batch()
            for eviction in r.state.evictions._making:
                r.state.evictions.follow(EvictionAnswered(eviction, "a"), ours=False)

        monkeypatch.setattr(r.state.writer, "write_batch", answered_elsewhere)
        made = await ask(r, keys=keys(1))
        assert await told(r, "a") == []
        assert [c.transfer for c in await told(r, "b")] == [made.id]


async def test_only_who_was_asked_may_answer(tmp_path):
    async with running(tmp_path) as r:
        await nodes(r, "a", "b")
        made = await ask(r, keys=keys(1), nodes=["a"])
        with pytest.raises(Missing, match="does not ask node 'b'"):
            await say(r, "b", made.id, {"host": 1})


async def test_a_long_poll_wakes(tmp_path):
    async with running(tmp_path) as r:
        await nodes(r, "a")
        poll = asyncio.create_task(r.control.commands("a", "i1", wait=20))
        await asyncio.sleep(0)
        made = await ask(r, keys=keys(1))
        assert [c.transfer for c in (await poll).commands] == [made.id]


async def test_pages_are_bounded_by_the_nodes_that_were_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(evictions, "_PER_READ", 3)
    monkeypatch.setattr(evictions, "_MOST_NODES_PER_PAGE", 4)
    async with running(tmp_path) as r:
        await nodes(r, *"abcde")
        asked = [["a"], ["b"], ["c"], ["d", "e"], list("abcde"), ["a"]]
        made = [await ask(r, nodes=names, keys=keys(1)) for names in asked]
        r.clock.advance(0.001)
        ids = sorted(each.id for each in made)
        by_id = {each.id: len(each.nodes) for each in made}

        async def pages(limit):
            after, found = None, []
            while True:
                page = await r.state.evictions.page(after, limit)
                found.append([e.id for e in page.evictions])
                if page.next is None:
                    return found
                after = page.next

        for limit in (1, 2, 3, 100):
            found = await pages(limit)
            assert [id_ for page in found for id_ in page] == ids
            assert all(len(page) <= limit for page in found)
            assert all(len(page) == 1 or sum(by_id[i] for i in page) <= 4 for page in found)


async def test_more_nodes_than_one_eviction_asks(tmp_path, monkeypatch):
    monkeypatch.setattr(evictions, "MAX_NODES", 1)
    async with running(tmp_path) as r:
        await nodes(r, "a", "b")
        with pytest.raises(Malformed, match="2 nodes are up, and one eviction asks at most 1"):
            await ask(r, keys=keys(1))
        assert (await ask(r, nodes=["b"], keys=keys(1))).state is S.RUNNING


async def test_those_that_sql_has_not_yet_count_among_the_most_there_may_be(tmp_path, monkeypatch):
    monkeypatch.setattr(evictions, "_COMMIT_TIMEOUT", 0.01)
    monkeypatch.setattr(evictions, "_MOST_KEYS", 10)
    async with running(tmp_path) as r:
        await nodes(r, "a")
        go_on = asyncio.Event()
        monkeypatch.setattr(r.state.writer, "write_batch", go_on.wait)
        for n in range(2):
            with pytest.raises(Busy, match="did not take a write"):
                await ask(r, keys=keys(*range(4 * n, 4 * n + 4)))
        with pytest.raises(Busy, match="8 keys are to be evicted"):
            await ask(r, keys=keys(*range(8, 12)))
        monkeypatch.setattr(evictions, "_MOST_ACTIVE", 2)
        with pytest.raises(Busy, match="2 evictions are under way"):
            await ask(r, keys=keys(9))
        monkeypatch.undo()
        go_on.set()
