import asyncio

import pytest
from server_kit import CHUNK_BYTES, DOCUMENT, Running, host, join, keys, report, running, store
from sqlalchemy import text

from kvstrata import api
from kvstrata.api import Outcome, TransferState
from kvstrata.errors import Busy, Expired, Malformed, Missing, PeerRefused
from kvstrata_server.scheduling import history, records, shown, transfer_writes
from kvstrata_server.scheduling import transfers as transfers_module

S = TransferState


async def pair(r: Running) -> None:
    """`a` holds chunks 0 to 2 in host memory and 3 in its store; `b` is the target."""
    await join(r.control, "a", stores=("sa",))
    await join(r.control, "b")
    await r.control.report("a", report(0, host(keys(0, 1, 2)), store("sa", keys(3))))


async def ask(r: Running, *numbers: int, **more: object) -> api.TransferInfo:
    idempotency_key = more.pop("idempotency_key", None)
    asked = api.TransferRequest(target="b", keys=keys(*numbers), **more)
    return await r.control.create_transfer(asked, idempotency_key)


async def poll(r: Running, node: str = "b", incarnation: str = "i1") -> list[api.Command]:
    return (await r.control.commands(node, incarnation)).commands


async def post(r: Running, transfer: str, final: bool = False, **more: object) -> TransferState:
    incarnation = more.pop("incarnation", "i1")
    progress = api.Progress(incarnation=incarnation, transfer=transfer, final=final, **more)
    return (await r.control.progress("b", progress)).state


def outcomes(transfer: api.TransferInfo) -> list[Outcome]:
    return [key.outcome for key in transfer.keys]


async def test_from_request_to_done(tmp_path):
    async with running(tmp_path) as r:
        await pair(r)
        made = await ask(r, 0, 1, 0, deadline=30, hold=90, byte_budget=1 << 20)
        assert made.state is S.QUEUED
        assert [k.key for k in made.keys] == keys(0, 1)  # a repeated key counts once
        assert made.deadline - made.created == 30
        r.clock.advance(1)
        (command,) = await poll(r)
        assert command == api.Command(
            kind="pull",
            transfer=made.id,
            namespaces=[DOCUMENT],
            keys=keys(0, 1),
            sources=[api.SourceRef(node="a", address="tcp://a.test:7801")],
            deadline_in=29.0,
            hold=90.0,
            byte_budget=1 << 20,
        )
        assert await post(r, made.id) is S.RUNNING
        one, two = keys(0, 1)
        assert await post(r, made.id, outcomes={one: "stored"}, bytes=10) is S.RUNNING
        assert (await r.control.get_transfer(made.id)).bytes == 10
        state = await post(
            r,
            made.id,
            final=True,
            outcomes={one: "stored", two: "present"},
            sources={one: "a"},
            bytes=CHUNK_BYTES,
            detail="fine",
        )
        assert state is S.DONE
        ended = await r.control.get_transfer(made.id)
        assert (ended.state, ended.bytes, ended.detail) == (S.DONE, CHUNK_BYTES, "fine")
        assert ended.ended == r.clock()
        assert ended.counts == {Outcome.STORED: 1, Outcome.PRESENT: 1}
        assert [(k.outcome, k.source) for k in ended.keys] == [("stored", "a"), ("present", None)]
        assert await poll(r) == []


@pytest.mark.parametrize(
    ("given", "state"),
    [(["stored", "corrupt"], S.PARTIAL), (["missing", "no_room"], S.FAILED), ([], S.FAILED)],
    ids=["some", "none", "nothing said"],
)
async def test_the_state_follows_from_the_outcomes(tmp_path, given, state):
    async with running(tmp_path) as r:
        await pair(r)
        made = await ask(r, 0, 1)
        said = dict(zip(keys(0, 1), given, strict=False))
        assert await post(r, made.id, final=True, outcomes=said) is state
        ended = await r.control.get_transfer(made.id)
        assert outcomes(ended) == (given or ["failed", "failed"])


async def test_an_ended_transfer_never_changes(tmp_path):
    async with running(tmp_path) as r:
        await pair(r)
        made = await ask(r, 0)
        await post(r, made.id, final=True, outcomes={keys(0)[0]: "stored"})
        assert await post(r, made.id, final=True, outcomes={keys(0)[0]: "failed"}) is S.DONE
        assert (await r.control.cancel_transfer(made.id)).state is S.DONE
        r.clock.advance(1000)
        assert (await r.control.get_transfer(made.id)).state is S.DONE


