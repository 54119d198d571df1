"""A file that remembers what engines told of chunks, over a restart of the node.

Without it, what is in stores is published only as engines come to tell of it again. It is SQLite,
written from a thread a second late at most, and not synced: what a crash loses is told again. When
there are more chunks in it than it may hold, those told of first go.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from kvstrata.errors import ConfigError
from kvstrata.keys import DIGEST_BYTES, Key, Namespace
from kvstrata.wire import Told

__all__ = ["EventMemory"]

T = TypeVar("T")

_log = logging.getLogger(__name__)

_MOST_CHUNKS = 1_000_000
_MOST_PENDING = 65_536
_INTERVAL = 1.0

_SCHEMA = """
CREATE TABLE IF NOT EXISTS namespaces (digest BLOB PRIMARY KEY, document BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS told (
    number INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, told BLOB NOT NULL
);
"""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Told).decode


class EventMemory:
    """Hears what engines tell as a watcher of placements; `namespace` gives documents."""

    def __init__(
        self,
        path: Path,
        namespace: Callable[[bytes], Namespace | None],
        most_chunks: int = _MOST_CHUNKS,
    ) -> None:
        self.lost = 0
        """Chunks not remembered since more was told than could be written."""
        self._path = path
        self._namespace = namespace
        self._most_chunks = most_chunks
        self._pending: dict[bytes, Told] = {}
        # One thread: it alone touches the database.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvstrata-event-memory")
        self._database: sqlite3.Connection | None = None

    async def open(self) -> None:
        """Raises `ConfigError` if the file can't be used."""
        try:
            await self._do(self._open)
        except sqlite3.Error as e:
            raise ConfigError(
                f"event_memory {self._path}: {e}. Name a file that can be written, or remove it"
            ) from e

    async def recall(self, keys: Collection[Key]) -> tuple[list[Namespace], list[Told]]:
        """What is remembered of these chunks, in the order it was told, and their namespaces."""
        return await self._do(lambda: self._recall(keys))

    def added(self, location: str, keys: Sequence[Key]) -> None:
        """Nothing: chunks that come and go are told of once."""

    def removed(self, location: str, keys: Sequence[Key]) -> None:
        """Nothing, either."""

    def told(self, tells: Sequence[Told]) -> None:
        for told in tells:
            if len(self._pending) < _MOST_PENDING:
                self._pending[told.key] = told
            else:
                self.lost += 1

    async def run(self) -> None:
        """Write what was told, until cancelled."""
        while True:
            await asyncio.sleep(_INTERVAL)
            await self.flush()

    async def flush(self) -> None:
        """Write what is pending."""
        if not self._pending:
            return
        tells, self._pending = list(self._pending.values()), {}
        digests = {told.key[:DIGEST_BYTES] for told in tells}
        documents = [n for n in map(self._namespace, digests) if n is not None]
        await self._do(lambda: self._write(documents, tells))

    async def close(self) -> None:
        """Write what is left. Idempotent."""
        try:
            if self._database is not None:
                await self.flush()
                await self._do(self._close)
        except sqlite3.Error as e:
            _log.warning("%s was not written to its end: %s", self._path, e)
        finally:
            self._thread.shutdown(wait=False)

    # ------------------------------------------------------------ in the thread

    async def _do(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _open(self) -> None:
        database = sqlite3.connect(self._path, isolation_level=None)
        try:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = OFF")
            database.executescript(_SCHEMA)
        except BaseException:
            database.close()
            raise
        self._database = database

    def _close(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None

    def _write(self, namespaces: Sequence[Namespace], tells: Sequence[Told]) -> None:
        assert self._database is not None  # noqa: S101 - `open` came first
        rows = [(told.key, _encode(told)) for told in tells]
        with self._database as database:
            database.execute("BEGIN")
            database.executemany(
                "INSERT OR IGNORE INTO namespaces VALUES (?, ?)",
                [(namespace.digest, namespace.document) for namespace in namespaces],
            )
            database.executemany("INSERT OR IGNORE INTO told (key, told) VALUES (?, ?)", rows)
            database.execute(
                "DELETE FROM told WHERE number <= (SELECT max(number) FROM told) - ?",
                [self._most_chunks],
            )

    def _recall(self, keys: Collection[Key]) -> tuple[list[Namespace], list[Told]]:
        assert self._database is not None  # noqa: S101 - `open` came first
        documents = self._database.execute("SELECT document FROM namespaces").fetchall()
        tells = [told for told in self._rows() if told.key in keys]
        return [Namespace.parse(document) for (document,) in documents], tells

    def _rows(self) -> Iterator[Told]:
        assert self._database is not None  # noqa: S101 - `open` came first
        for (raw,) in self._database.execute("SELECT told FROM told ORDER BY number"):
            try:
                yield _decode(raw)
            except msgspec.MsgspecError:
                continue  # of another version
