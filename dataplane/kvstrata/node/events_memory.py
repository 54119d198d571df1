"""A file that remembers what engines told of chunks, over a restart of the node.

Without it, what is in stores is published only as engines come to tell of it again. It is SQLite,
written from a thread a second late at most, and not synced: what a crash loses is told again. When
there are more chunks in it than it may hold, those told of first go.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from kvstrata.errors import ConfigError
from kvstrata.keys import DIGEST_BYTES, Key, Namespace
from kvstrata.node.namespaces import Namespaces
from kvstrata.wire import Told

__all__ = ["EventMemory"]

T = TypeVar("T")

_log = logging.getLogger(__name__)

_MOST_CHUNKS = 1_000_000
_MOST_PENDING = 65_536
_INTERVAL = 1.0
_BATCH = 512

_SCHEMA = """
CREATE TABLE IF NOT EXISTS namespaces (digest BLOB PRIMARY KEY, document BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS told (
    number INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, told BLOB NOT NULL
);
"""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Told).decode


class EventMemory:
    """Hears what engines tell as a watcher of placements. What is recalled goes to `tell`, and the
    namespaces that it is of become known."""

    def __init__(
        self,
        path: Path,
        namespaces: Namespaces,
        tell: Callable[[Sequence[Told]], None],
        most_chunks: int = _MOST_CHUNKS,
    ) -> None:
        self.lost = 0
        """Chunks not remembered since more was told than could be written."""
        self._path = path
        self._namespaces = namespaces
        self._tell = tell
        self._most_chunks = most_chunks
        self._pending: dict[bytes, Told] = {}
        self._found: list[Key] = []
        # One thread: it alone touches the database.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvstrata-event-memory")
        self._database: sqlite3.Connection | None = None
        self._closed = False

    async def open(self) -> None:
        """Raises `ConfigError` if the file can't be used."""
        try:
            await self._do(self._open)
        except sqlite3.Error as e:
            raise ConfigError(
                f"event_memory {self._path}: {e}. Name a file that can be written, or remove it"
            ) from e

    async def recall(self, keys: Sequence[Key]) -> None:
        """Tell what is remembered of these chunks, in the order in which it was told."""
        documents, tells = await self._do(lambda: self._recall(keys))
        for document in documents:
            self._namespaces.add(Namespace.parse(document))
        for start in range(0, len(tells), _BATCH):
            self._tell(tells[start : start + _BATCH])
            await asyncio.sleep(0)

    def found(self, keys: Sequence[Key]) -> None:
        """A store has come to know of chunks that it had: recall them in a while."""
        self._found += keys

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
        """Write what was told and recall what was found, until cancelled."""
        while True:
            await asyncio.sleep(_INTERVAL)
            await self.flush()
            await self.recall_found()

    async def recall_found(self) -> None:
        """Recall what was found since the last time."""
        if self._found:
            keys, self._found = self._found, []
            await self.recall(keys)

    async def flush(self) -> None:
        """Write what is pending."""
        if not self._pending:
            return
        tells, self._pending = list(self._pending.values()), {}
        digests = {told.key[:DIGEST_BYTES] for told in tells}
        documents = [n for n in map(self._namespaces.get, digests) if n is not None]
        await self._do(lambda: self._write(documents, tells))

    async def close(self) -> None:
        """Write what is left. Idempotent; also after an `open` that was cancelled."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._database is not None:
                await self.flush()
            # The thread may be about to open it only now.
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

    def _recall(self, keys: Sequence[Key]) -> tuple[list[bytes], list[Told]]:
        assert self._database is not None  # noqa: S101 - `open` came first
        rows: list[tuple[int, bytes]] = []
        for start in range(0, len(keys), _BATCH):
            part = keys[start : start + _BATCH]
            marks = ",".join("?" * len(part))
            query = f"SELECT number, told FROM told WHERE key IN ({marks})"  # noqa: S608 - marks
            rows += self._database.execute(query, part)
        tells = []
        for _, raw in sorted(rows):
            try:
                tells.append(_decode(raw))
            except msgspec.MsgspecError:
                continue  # of another version
        documents = self._database.execute("SELECT document FROM namespaces").fetchall()
        return [document for (document,) in documents], tells