async def test_cancel_before_the_target_took_it(tmp_path):
    async with running(tmp_path) as r:
        await pair(r)
        made = await ask(r, 0)
        cancelled = await r.control.cancel_transfer(made.id)
        assert (cancelled.state, outcomes(cancelled)) == (S.CANCELLED, [Outcome.CANCELLED])
        assert await poll(r) == []


async def test_cancel_reaches_a_target_at_work(tmp_path):
    async with running(tmp_path) as r:
        await pair(r)
        made = await ask(r, 0, 1)
        await poll(r)
        await post(r, made.id, outcomes={keys(0)[0]: "stored"})
        cancelled = await r.control.cancel_transfer(made.id)
        assert outcomes(cancelled) == [Outcome.STORED, Outcome.CANCELLED]
        assert await poll(r) == [api.Command(kind="cancel", transfer=made.id)]
        # Until it answers it is told again, though not at every poll.
        assert await poll(r) == []
        r.clock.advance(6)
        assert [c.kind for c in await poll(r)] == ["cancel"]
        assert await post(r, made.id, final=True) is S.CANCELLED
        r.clock.advance(6)
        assert await poll(r) == []


async def test_many_that_are_over_are_told_in_parts(tmp_path):
    async with running(tmp_path) as r:
        await pair(r)
        made = await asyncio.gather(*(ask(r, n % 3) for n in range(100)))
        await asyncio.gather(*(r.state.transfers.cancel(each.id) for each in made))
        clock = r.clock
    async with running(tmp_path, clock) as r:
        told = [[c.transfer for c in await poll(r)] for _ in range(3)]
        assert [len(part) for part in told] == [64, 36, 0]
        assert {t for part in told for t in part} == {each.id for each in made}


async def test_who_is_never_told_that_it_is_over_costs_nothing_for_ever(tmp_path):
    async with running(tmp_path) as r:
        await pair(r)
        made = await ask(r, 0)
        await poll(r)
        await r.control.cancel_transfer(made.id)
        (mailbox,) = (m for m in r.state.transfers._outgoing._mailboxes.values() if m.notices)
        r.clock.advance(299)
        r.state.transfers.forget_old()
        assert set(mailbox.notices) == {made.id}
        r.clock.advance(2)
        r.state.transfers.forget_old()
        assert mailbox.notices == {}


async def test_the_deadline_ends_it_and_the_target_hears(tmp_path):
    async with running(tmp_path) as r:
        await pair(r)
        made = await ask(r, 0, deadline=5)
        await poll(r)
        await post(r, made.id)
        r.clock.advance(5)
        expired = await r.control.get_transfer(made.id)
        assert (expired.state, outcomes(expired)) == (S.EXPIRED, [Outcome.CANCELLED])
        assert expired.detail == "its deadline passed"
        assert [c.kind for c in await poll(r)] == ["cancel"]
        assert await post(r, made.id, final=True, outcomes={keys(0)[0]: "stored"}) is S.EXPIRED


async def test_a_silent_target_does_not_keep_a_transfer_open(tmp_path):
    async with running(tmp_path) as r:
        await pair(r)
        made = await ask(r, 0, deadline=20)
        assert made.detail == ""
        r.clock.advance(11)
        silence = "node 'b' was last heard 11 s ago"
        assert (await r.control.get_transfer(made.id)).detail == silence
        assert (await ask(r, 1, dry_run=True)).detail == silence
        r.clock.advance(10)
        assert (await r.control.node("b")).state is api.NodeState.SILENT
        (summary,) = (await r.control.transfers()).transfers
        assert (summary.id, summary.state) == (made.id, S.EXPIRED)
        assert summary.detail == (
            "its deadline passed before its target took it; node 'b' was last heard 21 s ago"
        )


async def test_a_command_is_offered_again_until_it_is_taken(tmp_path):
    async with running(tmp_path) as r:
        await pair(r)
        made = await ask(r, 0)
        assert [c.transfer for c in await poll(r)] == [made.id]
        assert await poll(r) == []
        r.clock.advance(6)
        assert [c.transfer for c in await poll(r)] == [made.id]
        await post(r, made.id)
        r.clock.advance(60 - 7)
        assert await poll(r) == []


