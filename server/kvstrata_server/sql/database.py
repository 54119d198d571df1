"""The engine, its settings, and the migrations applied at start."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, Executable, event, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    InterfaceError,
    InvalidRequestError,
    NoSuchModuleError,
    OperationalError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from kvstrata.errors import ConfigError
from kvstrata_server.sql.file import DatabaseFile
from kvstrata_server.sql.opening import advice, require_ours, require_writable
from kvstrata_server.sql.reads import Reads

__all__ = ["Database", "alembic_config", "may_pass", "migrations_dir"]

log = logging.getLogger(__name__)

_STREAM_ROWS = 10_000
_SCAN_ROWS = 50_000
_READ_SECONDS = 60.0
_CLOSE_SECONDS = 5.0
_OPEN_SECONDS = 30.0
"""For the first answer of a database."""
_LONG_SECONDS = 5.0
# Any number that nothing else in the database locks: "kvstrata" in ASCII.
_LOCK = text("SELECT pg_advisory_xact_lock(7743121206571627617)")

# Classes of PostgreSQL's SQLSTATE: connection, rollback, resources, intervention, system.
_PASSING = frozenset({"08", "40", "53", "55", "57", "58"})


def migrations_dir() -> Path:
    """`kvstrata_server/migrations` in an installed wheel, `migrations/` in a checkout."""
    here = Path(__file__).resolve().parents[1]
    for path in (here / "migrations", here.parents[1] / "migrations"):
        if (path / "env.py").is_file():
            return path
    raise ConfigError(f"migrations are missing beside {here}: install kvstrata again")


def alembic_config(connection: Connection | None = None, url: str = "") -> Config:
    """Configuration for `alembic.command`: on a connection, or on an address of its own."""
    config = Config()
    config.set_main_option("script_location", str(migrations_dir()))
    config.attributes["connection"] = connection
    config.attributes["url"] = url
    return config


class Database:
    """One SQLAlchemy engine. Raises `ConfigError` on an address that can't work."""

    def __init__(self, url: str, busy_timeout: float = 10.0) -> None:
        try:
            self._url = make_url(url)
            self.engine: AsyncEngine = create_async_engine(url)
        except (ArgumentError, InvalidRequestError, NoSuchModuleError, ImportError) as e:
            raise ConfigError(
                f"server.database: {str(e).rstrip('.')}. Write an address with an async driver "
                "that is installed, as in sqlite+aiosqlite:///kvstrata.sqlite or "
                "postgresql+asyncpg://user@host/kvstrata"
            ) from e
        backend = self._url.get_backend_name()
        if backend not in ("sqlite", "postgresql"):
            raise ConfigError(
                f"server.database: {backend} is not supported; use sqlite or postgresql"
            )
        self.shared = backend == "postgresql"
        """Whether other servers may use it at the same time."""
        path = self._url.database
        self._file = (
            DatabaseFile(path, self.shown)
            if path and path != ":memory:" and not self.shared
            else None
        )
        self._reads = Reads(self.engine, may_pass, statement_timeout=self.shared)
        self.read_seconds = _READ_SECONDS
        """How long a read may take. Whom somebody waits for, has less patience."""
        if not self.shared:
            event.listen(
                self.engine.sync_engine, "connect", partial(_set_pragmas, int(busy_timeout * 1000))
            )

    @property
    def shown(self) -> str:
        """The address without its password."""
        return self._url.render_as_string(hide_password=True)

    async def migrate(self) -> None:
        """Bring the schema to the newest version. Raises `ConfigError`, with what to do, if it
        can't be opened or written, or is a newer version's or no database of ours."""
        if self._file is not None:
            await asyncio.to_thread(self._file.claim)
        await self._prepared(upgrade=True)
        if self._file is not None:
            await asyncio.to_thread(self._file.opened)

    async def require_ours(self) -> None:
        """Raises as `migrate` does, and changes nothing: for what is beside a server that runs."""
        await self._prepared(upgrade=False)

    async def _prepared(self, upgrade: bool) -> None:
        try:
            async with asyncio.timeout(_OPEN_SECONDS), self.engine.connect() as connection:
                await connection.execute(text("SELECT 1"))
        except (DBAPIError, OSError) as e:
            if not isinstance(e, TimeoutError):
                raise self._closed(e) from e
            raise ConfigError(
                f"server.database {self.shown} gave no answer within {_OPEN_SECONDS:g} s: see "
                "whether that is its address, and whether it hangs"
            ) from e
        try:
            async with self.engine.begin() as connection:
                if upgrade:
                    with _told("waiting for another server that changes %s", self.shown):
                        await self.lock(connection)
                await connection.run_sync(partial(_prepare, self.shown, upgrade))
        except (DBAPIError, OSError) as e:
            raise self._closed(e) from e

    def _closed(self, error: Exception) -> ConfigError:
        return ConfigError(
            f"server.database {self.shown} can't be opened: {getattr(error, 'orig', error)}. "
            f"{advice(error)}"
        )

    async def require_kept(self) -> None:
        """Raises `OSError`, with what to do, where what is written would be lost: SQLite's file
        was removed or replaced."""
        if self._file is not None:
            await asyncio.to_thread(self._file.check)

    async def lock(self, connection: AsyncConnection) -> None:
        """In a transaction: be the only server that writes until its end."""
        if self.shared:
            await connection.execute(_LOCK)

    async def stream(self, select: Executable) -> AsyncIterator[list[Any]]:
        """Rows in parts, so that a big table neither fills memory nor holds the loop; as long as
        it takes."""
        async with self.engine.connect() as connection:
            result = await connection.stream(select)
            async for part in result.partitions(_STREAM_ROWS):
                yield list(part)

    async def scan(self, select: Executable) -> AsyncIterator[list[tuple[Any, ...]]]:
        """Like `stream`, for tables of millions of rows in SQLite: as its driver gives them, which
        is several times faster."""
        statement = str(select.compile(dialect=self.engine.dialect))  # type: ignore[attr-defined]
        async with self.engine.connect() as connection:
            driver = (await connection.get_raw_connection()).driver_connection
            if driver is None:
                raise OSError(f"{self.shown} closed its connection")
            async with driver.execute(statement) as cursor:
                while part := await cursor.fetchmany(_SCAN_ROWS):
                    yield part

    async def rows(self, select: Executable) -> list[Any]:
        """All of them. Raises `Busy` after `read_seconds`, and where the database may give them
        later."""

        async def read(connection: AsyncConnection) -> list[Any]:
            rows: list[Any] = []
            for part in (await connection.execute(select)).partitions(_STREAM_ROWS):
                rows += part
                await asyncio.sleep(0)
            return rows

        return await self._reads.run(read, self.read_seconds)

    async def close(self) -> None:
        await self._reads.close(_CLOSE_SECONDS)
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self.engine.dispose()
        except TimeoutError:
            log.warning("the database does not answer: its connections end with this process")
        if self._file is not None:
            self._file.release()


@contextmanager
def _told(what: str, *about: str) -> Iterator[None]:
    """Log it if it takes long."""
    handle = asyncio.get_running_loop().call_later(_LONG_SECONDS, log.warning, what, *about)
    try:
        yield
    finally:
        handle.cancel()


def may_pass(error: Exception) -> bool:
    """Whether the database may take the same statement later: it is locked, full, away."""
    passing = OperationalError | InterfaceError | PoolTimeout | OSError | TimeoutError
    if isinstance(error, passing):
        return True
    if isinstance(error, DBAPIError):
        state = getattr(error.orig, "sqlstate", None) or ""
        return error.connection_invalidated or state[:2] in _PASSING
    return False


def _prepare(shown: str, upgrade: bool, connection: Connection) -> None:
    config = alembic_config(connection)
    require_ours(connection, config, shown)
    if upgrade:
        require_writable(connection, shown)
        command.upgrade(config, "head")


def _set_pragmas(busy_ms: int, connection: Any, record: object) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    # In WAL mode a commit then survives the death of the process, though not a power cut that
    # takes the last transactions. What those held is soft state, or was told to be accepted.
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.execute(f"PRAGMA busy_timeout={busy_ms}")
    cursor.close()
