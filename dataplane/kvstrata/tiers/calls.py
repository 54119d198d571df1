"""Calls in progress of a tier that works in threads.

What the contract asks of every such tier is kept here: no item is begun after the deadline, a
call returns only when no thread works on its batch any more (cancelled or not), closing waits
for what runs, and a closed tier refuses.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvstrata.errors import Expired, LinkBroken

__all__ = ["Call", "Calls"]

T = TypeVar("T")
R = TypeVar("R")


class Call:
    """One call: `over()` says whether it may still begin to work on an item."""

    def __init__(self, clock: Callable[[], float], deadline: float) -> None:
        self._clock = clock
        self._deadline = deadline
        self.stopped = False
        self.cancelled = False

    def over(self) -> bool:
        """Thread-safe."""
        return self.stopped or self._clock() >= self._deadline

    def left(self) -> float:
        """Seconds until its deadline; negative past it. Thread-safe."""
        return self._deadline - self._clock()


class Calls:
    """Of one tier. `patience` is the deadline, in seconds from now, of calls that bring none."""

    def __init__(self, name: str, clock: Callable[[], float], patience: float) -> None:
        self._name = name
        self._clock = clock
        self._patience = patience
        self._running: set[Call] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False

    def check_open(self) -> None:
        """Raises `LinkBroken` after `close`."""
        if self._closed:
            raise LinkBroken(f"{self._name} tier is closed")

    def running_alone(self) -> bool:
        """Whether at most one call runs."""
        return len(self._running) <= 1

    @contextlib.contextmanager
    def running(self, deadline: float | None) -> Iterator[Call]:
        """Around the body of a call. Raises `LinkBroken` if closed."""
        self.check_open()
        call = Call(self._clock, self._until(deadline))
        self._running.add(call)
        self._idle.clear()
        try:
            yield call
        finally:
            self._running.discard(call)
            if not self._running:
                self._idle.set()
        if call.cancelled:
            raise asyncio.CancelledError

    async def spread(
        self,
        call: Call,
        pool: ThreadPoolExecutor,
        threads: int,
        work: Callable[[T], R],
        batch: Sequence[T],
        late: R,
    ) -> list[R]:
        """`work` on every item, shared out over `threads` of the pool; `late` for items that no
        thread had begun when the call was over.

        A cancelled task gets its results too, so that the caller can settle what was done, and
        is cancelled when it leaves `running`.
        """
        done = [late] * len(batch)
        todo = deque(enumerate(batch))

        def run() -> None:
            while not call.over():
                try:
                    i, item = todo.popleft()
                except IndexError:
                    return
                done[i] = work(item)

        loop = asyncio.get_running_loop()
        jobs = [loop.run_in_executor(pool, run) for _ in range(min(threads, len(batch)))]
        pending = set(jobs)
        while pending:
            try:
                _, pending = await asyncio.wait(pending)
            except asyncio.CancelledError:
                call.stopped = call.cancelled = True
        for error in [job.exception() for job in jobs]:
            if error is not None:
                raise error
        return done

    async def drain(self, deadline: float | None) -> None:
        """Return when no call runs. Raises `Expired` at the deadline, `LinkBroken` if closed."""
        self.check_open()
        left = self._until(deadline) - self._clock()
        try:
            async with asyncio.timeout(max(left, 0)):
                await self._idle.wait()
        except TimeoutError as e:
            running = len(self._running)
            raise Expired(f"{self._name} tier: {running} calls still run at the deadline") from e

    async def close(self) -> None:
        """Refuse new calls, begin no further item, return when no call runs. Idempotent."""
        self._closed = True
        for call in self._running:
            call.stopped = True
        await self._idle.wait()

    def _until(self, deadline: float | None) -> float:
        return self._clock() + self._patience if deadline is None else deadline