async def test_a_new_incarnation_of_the_target_is_asked_again(tmp_path):
    async with running(tmp_path) as r:
        await pair(r)
        made = await ask(r, 0)
        await poll(r)
        await post(r, made.id)
        await join(r.control, "b", "i2")
        with pytest.raises(Expired):
            await poll(r)
        with pytest.raises(Expired):
            await post(r, made.id, final=True)
        assert [c.transfer for c in await poll(r, incarnation="i2")] == [made.id]
        assert await post(r, made.id, incarnation="i2") is S.RUNNING


async def test_a_long_poll_wakes_at_once(tmp_path):
    async with running(tmp_path) as r:
        await pair(r)
        asked = asyncio.Event()

        async def hung_up() -> bool:
            asked.set()
            return False

        polling = r.state.transfers.commands("b", "i1", 30, hung_up)
        waiting = asyncio.create_task(polling)
        await asked.wait()
        loop = asyncio.get_running_loop()
        before = loop.time()
        made = await ask(r, 0)
        batch = await waiting
        assert [c.transfer for c in batch.commands] == [made.id]
        assert loop.time() - before < 3


async def test_a_caller_that_hung_up_gets_no_command(tmp_path):
    async def hung_up() -> bool:
        return True

    async with running(tmp_path) as r:
        await pair(r)
        made = await ask(r, 0)
        batch = await r.state.transfers.commands("b", "i1", 0, hung_up)
        assert batch.commands == []
        assert [c.transfer for c in await poll(r)] == [made.id]


async def test_all_keys_of_many_come_back_from_sql(place, monkeypatch):
    monkeypatch.setattr(records.history, "_CHUNKS", 4)
    monkeypatch.setattr(records.history, "_IDS", 2)
    async with running(place) as r:
        await pair(r)
        asked = [keys(*range(n, 2 * n + 1)) for n in range(7)]
        made = [
            await r.control.create_transfer(api.TransferRequest(target="b", keys=each))
            for each in asked
        ]
        loaded = {t.id: t for t in await records.history.unended(r.state.database)}
        assert [[k.hex() for k in loaded[m.id].keys] for m in made] == asked


async def test_urgent_transfers_are_handed_out_first(tmp_path):
    async with running(tmp_path) as r:
        await pair(r)
        made = {p: (await ask(r, 0, priority=p)).id for p in (1, 9, 5)}
        assert [c.transfer for c in await poll(r)] == [made[9], made[5], made[1]]


async def test_unknown_nodes_are_errors_and_unknown_keys_are_not(tmp_path):
    async with running(tmp_path) as r:
        await pair(r)
        with pytest.raises(Missing, match="nobody"):
            await r.control.create_transfer(api.TransferRequest(target="nobody", keys=keys(0)))
        with pytest.raises(Missing, match="nobody"):
            await ask(r, 0, source="nobody")
        made = await ask(r, 77, source="a")  # not there as far as is known: tried all the same
        (command,) = await poll(r)
        assert [s.node for s in command.sources] == ["a"]
        await post(r, made.id, final=True, outcomes={keys(77)[0]: "missing"})
        assert outcomes(await r.control.get_transfer(made.id)) == [Outcome.MISSING]
        with pytest.raises(Missing):
            await r.control.get_transfer("none")


async def test_a_source_must_be_another_that_serves_peers(tmp_path):
    async with running(tmp_path) as r:
        await pair(r)
        await join(r.control, "mute", peers=False)
        with pytest.raises(Malformed, match=r"peers\.listen"):
            await ask(r, 0, source="mute")
        with pytest.raises(Malformed, match="target"):
            await ask(r, 0, source="b")


async def test_progress_is_the_targets_to_post(tmp_path):
    async with running(tmp_path) as r:
        await pair(r)
        made = await ask(r, 0)
        progress = api.Progress(incarnation="i1", transfer=made.id, final=True)
        with pytest.raises(PeerRefused, match="'b'"):
            await r.control.progress("a", progress)
        with pytest.raises(Missing):
            await post(r, "none")


