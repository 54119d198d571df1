"""Databases that are slow, locked or hung, when they are asked, and when they are told."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from server_kit import running
from sqlalchemy import make_url, select, text

from kvstrata import api
from kvstrata.config import ServerSettings
from kvstrata.errors import Busy, ConfigError
from kvstrata.testing.waiting import until
from kvstrata_server.app import create_app
from kvstrata_server.sql.database import Database
from kvstrata_server.sql.models import NodeRow, TransferRow
from kvstrata_server.sql.writer import Writer
from kvstrata_server.sql.writes import PutNode

TRANSFERS = select(TransferRow.id)
MOST = 8
SOON = 0.3

PATHS = (
    "/v1/transfers",
    "/v1/transfers/t",
    "/v1/leases/t",
    "/v1/evictions",
    "/v1/evictions/e",
    "/v1/audit",
)


@asynccontextmanager
async def opened(address: str) -> AsyncIterator[Database]:
    database = Database(address)
    database.read_seconds = SOON
    try:
        yield database
    finally:
        await database.close()


@asynccontextmanager
async def locked(address: str) -> AsyncIterator[asyncpg.Connection]:
    """By somebody who works on the tables meanwhile."""
    url = make_url(address)
    connection = await asyncpg.connect(
        user=url.username, database=url.database, host=url.query["host"]
    )
    try:
        await connection.execute("BEGIN")
        await connection.execute(
            "LOCK TABLE transfers, evictions, audit_log IN ACCESS EXCLUSIVE MODE"
        )
        yield connection
    finally:
        await connection.close()


class Hanging:
    """A way to PostgreSQL on which, once it is `hung`, nothing travels any more."""

    def __init__(self, address: str, folder: Path) -> None:
        url = make_url(address)
        self.address = str(url.set(query={"host": str(folder)}))
        self.hung = False
        self.links: set[asyncio.Task[None]] = set()
        self._to = f"{url.query['host']}/.s.PGSQL.5432"
        self._at = folder / ".s.PGSQL.5432"

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        server = await asyncio.start_unix_server(self._accept, self._at)
        try:
            yield
        finally:
            server.close()
            for link in self.links:
                link.cancel()
            await asyncio.gather(*self.links, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = asyncio.create_task(self._link(reader, writer))
        self.links.add(link)
        link.add_done_callback(self.links.discard)

    async def _link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_unix_connection(self._to)
        pumps = [self._pump(reader, back), self._pump(there, writer)]
        tasks = [asyncio.create_task(pump) for pump in pumps]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            for end in (back, writer):
                end.transport.abort()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            if not self.hung:
                sink.write(data)


async def seconds(work: Any) -> tuple[float, Any]:
    loop = asyncio.get_running_loop()
    began = loop.time()
    found = (await asyncio.gather(work, return_exceptions=True))[0]
    return loop.time() - began, found


async def test_a_slow_database_holds_up_nobody_for_long(postgres_address: str) -> None:
    async with opened(postgres_address) as database:
        async with locked(postgres_address) as blocker:
            took, found = await seconds(
                asyncio.gather(
                    *(database.rows(TRANSFERS) for _ in range(40)), return_exceptions=True
                )
            )
            assert took < 8
            assert [type(each) for each in found] == [Busy] * 40
            others = (
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
                "AND pid <> pg_backend_pid()"
            )
            assert await blocker.fetchval(others) <= MOST
            async with database.engine.connect() as connection:  # left for who writes
                assert (await connection.execute(text("SELECT 1"))).scalar() == 1
        assert await database.rows(TRANSFERS) == []


async def test_one_that_hangs_holds_a_bounded_number_of_connections(
    postgres_address: str, tmp_path: Path
) -> None:
    way = Hanging(postgres_address, tmp_path)
    async with way.running(), opened(way.address) as database:
        assert await database.rows(TRANSFERS) == []
        way.hung = True
        for _ in range(3):
            took, found = await seconds(
                asyncio.gather(
                    *(database.rows(TRANSFERS) for _ in range(20)), return_exceptions=True
                )
            )
            assert took < 8
            assert [type(each) for each in found] == [Busy] * 20
            assert len(way.links) <= 2 * MOST  # each may ask on another one to be cancelled
        took, _ = await seconds(database.close())
        assert took < 12


async def test_what_it_did_not_take_is_written_on_a_new_connection(
    postgres_address: str, tmp_path: Path
) -> None:
    way = Hanging(postgres_address, tmp_path)
    async with way.running(), opened(way.address) as database:
        writer = Writer(database, batch_seconds=SOON)
        writing = asyncio.create_task(writer.run())
        writer.put(PutNode("a", "i1", 0, None, (), 1, False, 0.0))
        await writer.flushed(5)
        way.hung = True
        writer.put(PutNode("b", "i1", 0, None, (), 1, False, 0.0))
        await until(lambda: writer.problem)
        assert writer.problem == "it does not answer"
        way.hung = False  # for those that are made now: what was sent before is lost
        await writer.flushed(10)
        assert writer.problem == ""
        rows = await database.rows(select(NodeRow.id).order_by(NodeRow.id))
        assert [row.id for row in rows] == ["a", "b"]
        writing.cancel()
        await asyncio.wait({writing})


async def test_a_restart_of_the_database_is_no_failure(
    postgres: Any, postgres_address: str
) -> None:
    async with opened(postgres_address) as database:
        assert await database.rows(TRANSFERS) == []
        await postgres.end_sessions(database.engine.url.database)
        assert await database.rows(TRANSFERS) == []


async def test_sqlite_that_somebody_keeps_to_himself(tmp_path: Path) -> None:
    path = tmp_path / "control.sqlite"
    async with opened(f"sqlite+aiosqlite:///{path}") as database:
        await database.migrate()
        await database.engine.dispose()  # or the other one would not get it
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("PRAGMA locking_mode=EXCLUSIVE")
        other.execute("BEGIN EXCLUSIVE")
        took, found = await seconds(
            asyncio.gather(*(database.rows(TRANSFERS) for _ in range(20)), return_exceptions=True)
        )
        assert took < 8
        assert [type(each) for each in found] == [Busy] * 20
        other.close()


async def test_a_server_that_can_not_read_at_its_start_says_so(postgres_address: str) -> None:
    app = create_app(ServerSettings(database=postgres_address))
    app.state.control.database.read_seconds = SOON
    async with locked(postgres_address):
        with pytest.raises(ConfigError, match=r"did not answer within|can't be read"):
            await app.state.control.open()


@pytest.mark.parametrize("path", PATHS)
async def test_requests_are_told_to_come_again(postgres_address: str, path: str) -> None:
    async with running(postgres_address) as r:
        r.state.database.read_seconds = SOON
        async with locked(postgres_address):
            took, answer = await seconds(r.http.get(path))
        assert took < 20  # of which ten for the writer, should it be at these tables
        assert answer.status_code == 503, answer.text
        assert api.Problem.model_validate_json(answer.content).retryable
        assert answer.headers["retry-after"]
