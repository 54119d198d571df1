"""Databases that can't be opened: what `kvstrata server` and `kvstrata token` say about them."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest
from server_kit import database_url, lay_out
from sqlalchemy import make_url, text

from kvstrata.config import ServerSettings
from kvstrata.errors import ConfigError
from kvstrata.testing.waiting import until
from kvstrata_server.access import token_command
from kvstrata_server.app import create_app
from kvstrata_server.sql import database as database_module
from kvstrata_server.sql.database import Database

pytestmark = pytest.mark.parametrize("by", ["server", "token"])


@pytest.fixture(params=["sqlite", "postgresql"])
def migrated(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        lay_out(tmp_path)
        return database_url(tmp_path)
    return str(request.getfixturevalue("postgres_address"))


@pytest.fixture(params=["sqlite", "postgresql"])
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return database_url(tmp_path)
    postgres = request.getfixturevalue("postgres")
    return str(postgres.address(asyncio.run(postgres.new_database())))


def execute(address: str, statement: str) -> None:
    async def run() -> None:
        database = Database(address)
        async with database.engine.begin() as connection:
            await connection.execute(text(statement))
        await database.close()

    asyncio.run(run())


def refusal(by: str, address: str, *words: str) -> str:
    """What is said instead of starting."""

    with pytest.raises(ConfigError) as raised:
        start(by, address, *words)
    return str(raised.value)


def start(by: str, address: str, *words: str) -> None:
    async def serve() -> None:
        app = create_app(ServerSettings(database=address))
        async with app.router.lifespan_context(app):
            pass

    if by == "server":
        asyncio.run(serve())
    else:
        token_command.main(["--database", address, *(words or ["list"])])


def test_a_database_of_a_newer_version(migrated: str, by: str) -> None:
    execute(migrated, "UPDATE alembic_version SET version_num = '0999'")
    said = refusal(by, migrated)
    assert "made by a newer kvstrata (schema 0999; this one knows up to 0" in said
    assert "install that version again" in said
    execute(migrated, "UPDATE alembic_version SET version_num = '3f1c22bd0a41'")
    assert "another program keeps its tables there" in refusal(by, migrated)


def test_a_database_of_something_else(empty: str, by: str) -> None:
    execute(empty, "CREATE TABLE nodes (id INTEGER)")
    assert "tables that kvstrata did not make (nodes): choose another" in refusal(by, empty)


def test_a_file_that_is_no_database(tmp_path: Path, by: str) -> None:
    (tmp_path / "control.sqlite").write_bytes(b"a letter, and by no means a database" * 100)
    said = refusal(by, database_url(tmp_path))
    assert "file is not a database. It is something else: choose another file" in said


def test_a_folder_in_its_place(tmp_path: Path, by: str) -> None:
    (tmp_path / "control.sqlite").mkdir()
    assert "May this user read and write it?" in refusal(by, database_url(tmp_path))


def test_nobody_listens_there(by: str) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        said = refusal(by, f"postgresql+asyncpg://u:secret@127.0.0.1:{port}/k")
    assert "Does PostgreSQL run there" in said
    assert "read and write" not in said
    assert "secret" not in said


def test_nobody_answers_there(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_module, "_OPEN_SECONDS", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        said = refusal(by, f"postgresql+asyncpg://u:secret@127.0.0.1:{port}/k")
    assert "gave no answer within 0.2 s: see whether that is its address" in said
    assert "secret" not in said


async def test_who_waits_for_another_server_says_so(
    postgres_address: str, by: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(database_module, "_LONG_SECONDS", 0.05)
    first, second = Database(postgres_address), Database(postgres_address)
    async with first.engine.begin() as connection:
        await first.lock(connection)
        waiting = asyncio.create_task(second.migrate())
        await until(lambda: "waiting for another server" in caplog.text)
        assert not waiting.done()
    await waiting
    await first.close()
    await second.close()


def test_postgresql_has_no_such_database_or_user(postgres_address: str, by: str) -> None:
    address = make_url(postgres_address)
    assert "does not exist. Make it (`createdb`)" in refusal(
        by, address.set(database="none").render_as_string()
    )
    assert "Are user and password right" in refusal(
        by, address.set(username="stranger").render_as_string()
    )


def test_a_database_that_takes_no_writes(
    migrated: str,
    by: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A file that this user may only read, as it looks to root, and PostgreSQL's standby."""
    if migrated.startswith("sqlite"):
        monkeypatch.chdir(tmp_path)
        migrated = "sqlite+aiosqlite:///file:control.sqlite?mode=ro&uri=true"
        told = "Let this user write it"
    else:
        name = make_url(migrated).database
        execute(migrated, f"ALTER DATABASE {name} SET default_transaction_read_only = on")
        told = "the primary, not a standby"
    said = refusal(by, migrated, "create", "x", "--role", "read")
    assert "can't be written" in said
    assert told in said
    if by == "token":
        start(by, migrated)
        assert "Tokens" in capsys.readouterr().out
