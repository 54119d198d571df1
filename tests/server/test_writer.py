import asyncio
import sqlite3
from contextlib import asynccontextmanager

import pytest
from server_kit import NAMESPACE, database_url
from sqlalchemy import func, select

from kvstrata.errors import Busy
from kvstrata.keys import make_key
from kvstrata.testing.waiting import until
from kvstrata_server.placement.index import PlacementIndex
from kvstrata_server.placement.placement_writes import (
    AddPlacements,
    ClearPlacements,
    DropPlacements,
    ForgetChunks,
)
from kvstrata_server.sql.database import Database
from kvstrata_server.sql.models import ChunkRow, HotPrefixRow, NamespaceRow, NodeRow, PlacementRow
from kvstrata_server.sql.writer import Writer
from kvstrata_server.sql.writes import CountHits, Hit, PutLocation, PutNamespace, PutNode, SetSeq


def put_node(name: str = "a", incarnation: str = "i1") -> PutNode:
    return PutNode(name, incarnation, 0, None, (), 0, False, 1.0)


def chunk(*numbers: int):
    return [NAMESPACE.key(0, n.to_bytes(8, "big")) for n in numbers]


GROUND = (put_node(), PutNamespace(NAMESPACE.digest, None), PutLocation(1, "a", None, True))


@asynccontextmanager
async def writing(place, busy_timeout: float = 5.0, **bounds: int):
    database = Database(database_url(place), busy_timeout)
    await database.migrate()
    writer = Writer(database, **bounds)
    task = asyncio.create_task(writer.run())
    try:
        yield writer, database
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await database.close()


async def chunks_in(database: Database) -> list[bytes]:
    rows = await database.rows(
        select(ChunkRow.namespace, ChunkRow.chunk)
        .join(PlacementRow, PlacementRow.chunk_id == ChunkRow.id)
        .order_by(ChunkRow.chunk)
    )
    return [row.namespace + row.chunk for row in rows]


async def test_writes_are_applied_in_order(place):
    async with writing(place, batch_rows=2) as (writer, database):
        index = PlacementIndex(database.shared)
        writer.put(*GROUND, AddPlacements(index.add(1, chunk(0, 1, 2, 3, 4))))
        removed = DropPlacements(index.remove(1, chunk(1, 9)))
        # Chunk 5 takes the number that chunk 1 had.
        writer.put(removed, AddPlacements(index.add(1, chunk(0, 5))))
        writer.put(SetSeq("a", "i1", 7), SetSeq("a", "another", 9))
        await writer.flushed(5)
        assert await chunks_in(database) == chunk(0, 2, 3, 4, 5)
        assert (await database.rows(select(NodeRow.next_seq)))[0][0] == 7
        assert writer.unwritten_rows == 0
        writer.put(ClearPlacements(1))
        await writer.flushed(5)
        assert await chunks_in(database) == []


async def test_a_namespace_mentioned_is_completed_later_and_stays(place):
    async with writing(place) as (writer, database):
        for document in (None, NAMESPACE.document, None):
            writer.put(PutNamespace(NAMESPACE.digest, document))
        await writer.flushed(5)
        assert (await database.rows(select(NamespaceRow.document)))[0][0] == NAMESPACE.document


async def test_the_queue_is_bounded_and_says_so(tmp_path):
    database = Database(database_url(tmp_path))
    writer = Writer(database, max_rows=3)
    writer.require_room()
    writer.put(AddPlacements(PlacementIndex().add(1, chunk(0, 1, 2, 3))))
    with pytest.raises(Busy, match="8 rows"):
        writer.require_room()
    with pytest.raises(Busy, match="healthz"):
        await writer.flushed(0.01)
    await writer.drain(0.01)
    await database.close()


async def test_a_locked_database_is_tried_again(tmp_path):
    async with writing(tmp_path, busy_timeout=0.01) as (writer, database):
        blocker = sqlite3.connect(tmp_path / "control.sqlite", isolation_level=None)
        blocker.execute("BEGIN IMMEDIATE")
        writer.put(*GROUND)
        with pytest.raises(Busy):
            await writer.flushed(0.3)
        assert "locked" in writer.problem
        blocker.execute("ROLLBACK")
        blocker.close()
        await writer.flushed(5)
        assert writer.problem == ""
        assert (await database.rows(select(func.count()).select_from(NodeRow)))[0][0] == 1


