"""The only writer of SQL: takes changes behind the index, and commits them in batches.

What is put together is committed together, and in the order it was put: the rows are at any
time what the index was a moment ago. The queue is bounded by rows: `require_room` refuses work
(`Busy`, which nodes answer by sending it again later) before the index changes, so that nothing
is ever dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress

from sqlalchemy.exc import SQLAlchemyError

from kvstrata.backoff import Backoff
from kvstrata.errors import Busy
from kvstrata_server.sql.database import Database, may_pass
from kvstrata_server.sql.writes import Write

__all__ = ["Writer"]

log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
"""Time after which it is looked whether the database is still there, where nothing is written."""
_SLOW_SECONDS = 5.0
"""A batch that takes longer is no batch that is large."""


class Writer:
    """A bounded queue of writes, and the loop (`run`, to be supervised) that commits them.

    `max_rows` bounds the queue; a single change may go past it, so that big ones fit at all. A
    batch that isn't committed after `batch_seconds` is tried again on a new connection: one that
    leads nowhere any more can take a quarter of an hour to say so.
    """

    def __init__(
        self,
        database: Database,
        max_rows: int = 1_000_000,
        batch_rows: int = 50_000,
        batch_seconds: float = 60.0,
    ) -> None:
        self._problem = ""
        self._waits_since: float | None = None
        self.lost = False
        """Whether that was because the database is no more the one that was opened."""
        self.dropped = 0
        """Writes that the database refused for what they say: a defect of ours."""
        self._database = database
        self._max_rows = max_rows
        self._batch_rows = batch_rows
        self._batch_seconds = batch_seconds
        self._queue: deque[tuple[Write, ...]] = deque()
        self._rows = 0
        self.position = 0
        """How many changes were put."""
        self.committed = 0
        """How many of them are in SQL."""
        self._filled = asyncio.Event()
        self._advanced = asyncio.Event()

    @property
    def unwritten_rows(self) -> int:
        return self._rows

    @property
    def problem(self) -> str:
        """Why the last attempt to write failed, or that this one gets no answer; empty if all is
        well."""
        if self._problem or self._waits_since is None:
            return self._problem
        waits = asyncio.get_running_loop().time() - self._waits_since
        return "" if waits < _SLOW_SECONDS else f"no answer to a write for {waits:.0f} s"

    @property
    def takes(self) -> bool:
        """Whether `require_room` would not raise."""
        return not (self.full or self.lost)

    @property
    def full(self) -> bool:
        """Whether SQL is too far behind."""
        return self._rows >= self._max_rows

    def require_room(self) -> None:
        """Raises `Busy` while it is `full` or `lost`. Call it before changing the index."""
        if self.lost:
            raise Busy(self.problem)
        if self.full:
            raise Busy(
                f"the database is {self._rows} rows behind; send this again later. "
                "See /healthz for why it is slow"
            )

    def put(self, *writes: Write) -> None:
        """One change: all of it or none will be in SQL, whenever this process dies."""
        if writes:
            self._queue.append(writes)
            self.position += 1
            self._rows += _rows(writes)
            self._filled.set()

    async def flushed(self, timeout: float, position: int | None = None) -> None:
        """Return when all that was put so far is committed, or what was up to `position`, which
        may be much less. Raises `Busy` after `timeout` s."""
        wanted = self.position if position is None else position
        try:
            async with asyncio.timeout(timeout):
                while self.committed < wanted:
                    self._advanced.clear()
                    await self._advanced.wait()
        except TimeoutError:
            raise Busy(
                f"the database did not take a write within {timeout:g} s: see /healthz. What "
                "waits may be written still: before a change is asked for again without an "
                "idempotency key, see whether it is done"
            ) from None

    async def drain(self, timeout: float) -> None:
        """Write what is queued, for `timeout` seconds at most. What is left, nodes report again."""
        try:
            await self.flushed(0.0 if self.lost else timeout)
        except Busy:
            log.error("ending with %d rows unwritten", self._rows)

    async def run(self) -> None:
        """Commit what is put, for ever. A database that is locked, full or away is retried."""
        backoff = Backoff()
        while True:
            if not self._queue:
                self._filled.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._filled.wait(), _LOOK_SECONDS)
            try:
                self._waits_since = asyncio.get_running_loop().time()
                async with asyncio.timeout(self._batch_seconds):
                    await (self.write_batch() if self._queue else self._look())
            except (SQLAlchemyError, OSError, TimeoutError) as e:
                if not may_pass(e):
                    raise
                self._problem = str(getattr(e, "orig", e)) or "it does not answer"
                log.warning(
                    "the database takes no writes, %d rows wait: %s", self._rows, self.problem
                )
                await asyncio.sleep(backoff.next())
                continue
            finally:
                self._waits_since = None
            backoff.reset()
            self._problem = ""

    async def _transaction(self, writes: Sequence[Write]) -> None:
        async with self._database.engine.begin() as connection:
            await self._database.lock(connection)
            for write in writes:
                await write.apply(connection)
            await self._look()

    async def _look(self) -> None:
        """Whether what is written would be kept. Raises `OSError`."""
        try:
            await self._database.require_kept()
        except OSError as e:
            self._problem, self.lost = str(e), True
            raise
        self.lost = False

    async def write_batch(self) -> None:
        """Commit the oldest changes as one transaction. If it fails they stay queued."""
        batch = self._next_batch()
        await self._commit([write for writes in batch for write in writes])
        for writes in batch:
            self._queue.popleft()
            self._rows -= _rows(writes)
        self.committed += len(batch)
        self._advanced.set()

    def _next_batch(self) -> list[tuple[Write, ...]]:
        batch: list[tuple[Write, ...]] = []
        rows = 0
        for writes in self._queue:
            rows += _rows(writes)
            if batch and rows > self._batch_rows:
                break
            batch.append(writes)
        return batch

    async def _commit(self, batch: list[Write]) -> None:
        try:
            await self._transaction(batch)
        except Exception as e:
            # Drivers have errors of their own for what they can't send, as OverflowError.
            if may_pass(e):
                raise
            await self._commit_singly(batch)

    async def _commit_singly(self, batch: list[Write]) -> None:
        """One of them is wrong in itself and would block all others forever: leave it out."""
        for write in batch:
            try:
                await self._transaction([write])
            except Exception as e:
                if may_pass(e):
                    raise
                self.dropped += 1
                log.exception("dropped a write that the database refuses: %.500r", write)


def _rows(writes: Iterable[Write]) -> int:
    return sum(write.rows for write in writes)