async def test_sources_by_how_much_they_hold_host_memory_first(tmp_path):
    async with running(tmp_path) as r:
        for node in ("a", "b", "c", "d", "e"):
            await join(r.control, node, stores=(f"s{node}",))
        await join(r.control, "mute", peers=False)
        await r.control.report("a", report(0, host(keys(0))))
        await r.control.report("c", report(0, host(keys(0, 1))))
        await r.control.report("d", report(0, store("sd", keys(0, 1, 2, 3))))
        await r.control.report("mute", report(0, host(keys(0, 1, 2, 3))))
        await ask(r, 0, 1, 2, 3)
        (command,) = await poll(r)
        assert [s.node for s in command.sources] == ["c", "a", "d"]


async def test_a_sick_source_comes_last(tmp_path):
    async with running(tmp_path) as r:
        await pair(r)
        await join(r.control, "c")
        await r.control.report("c", report(0, host(keys(0))))
        use = api.HostUse(used_bytes=0, capacity_bytes=0, chunks=0)
        await r.control.heartbeat(
            "a", api.HeartbeatRequest(incarnation="i1", host=use, healthy=False)
        )
        await ask(r, 0, 1, 2)
        (command,) = await poll(r)
        assert [s.node for s in command.sources] == ["c", "a"]


async def test_a_dry_run_plans_and_keeps_nothing(tmp_path):
    async with running(tmp_path) as r:
        await join(r.control, "a", stores=("sa",))
        await join(r.control, "b", stores=("sb",))
        await r.control.report("a", report(0, host(keys(0)), store("sa", keys(1))))
        await r.control.report("b", report(0, host(keys(2)), store("sb", keys(3))))
        made = await ask(r, 0, 1, 2, 3, 9, dry_run=True)
        assert made.state is S.PLANNED
        assert made.bytes == 2 * CHUNK_BYTES
        assert [(k.outcome, k.source) for k in made.keys] == [
            ("pending", "a"),
            ("pending", "a"),
            ("present", None),
            ("pending", "b"),  # from its own store
            ("missing", None),
        ]
        assert await poll(r) == []
        assert (await r.control.transfers()).transfers == []
        with pytest.raises(Missing):
            await r.control.get_transfer(made.id)


async def test_what_the_target_s_own_store_has_is_taken_from_there(tmp_path):
    """Two nodes on one mount: the bytes need not come from the other."""
    async with running(tmp_path) as r:
        for node in ("a", "b"):
            await join(r.control, node, stores=("shared",))
        await r.control.report("a", report(0, host(keys(0, 1)), store("shared", keys(0, 1))))
        planned = await ask(r, 0, 1, dry_run=True)
        assert [(k.outcome, k.source) for k in planned.keys] == [("pending", "b")] * 2
        assert (planned.bytes, planned.kv_transfer_params) == (0, {})
        # They come into its memory all the same.
        planned = await ask(r, 0, 1, dry_run=True, byte_budget=CHUNK_BYTES)
        assert outcomes(planned) == [Outcome.PENDING, Outcome.NO_ROOM]
        # What comes up from a store may evict: then from the other's memory.
        planned = await ask(r, 0, 1, dry_run=True, free_only=True)
        assert [(k.outcome, k.source) for k in planned.keys] == [("pending", "a")] * 2
        prefetch = await ask(r, 0, 1, source="own", dry_run=True)
        assert prefetch.bytes == 2 * CHUNK_BYTES


async def test_a_dry_run_counts_within_the_budget(tmp_path):
    async with running(tmp_path) as r:
        await pair(r)
        made = await ask(r, 0, 1, 2, dry_run=True, byte_budget=2 * CHUNK_BYTES)
        assert made.bytes == 2 * CHUNK_BYTES
        assert outcomes(made) == [Outcome.PENDING, Outcome.PENDING, Outcome.NO_ROOM]


async def test_a_database_that_hangs_does_not_hold_up_other_requests(tmp_path, monkeypatch):
    async def hang(*_):
        await asyncio.Event().wait()

    async with running(tmp_path) as r:
        await join(r.control, "a")
        monkeypatch.setattr(records.history, "by_idempotency_key", hang)
        monkeypatch.setattr(records, "_COMMIT_TIMEOUT", 0.05)
        asked = api.TransferRequest(target="a", keys=keys(0), dry_run=True)
        stuck = asyncio.create_task(r.state.transfers.create(asked, "k"))
        await asyncio.sleep(0)
        async with asyncio.timeout(10):
            assert (await r.state.transfers.create(asked, None)).state is TransferState.PLANNED
        with pytest.raises(Busy, match="the database"):
            await stuck


