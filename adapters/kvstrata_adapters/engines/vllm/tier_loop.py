"""An event loop in a thread, for an engine that has none."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from kvstrata.errors import Expired, LinkBroken

__all__ = ["LoopThread"]

T = TypeVar("T")


class LoopThread:
    """A daemon: one that hangs keeps no process from ending."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start it there. Raises `LinkBroken` after `stop`."""
        self._post(lambda: self._start(work))

    def ask(self, work: Coroutine[Any, Any, T], seconds: float) -> T:
        """Its result. Raises `Expired` if there is none in time."""
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError as e:
            work.close()
            raise LinkBroken("the thread of the tiers has ended") from e
        try:
            return future.result(seconds)
        except concurrent.futures.TimeoutError as e:
            future.cancel()
            raise Expired(f"the tiers did not answer within {seconds:g} s") from e

    def stop(self, seconds: float) -> bool:
        """Cancel what runs and end the thread; whether it ended in time. Idempotent."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._cancel)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _post(self, call: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError as e:
            raise LinkBroken("the thread of the tiers has ended") from e

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _start(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = self._loop.create_task(work())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _cancel(self) -> None:
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        ended = asyncio.gather(*tasks, return_exceptions=True)
        ended.add_done_callback(lambda _: self._loop.stop())
