import asyncio
import shutil
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from server_kit import NAMESPACE, database_url
from sqlalchemy import Connection, inspect, text

from kvstrata.errors import ConfigError
from kvstrata_server.sql import database as database_module
from kvstrata_server.sql.database import Database, alembic_config, migrations_dir
from kvstrata_server.sql.models import Base


@pytest.fixture
def empty(request, tmp_path, kind):
    """Address of a database that was never migrated."""
    if kind == "sqlite":
        return database_url(tmp_path)
    postgres = request.getfixturevalue("postgres")
    return postgres.address(asyncio.run(postgres.new_database()))


@pytest.fixture(params=["sqlite", "postgresql"])
def kind(request):
    return request.param


def differences(connection: Connection) -> list[object]:
    context = MigrationContext.configure(connection, opts={"compare_type": True})
    return compare_metadata(context, Base.metadata)


async def test_the_server_migrates_to_what_the_models_say(empty, kind):
    database = Database(empty)
    await database.migrate()
    await database.migrate()  # a second start finds nothing to do
    async with database.engine.begin() as connection:
        assert await connection.run_sync(differences) == []
        version = (await connection.execute(text("SELECT * FROM alembic_version"))).scalar_one()
        assert version == ScriptDirectory.from_config(alembic_config()).get_current_head()
        if kind == "sqlite":
            assert (await connection.execute(text("PRAGMA journal_mode"))).scalar() == "wal"
    await database.close()


async def test_down_and_up_again(empty):
    database = Database(empty)
    await database.migrate()
    async with database.engine.begin() as connection:
        await fill(connection)
        await connection.run_sync(lambda c: command.downgrade(alembic_config(c), "base"))
        left = await connection.run_sync(
            lambda c: [*inspect(c).get_table_names(), *inspect(c).get_view_names()]
        )
        assert left == ["alembic_version"]
    await database.migrate()
    async with database.engine.connect() as connection:
        assert await connection.run_sync(differences) == []
    await database.close()


async def fill(connection) -> None:
    """A row in every table of the index: going down has to do with data."""
    for statement in (
        "INSERT INTO namespaces VALUES (:digest, :document)",
        "INSERT INTO nodes (id, incarnation, next_seq, transports, capacity_bytes, gone,"
        " registered) VALUES ('a', 'i', 7, '[]', 0, false, 1.0)",
        "INSERT INTO stores VALUES ('s', 'fs')",
        "INSERT INTO locations VALUES (9000000000000000001, 'a', NULL, true), (2, 'a', 's', true)",
        "INSERT INTO chunks VALUES (5, :digest, :chunk), (6, :digest, :chunk)",
        "INSERT INTO placements VALUES (9000000000000000001, 5), (2, 5), (2, 6)",
        "INSERT INTO hot_prefixes VALUES (:digest, :chunk, 3, 2, 40, 1.0)",
        "INSERT INTO change_log (server, time, entry) VALUES ('x', 1.0, :chunk)",
        "INSERT INTO quotas VALUES ('', 9007199254740992, NULL, 3, 1.0)",
    ):
        names = {"digest": NAMESPACE.digest, "document": NAMESPACE.document, "chunk": b"\0\0\0\2ab"}
        given = {name: value for name, value in names.items() if f":{name}" in statement}
        await connection.execute(text(statement), given)


async def test_people_find_what_the_views_are_called_after(empty):
    database = Database(empty)
    await database.migrate()
    async with database.engine.begin() as connection:
        await fill(connection)
    by_node = await database.rows(
        text("SELECT node, location, tier, chunks FROM placements_by_node ORDER BY location")
    )
    assert [tuple(row) for row in by_node] == [("a", "host", "host", 1), ("a", "s", "fs", 2)]
    by_namespace = await database.rows(text("SELECT * FROM placements_by_namespace"))
    assert [tuple(row) for row in by_namespace] == [
        (NAMESPACE.digest.hex(), "tiny", "r1", "", 2, 3, 1)
    ]
    hottest = await database.rows(text("SELECT * FROM hottest_prefixes"))
    assert [tuple(row) for row in hottest] == [
        (NAMESPACE.digest.hex(), "tiny", "00000002", b"ab".hex(), 3, 2, 40, 1.0)
    ]
    await database.close()


async def test_placements_of_an_older_version_are_asked_for_again(empty):
    database = Database(empty)
    async with database.engine.begin() as connection:
        await connection.run_sync(lambda c: command.upgrade(alembic_config(c), "0002"))
        for statement in (
            "INSERT INTO nodes (id, incarnation, next_seq, transports, capacity_bytes, gone,"
            " registered) VALUES ('a', 'i', 7, '[]', 0, false, 1.0)",
            "INSERT INTO locations VALUES (1, 'a', NULL, true)",
        ):
            await connection.execute(text(statement))
    await database.migrate()
    assert (await database.rows(text("SELECT next_seq FROM nodes")))[0][0] == 0
    assert (await database.rows(text("SELECT id FROM locations")))[0][0] == 1
    await database.close()


async def test_foreign_keys_are_enforced(tmp_path):
    database = Database(database_url(tmp_path))
    assert (await database.rows(text("PRAGMA foreign_keys")))[0][0] == 1
    await database.close()


def test_an_installed_wheel_has_them_inside_the_package(tmp_path, monkeypatch):
    package = tmp_path / "site-packages" / "kvstrata_server"
    (package / "sql").mkdir(parents=True)
    monkeypatch.setattr(database_module, "__file__", str(package / "sql" / "database.py"))
    with pytest.raises(ConfigError, match="install kvstrata again"):
        migrations_dir()
    shutil.copytree(Path(__file__).parents[2] / "migrations", package / "migrations")
    assert migrations_dir() == package / "migrations"