async def test_an_idempotency_key_makes_a_retry_harmless(tmp_path):
    async with running(tmp_path) as r:
        await pair(r)
        both = await asyncio.gather(*(ask(r, 0, idempotency_key="k") for _ in range(2)))
        assert both[0].id == both[1].id
        with pytest.raises(PeerRefused, match="another key"):
            await ask(r, 1, idempotency_key="k")
        assert (await ask(r, 0)).id != both[0].id
        await r.control.cancel_transfer(both[0].id)
        again = await ask(r, 0, idempotency_key="k")
        assert (again.id, again.state) == (both[0].id, S.CANCELLED)
    async with running(tmp_path) as r:
        again = await ask(r, 0, idempotency_key="k")
        assert (again.id, again.state) == (both[0].id, S.CANCELLED)


async def test_orchestrators_are_told_where_to_pull_from(tmp_path):
    async with running(tmp_path) as r:
        await pair(r)
        made = await ask(r, 0, 1)
        assert made.kv_transfer_params == {
            "remote_kv_source": {
                "kv_request_id": made.id,
                "remote_host": "a.test",
                "remote_port": 7801,
            }
        }
        assert made.router_hint == {
            "source_control_endpoint": "tcp://a.test:7801",
            "block_hashes": [0, 1],
        }
        nobody = await ask(r, 50)
        assert (nobody.kv_transfer_params, nobody.router_hint) == ({}, {})


async def test_lists_have_pages_and_counts(tmp_path):
    async with running(tmp_path) as r:
        await pair(r)
        made = []
        for n in range(3):
            made.append((await ask(r, n, 10 + n)).id)
            r.clock.advance(0.01)
        await post(r, made[1], final=True, outcomes={keys(1)[0]: "stored"})
        first = await r.control.transfers(limit=2)
        assert [t.id for t in first.transfers] == made[:2]
        assert [t.counts for t in first.transfers] == [
            {Outcome.PENDING: 2},
            {Outcome.STORED: 1, Outcome.FAILED: 1},
        ]
        rest = await r.control.transfers(after=first.next, limit=2)
        assert ([t.id for t in rest.transfers], rest.next) == (made[2:], None)


async def test_running_transfers_outlive_the_server(tmp_path):
    async with running(tmp_path) as r:
        await pair(r)
        running_one = await ask(r, 0, 1, deadline=60)
        late_one = await ask(r, 2, deadline=5)
        await poll(r)
        await post(r, running_one.id, outcomes={keys(0)[0]: "stored"}, bytes=7)
        clock = r.clock
    async with running(tmp_path, clock) as r:
        clock.advance(6)
        kept = await r.control.get_transfer(running_one.id)
        assert (kept.state, outcomes(kept), kept.bytes) == (S.RUNNING, ["stored", "pending"], 7)
        assert kept.kv_transfer_params == running_one.kv_transfer_params
        assert (await r.control.get_transfer(late_one.id)).state is S.EXPIRED
        # The target is asked again, and answers that it is at it, or done.
        pulls = [c.transfer for c in await poll(r) if c.kind == "pull"]
        assert pulls == [running_one.id]
        done = dict.fromkeys(keys(0, 1), "stored")
        assert await post(r, running_one.id, final=True, outcomes=done) is S.DONE


async def test_ended_transfers_are_forgotten_after_a_while(tmp_path):
    async with running(tmp_path, transfer_retention=100) as r:
        await pair(r)
        made = await ask(r, 0, idempotency_key="k")
        await r.control.cancel_transfer(made.id)
        r.state.transfers.sweep()
        r.clock.advance(99)
        r.state.transfers.forget_old()
        assert (await r.control.get_transfer(made.id)).state is S.CANCELLED
        r.clock.advance(2)
        r.state.transfers.forget_old()
        await r.state.writer.flushed(5)
        with pytest.raises(Missing):
            await r.control.get_transfer(made.id)
        assert (await ask(r, 0, idempotency_key="k")).id != made.id


