import shutil
import sqlite3
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from server_kit import database_url
from sqlalchemy import create_engine, text

from kvstrata.errors import ConfigError
from kvstrata_server import database as database_module
from kvstrata_server.database import Database, alembic_config, migrations_dir
from kvstrata_server.models import Base


async def test_the_server_migrates_to_what_the_models_say(tmp_path):
    database = Database(database_url(tmp_path))
    await database.migrate()
    await database.migrate()  # a second start finds nothing to do
    await database.close()
    engine = create_engine(f"sqlite:///{tmp_path / 'control.sqlite'}")
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []
        assert (
            context.get_current_revision()
            == ScriptDirectory.from_config(alembic_config()).get_current_head()
        )
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
    engine.dispose()


def test_down_and_up_again(tmp_path):
    engine = create_engine(f"sqlite:///{tmp_path / 'x.sqlite'}")
    with engine.begin() as connection:
        command.upgrade(alembic_config(connection), "head")
    with engine.begin() as connection:
        command.downgrade(alembic_config(connection), "base")
    tables = "SELECT name FROM sqlite_master WHERE type IN ('table', 'index')"
    with sqlite3.connect(tmp_path / "x.sqlite") as plain:
        left = [name for (name,) in plain.execute(tables) if not name.startswith("sqlite_")]
    plain.close()
    assert left == ["alembic_version"]
    with engine.begin() as connection:
        command.upgrade(alembic_config(connection), "head")
        context = MigrationContext.configure(connection)
        assert compare_metadata(context, Base.metadata) == []
    engine.dispose()


async def test_foreign_keys_are_enforced(tmp_path):
    database = Database(database_url(tmp_path))
    assert (await database.rows(text("PRAGMA foreign_keys")))[0][0] == 1
    await database.close()


def test_an_installed_wheel_has_them_inside_the_package(tmp_path, monkeypatch):
    package = tmp_path / "site-packages" / "kvstrata_server"
    package.mkdir(parents=True)
    monkeypatch.setattr(database_module, "__file__", str(package / "database.py"))
    with pytest.raises(ConfigError, match="install kvstrata again"):
        migrations_dir()
    shutil.copytree(Path(__file__).parents[2] / "migrations", package / "migrations")
    assert migrations_dir() == package / "migrations"
