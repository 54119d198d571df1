"""What keeps a database from being opened, and what to do about it."""

from __future__ import annotations

import socket
import sqlite3

from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect
from sqlalchemy.exc import DBAPIError

from kvstrata.errors import ConfigError
from kvstrata_server.sql.models import Base

__all__ = ["advice", "require_ours", "require_writable"]


def require_ours(connection: Connection, config: Config, shown: str) -> None:
    """Raises `ConfigError` for the database of a newer version, or of something else."""
    scripts = ScriptDirectory.from_config(config)
    known = {script.revision for script in scripts.walk_revisions()}
    found = MigrationContext.configure(connection).get_current_heads()
    newest = scripts.get_current_head() or ""
    unknown = sorted(set(found) - known)
    if not found:
        tables = set(inspect(connection).get_table_names())
        if foreign := sorted(tables & Base.metadata.tables.keys()):
            raise ConfigError(
                f"server.database {shown} has tables that kvstrata did not make "
                f"({', '.join(foreign)}): choose another database, best one of its own"
            )
    elif unknown and all(_follows(version, newest) for version in unknown):
        raise ConfigError(
            f"server.database {shown} was made by a newer kvstrata (schema {', '.join(unknown)}; "
            f"this one knows up to {newest}): install that version again, restore the copy from "
            "before it, or choose another database"
        )
    elif unknown:
        raise ConfigError(
            f"server.database {shown} has the schema {', '.join(unknown)}, which no kvstrata "
            "made: another program keeps its tables there. Choose another database"
        )


def require_writable(connection: Connection, shown: str) -> None:
    """Raises `ConfigError` where nothing can be written: a file that this user may only read, a
    standby. Outside a transaction, or at its very start."""
    if connection.dialect.name == "sqlite":
        try:
            # To begin is not enough: of a file that can only be read SQLite begins to read.
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            connection.exec_driver_sql("PRAGMA user_version = 0")
            connection.exec_driver_sql("ROLLBACK")
        except DBAPIError as e:
            raise ConfigError(
                f"server.database {shown} can't be written: {e.orig}. {advice(e)}"
            ) from e
    elif connection.exec_driver_sql("SHOW transaction_read_only").scalar() == "on":
        raise ConfigError(
            f"server.database {shown} can't be written: PostgreSQL takes no writes there. Name the "
            "primary, not a standby, and see default_transaction_read_only"
        )


def _follows(version: str, newest: str) -> bool:
    """Ours are numbers of one length; those of others, as a rule, random hexadecimal."""
    return version.isdecimal() and len(version) == len(newest) and version > newest


_SQLITE = {
    sqlite3.SQLITE_NOTADB: "It is something else: choose another file",
    sqlite3.SQLITE_CORRUPT: "It is damaged: put a copy in its place, or move it away, and nodes "
    "report anew what they hold",
    sqlite3.SQLITE_READONLY: "Let this user write it, and the -wal and -shm beside it",
    sqlite3.SQLITE_BUSY: "Something else uses it: end that, or choose another file",
    sqlite3.SQLITE_FULL: "Make room on its file system",
    sqlite3.SQLITE_IOERR: "Its file system or disk has a fault: the kernel's log says more",
}
# Classes of PostgreSQL's SQLSTATE.
_POSTGRESQL = {
    "08": "Does PostgreSQL run there, and is it reached under this address?",
    "25": "PostgreSQL takes no writes there: name the primary, not a standby",
    "28": "Are user and password right, and does pg_hba.conf let this user in?",
    "3D": "Make it (`createdb`), or correct the name",
    "42": "Give this user the right to make tables there (GRANT, or own the database)",
    "53": "It has no more connections, memory or disk to give",
    "57": "PostgreSQL starts or ends: try again soon",
}


def advice(error: Exception) -> str:
    """One sentence on what to do about what a driver said."""
    error = getattr(error, "orig", error)
    if isinstance(error, sqlite3.Error):
        # The lowest byte is the code, what is above it says more of it.
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        return _SQLITE.get(code, "May this user read and write it?")
    state = getattr(error, "sqlstate", None) or ""
    if isinstance(error, socket.gaierror):
        return "Is the name of the host right?"
    if isinstance(error, OSError) or not state:
        return _POSTGRESQL["08"]
    return _POSTGRESQL.get(state[:2], "PostgreSQL's log says more")