async def test_many_are_forgotten_in_parts(place, monkeypatch):
    monkeypatch.setattr(transfer_writes, "_MOST_FORGOTTEN", 3)
    monkeypatch.setattr(transfer_writes, "_MOST_CHUNKS_FORGOTTEN", 5)
    async with running(place, transfer_retention=100) as r:
        await pair(r)
        made = [await ask(r, *range(n)) for n in (4, 4, 1, 1, 1, 1)]
        for each in made:
            await r.control.cancel_transfer(each.id)
            r.clock.advance(0.01)
        kept = await ask(r, 9)
        r.clock.advance(101)
        left = []
        r.state.transfers.forget_old()
        for _ in range(4):
            await r.state.writer.flushed(5)
            page = await history.page(r.state.database, None, 10)
            left.append(len(page.transfers))
            r.state.transfers.sweep()
        assert left == [5, 2, 1, 1]
        assert [t.id for t in page.transfers] == [kept.id]
        chunks = await r.state.database.rows(text("SELECT count(*) FROM transfer_chunks"))
        assert chunks[0][0] == 1


async def test_a_source_that_was_forgotten_keeps_nobody_else_waiting(tmp_path):
    async with running(tmp_path) as r:
        await pair(r)
        await join(r.control, "old")
        lost = await ask(r, 0, source="old")
        other = await ask(r, 0, source="a")
        r.clock.advance(5)
        use = api.HostUse(used_bytes=0, capacity_bytes=0, chunks=0)
        for node in ("a", "b"):
            await r.control.heartbeat(node, api.HeartbeatRequest(incarnation="i1", host=use))
        assert r.state.cluster.forget_old(3) == ["old"]
        commands = await poll(r)
        assert {c.transfer: len(c.sources) for c in commands} == {lost.id: 0, other.id: 1}


async def test_active_transfers_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(transfers_module, "MAX_ACTIVE_KEYS", 3)
    async with running(tmp_path) as r:
        await pair(r)
        made = await ask(r, 0, 1)
        with pytest.raises(Busy):
            await ask(r, 2, 3)
        await r.control.cancel_transfer(made.id)
        assert (await ask(r, 2, 3)).state is S.QUEUED


async def test_a_target_may_be_asked_to_evict_nothing(place):
    async with running(place) as r:
        await pair(r)
        made = await ask(r, 0, free_only=True)
        await r.state.writer.flushed(10)
        clock = r.clock
        with pytest.raises(Malformed, match="from other nodes"):
            await ask(r, 3, source="own", free_only=True)
    async with running(place, clock) as r:
        await pair(r)
        (command,) = await poll(r)
        assert (command.transfer, command.free_only) == (made.id, True)


async def test_an_answer_is_the_document_that_its_model_would_make(tmp_path):
    async with running(tmp_path) as r:
        await pair(r)
        made = await ask(r, 0, 1, 2, 3)
        found = dict(zip(keys(0, 1, 2, 3), ["stored", "missing", "present", "stored"], strict=True))
        sources = {keys(0)[0]: "a", keys(3)[0]: "c"}
        await post(
            r, made.id, final=True, outcomes=found, sources=sources, detail='said "\u00e9\n\\"'
        )
        at = f"/v1/transfers/{made.id}"
        for answer in (await r.http.get(at), await r.http.delete(at)):
            told = api.TransferInfo.model_validate_json(answer.content)
            assert answer.json() == told.model_dump(mode="json")
            assert [(k.key, k.outcome, k.source) for k in told.keys] == [
                (key, outcome, sources.get(key)) for key, outcome in found.items()
            ]
            assert list(answer.json()) == list(told.model_dump())
            assert (told.state, told.router_hint) == (TransferState.PARTIAL, made.router_hint)
        lease = await r.http.get(f"/v1/leases/{made.id}")
        of_lease = api.LeaseInfo.model_validate_json(lease.content)
        assert lease.json() == of_lease.model_dump(mode="json")
        assert of_lease.keys == told.keys


async def test_a_long_answer_lets_others_between_and_is_of_one_moment(tmp_path, monkeypatch):
    monkeypatch.setattr(shown, "_PART", 1)
    async with running(tmp_path) as r:
        await pair(r)
        made = await ask(r, 0, 1, 2, 3)
        asking = asyncio.create_task((await r.state.transfers.get(made.id)).json())
        await asyncio.sleep(0)
        stored = dict.fromkeys(keys(2, 3), "stored")
        said = api.Progress(incarnation="i1", transfer=made.id, outcomes=stored, final=False)
        await r.state.transfers.progress("b", said)
        assert not asking.done()
        assert api.TransferInfo.model_validate_json(await asking) == made
        assert outcomes(await r.control.get_transfer(made.id)) == ["pending"] * 2 + ["stored"] * 2