async def test_one_impossible_write_does_not_block_the_others(place, caplog):
    async with writing(place) as (writer, database):
        index = PlacementIndex(database.shared)
        nowhere = AddPlacements(index.add(99, chunk(8)))  # no such location
        first, second = (AddPlacements(index.add(1, chunk(n))) for n in (0, 1))
        writer.put(*GROUND, first, nowhere, second)
        await writer.flushed(5)
        assert await chunks_in(database) == chunk(0, 1)
        assert writer.dropped == 1
        assert "dropped a write" in caplog.text


async def test_nor_does_one_that_the_driver_can_not_send(place, caplog):
    async with writing(place) as (writer, database):
        huge = PutNode("huge", "i1", 0, None, (), 1 << 70, False, 0.0)
        writer.put(huge)
        writer.put(*GROUND)
        await writer.flushed(5)
        assert writer.dropped == 1
        assert [row.id for row in await database.rows(select(NodeRow.id))] == ["a"]


async def test_placements_of_many_kinds_of_keys_arrive_as_they_are(place):
    async with writing(place) as (writer, database):
        index = PlacementIndex(database.shared)
        other = bytes(range(16))
        asked = [
            *chunk(0, 1),
            NAMESPACE.key(7, b"\xff" * 32),
            NAMESPACE.key(0, b"\x00"),
            make_key(other, 0, b"\x00\x00"),
        ]
        writer.put(*GROUND, PutNamespace(other, None), AddPlacements(index.add(1, asked)))
        await writer.flushed(5)
        assert sorted(await chunks_in(database)) == sorted(asked)
        writer.put(DropPlacements(index.remove(1, asked[2:4])), ForgetChunks())
        await writer.flushed(5)
        left = [*asked[:2], asked[4]]
        assert sorted(await chunks_in(database)) == sorted(left)
        rows = await database.rows(select(func.count()).select_from(ChunkRow))
        assert rows[0][0] == 3


async def test_a_database_that_goes_away_is_tried_again(postgres, postgres_address):
    async with writing(postgres_address) as (writer, database):
        writer.put(*GROUND)
        await writer.flushed(5)
        # What a restart of PostgreSQL looks like from here.
        await postgres.end_sessions(database.engine.url.database)
        writer.put(SetSeq("a", "i1", 5))
        await writer.flushed(10)
        assert (await database.rows(select(NodeRow.next_seq)))[0][0] == 5
        assert writer.dropped == 0


async def test_a_write_that_gets_no_answer_is_a_problem_before_it_is_given_up(
    tmp_path, monkeypatch
):
    async with writing(tmp_path) as (writer, database):
        answer = asyncio.Event()

        async def lock(_):
            await answer.wait()

        monkeypatch.setattr(database, "lock", lock)
        monkeypatch.setattr("kvstrata_server.sql.writer._SLOW_SECONDS", 0.05)
        writer.put(put_node())
        await until(lambda: "no answer to a write for" in writer.problem)
        answer.set()
        await writer.flushed(5)
        await until(lambda: not writer.problem)


async def test_hits_add_up_and_old_prefixes_are_forgotten(place):
    async with writing(place) as (writer, database):
        first, second = chunk(0, 1)
        writer.put(CountHits([Hit(first, 3, 2, 10, 1.0), Hit(second, 1, 1, 1, 2.0)], 0.0))
        writer.put(CountHits([Hit(second, 1, 4, 5, 3.0)], forget_before=2.5))
        await writer.flushed(5)
        rows = await database.rows(select(HotPrefixRow.hits, HotPrefixRow.nodes))
        assert [tuple(row) for row in rows] == [(6, 4)]


async def test_a_pool_without_a_connection_left_drops_nothing(tmp_path):
    database = Database(database_url(tmp_path))
    await database.migrate()
    database.engine.pool._timeout = 0.05
    writer = Writer(database)
    held = [await database.engine.connect() for _ in range(15)]
    task = asyncio.create_task(writer.run())
    writer.put(put_node("a"))
    async with asyncio.timeout(10):
        while not writer.problem:  # noqa: ASYNC110 - told by nobody
            await asyncio.sleep(0.01)
    for connection in held:
        await connection.close()
    await writer.flushed(10)
    assert (writer.dropped, writer.problem) == (0, "")
    assert await database.rows(select(NodeRow.id)) == [("a",)]
    task.cancel()
    await database.close()
