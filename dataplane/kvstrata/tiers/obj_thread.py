"""An event loop in a thread of its own.

HTTP, TLS and XML of an object store take milliseconds of CPU at a time, which would hold up the
node's loop. They run here; batches come over and results go back once a call.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from kvstrata.tiers.calls import Call

__all__ = ["LoopThread"]

T = TypeVar("T")
R = TypeVar("R")

_PATIENCE = 5.0


class LoopThread:
    """Start and stop it from one other event loop."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._at_work: set[asyncio.Task[Any]] = set()  # touched in the thread only
        self._thread.start()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.get_loop().run_forever()

    async def run(self, work: Coroutine[Any, Any, T], call: Call | None = None) -> T:
        """Run it over there, to its end even if this call is cancelled meanwhile.

        With a `call` the cancellation is left to it; without, it follows at the end.
        """
        done = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
        cancelled = False
        while not done.done():
            try:
                await asyncio.wait([done])
            except asyncio.CancelledError:
                cancelled = True
                if call is not None:
                    call.stopped = call.cancelled = True
        if cancelled and call is None:
            done.exception()  # seen
            raise asyncio.CancelledError
        return done.result()

    async def bounded(self, call: Call, work: Coroutine[Any, Any, T]) -> T:
        """In the thread: its result. Raises `TimeoutError` at the end of the call's time, or if
        `cut`; either way the work has ended."""
        task = asyncio.create_task(work)
        self._at_work.add(task)
        try:
            done, _ = await asyncio.wait([task], timeout=max(call.left(), 0))
            if not done:
                task.cancel()
                await asyncio.wait([task])
        finally:
            self._at_work.discard(task)
        if task.cancelled():
            raise TimeoutError
        return task.result()

    async def spread(
        self,
        call: Call,
        gate: asyncio.Semaphore,
        width: int,
        work: Callable[[T], Coroutine[Any, Any, R]],
        batch: Sequence[T],
        late: R,
        cut: R,
    ) -> list[R]:
        """In the thread: `work` on every item, `width` at a time and within what `gate` lets
        through; at the end of the call's time `late` for what was not begun, `cut` for what was."""
        done = [late] * len(batch)
        todo = deque(enumerate(batch))

        async def run() -> None:
            while todo and not call.over():
                try:
                    async with asyncio.timeout(max(call.left(), 0)):
                        await gate.acquire()
                except TimeoutError:
                    return
                try:
                    if call.over() or not todo:
                        return
                    i, item = todo.popleft()
                    done[i] = await self.bounded(call, work(item))
                except TimeoutError:
                    done[i] = cut
                finally:
                    gate.release()

        runs = [run() for _ in range(min(width, len(batch)))]
        for error in await asyncio.gather(*runs, return_exceptions=True):
            if error is not None:
                raise error
        return done

    def cut(self) -> None:
        """Cancel what is being worked on, in all calls. Thread-safe."""

        def cancel() -> None:
            for task in self._at_work:
                task.cancel()

        self._loop.call_soon_threadsafe(cancel)

    async def close(self) -> None:
        """End the loop and its thread. Idempotent. Nothing may run in it any more."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            # A name being resolved can't be cut short; it is left to end by itself.
            await asyncio.to_thread(self._thread.join, _PATIENCE)
