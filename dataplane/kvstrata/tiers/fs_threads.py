"""Threads of the fs tier, which a mount may never give back.

A thread inside a call to a hung mount can't be stopped. So these are daemon threads that nobody
joins; what hangs is noticed by how long a thread has been on one item; and threads given up are
replaced, up to a bound, so that the tier works again when the mount does.

Batches take turns: a long one doesn't keep a short one waiting. Stores let loads go first.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from kvstrata.tiers.calls import Call

__all__ = ["Workers"]

T = TypeVar("T")
R = TypeVar("R")

# How soon a call notices its deadline: clocks are injected, so nothing can wake it.
_POLL = 0.05
# Most threads given up, for each that works.
_MOST_LOST = 4
# How long an item of a store waits for loads that nobody has begun.
_POLITE = 0.1


class _Job(Generic[T, R]):
    """A batch on its way. Fields are changed under the lock of its workers."""

    def __init__(
        self,
        call: Call,
        work: Callable[[T], R],
        batch: Sequence[T],
        late: R,
        missed: Callable[[T, R], None] | None,
    ) -> None:
        self.call = call
        self.work = work
        self.missed = missed
        self.left = False  # nobody waits for it any more
        self.todo = deque(enumerate(batch))
        self.done = [late] * len(batch)
        self.active = 0  # threads on an item of it,
        self.lost = 0  # and those of them that were given up
        self.error: BaseException | None = None
        self._loop = asyncio.get_running_loop()
        self.finished = self._loop.create_future()

    @property
    def over(self) -> bool:
        return not self.todo and not self.active

    def wake(self) -> None:
        self._tell(self._finish)

    def tell_missed(self, item: T, result: R) -> None:
        if self.missed is not None:
            self._tell(partial(self.missed, item, result))

    def _tell(self, what: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(what)

    def _finish(self) -> None:
        if not self.finished.done():
            self.finished.set_result(None)


class _Thread(threading.Thread):
    def __init__(self, run: Callable[[_Thread], None], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._go = run
        self.since: float | None = None
        self.job: _Job[Any, Any] | None = None
        self.lost = False

    def run(self) -> None:
        self._go(self)


class Workers:
    """Up to `count` threads of one purpose. `after`: workers whose items go first."""

    def __init__(
        self, name: str, count: int, clock: Callable[[], float], after: Workers | None = None
    ) -> None:
        self.name = name
        self._count = count
        self._clock = clock
        self._after = after
        self._jobs: deque[_Job[Any, Any]] = deque()
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._all_begun = threading.Condition(self._lock)
        self._threads: set[_Thread] = set()
        self._lost: set[_Thread] = set()
        self._idle = 0
        self._closed = False

    async def spread(
        self,
        call: Call,
        work: Callable[[T], R],
        batch: Sequence[T],
        late: R,
        memory: bool = True,
        missed: Callable[[T, R], None] | None = None,
    ) -> list[R]:
        """`work` on every item, shared out over the threads; `late` for items that no thread had
        begun when the call was over.

        With `memory` the call is not left before its last thread has, whatever the deadline and
        cancelled or not: the caller is told so by `call.cancelled`. Without, items still in work
        at the deadline, or with a thread that was given up, are `late` too: `missed` is told on
        the event loop of each of them that was done after all, with its result.
        """
        if not batch:
            return []
        job = _Job(call, work, batch, late, missed)
        self._put(job)
        while not job.finished.done():
            try:
                await asyncio.wait([job.finished], timeout=_POLL)
            except asyncio.CancelledError:
                call.stopped = call.cancelled = True
            if call.over():
                with self._lock:
                    job.todo.clear()
                    self._forget(job)
                    if job.over or (not memory and job.active <= job.lost):
                        break
                    if not memory and call.left() <= 0:
                        break
        with self._lock:
            job.left = True
            if job.error is not None:
                raise job.error
            return list(job.done)

    def stuck(self, seconds: float) -> int:
        """How many threads have been on one item for so long, or a fifth of it past their
        call's deadline; those given up don't count."""
        now = self._clock()
        with self._lock:
            return sum(self._is_stuck(thread, now, seconds) for thread in self._threads)

    def give_up(self, seconds: float) -> None:
        """Replace the threads that are `stuck`. They end when they come back."""
        now = self._clock()
        with self._lock:
            for thread in [t for t in self._threads if self._is_stuck(t, now, seconds)]:
                if len(self._lost) < _MOST_LOST * self._count:
                    thread.lost = True
                    if thread.job is not None:
                        thread.job.lost += 1
                    self._threads.discard(thread)
                    self._lost.add(thread)
            self._spawn()

    def wait_for_begun(self, seconds: float) -> None:
        """Return when every item has been begun, or after so long."""
        if self._jobs:
            with self._lock:
                self._all_begun.wait_for(lambda: not self._jobs, seconds)

    def close(self) -> None:
        """Threads end when nothing is left to do. Nobody waits for them."""
        with self._lock:
            self._closed = True
            self._work.notify_all()

    def _is_stuck(self, thread: _Thread, now: float, seconds: float) -> bool:
        if thread.since is None or thread.job is None:
            return False
        busy = now - thread.since
        return busy >= seconds or (busy >= seconds / 5 and thread.job.call.over())

    def _put(self, job: _Job[Any, Any]) -> None:
        with self._lock:
            self._jobs.append(job)
            self._spawn()
            self._work.notify(len(job.todo))

    def _spawn(self) -> None:
        """Threads for what waits, as far as there may be more. Under the lock."""
        busy = len(self._threads) - self._idle
        wanted = min(self._count, busy + sum(len(job.todo) for job in self._jobs))
        while len(self._threads) < wanted:
            thread = _Thread(self._run, f"kvstrata-fs-{self.name}")
            self._threads.add(thread)
            thread.start()

    def _forget(self, job: _Job[Any, Any]) -> None:
        """Nothing of it waits any more. Under the lock."""
        with contextlib.suppress(ValueError):
            self._jobs.remove(job)
        if not self._jobs:
            self._all_begun.notify_all()

    def _run(self, thread: _Thread) -> None:
        while True:
            with self._lock:
                job = self._next(thread)
                if job is None:
                    self._threads.discard(thread)
                    self._lost.discard(thread)
                    return
            if self._after is not None:
                self._after.wait_for_begun(_POLITE)
            over, now = job.call.over(), self._clock()
            with self._lock:
                if over:
                    job.todo.clear()
                taken = job.todo.popleft() if job.todo else None
                if not job.todo:
                    self._forget(job)
                if taken is None:
                    if job.over:
                        job.wake()
                    continue
                job.active += 1
                thread.since, thread.job = now, job
            try:
                result, error = job.work(taken[1]), None
            except BaseException as e:
                result, error = job.done[taken[0]], e
            with self._lock:
                thread.since = thread.job = None
                job.lost -= thread.lost
                job.done[taken[0]] = result
                job.error = job.error or error
                job.active -= 1
                if job.left and error is None:
                    job.tell_missed(taken[1], result)
                if job.over:
                    job.wake()

    def _next(self, thread: _Thread) -> _Job[Any, Any] | None:
        """The job whose turn it is; None: end. Under the lock."""
        while not thread.lost:
            if self._jobs:
                self._jobs.rotate(-1)
                return self._jobs[-1]
            if self._closed:
                return None
            self._idle += 1
            self._work.wait()
            self._idle -= 1
        return None
