"""Reads that end in time: whatever the database does, who asked is answered.

A read runs in a task of its own. When its time is over nobody waits for it any more, and its
connection is cut, which may take a while where the database hangs; until then it counts as under
way. So a database that hangs holds a bounded number of tasks and connections, and the writer
always finds one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from kvstrata.errors import Busy

__all__ = ["Reads"]

T = TypeVar("T")

Work = Callable[[AsyncConnection], Awaitable[T]]

# Fewer than the engine's pool has connections: the others are for the writer, and for loading.
_MOST = 8


class Reads:
    """Those under way at one engine. `statement_timeout`: whether the database knows of such."""

    def __init__(
        self,
        engine: AsyncEngine,
        may_pass: Callable[[Exception], bool],
        statement_timeout: bool,
        most: int = _MOST,
    ) -> None:
        self._engine = engine
        self._may_pass = may_pass
        self._statement_timeout = statement_timeout
        self._room = asyncio.Semaphore(most)
        self._tasks: set[asyncio.Task[object]] = set()

    @property
    def under_way(self) -> int:
        """With those that nobody waits for."""
        return len(self._tasks)

    async def run(self, work: Work[T], seconds: float) -> T:
        """What `work` returns, who must only read. Raises `Busy` where the database has not
        answered after so many seconds, or may answer the same later."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        try:
            async with asyncio.timeout_at(until):
                await self._room.acquire()
        except TimeoutError:
            raise _silent(seconds) from None
        task = loop.create_task(self._read(work, seconds))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        try:
            await asyncio.wait({task}, timeout=until - loop.time())
            if not task.done():
                raise _silent(seconds)
        finally:
            _cancel(task)
        try:
            return task.result()
        except (SQLAlchemyError, OSError, TimeoutError) as e:
            if not self._may_pass(e):
                raise
            raise Busy("the database can't be read at the moment: see /healthz") from e

    async def close(self, seconds: float) -> None:
        """End what is under way, or leave it after so many seconds."""
        for task in self._tasks:
            _cancel(task)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)

    async def _read(self, work: Work[T], seconds: float) -> T:
        try:
            return await self._once(work, seconds)
        except DBAPIError as e:
            if not e.connection_invalidated:
                raise
        # It had ended the connection, as in a restart: there are new ones.
        return await self._once(work, seconds)

    async def _once(self, work: Work[T], seconds: float) -> T:
        async with self._engine.connect() as connection:
            try:
                if self._statement_timeout:
                    milliseconds = max(1, round(1000 * seconds))
                    await connection.execute(text(f"SET LOCAL statement_timeout = {milliseconds}"))
                return await work(connection)
            except asyncio.CancelledError:
                # To roll back would be to wait for what does not answer.
                await connection.invalidate()
                raise

    def _ended(self, task: asyncio.Task[T]) -> None:
        self._tasks.discard(task)
        self._room.release()
        if not task.cancelled():
            task.exception()  # seen, though nobody may be there to be told


def _cancel(task: asyncio.Task[T]) -> None:
    """Once: cut off while it cuts its connection, a driver may leave a task that never ends."""
    if not task.cancelling():
        task.cancel()


def _silent(seconds: float) -> Busy:
    return Busy(f"the database did not answer within {seconds:g} s: see /healthz")
