"""Which jobs are running and how they ended, and the threads that run them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection
from typing import Generic, TypeVar

from kvstrata.errors import Expired, KVStrataError, LinkBroken, Malformed
from kvstrata_adapters.devices.base import JobResult

__all__ = ["Jobs", "Lane", "as_error"]

_T = TypeVar("_T")


def as_error(job: int, e: Exception) -> KVStrataError:
    """What a job is reported with: it must be, whatever happened to it."""
    return e if isinstance(e, KVStrataError) else KVStrataError(f"copy job {job}: {e!r}")


class Jobs:
    """The jobs of one device. `changed` guards it, and is notified when a job ends."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.closed = False
        self._running: set[int] = set()
        self._ended: list[JobResult] = []

    def begin(self, job: int) -> None:
        """Raises `LinkBroken` on a closed device, `Malformed` if the number is in use."""
        with self.changed:
            if self.closed:
                raise LinkBroken("this device is closed")
            if job in self._running:
                raise Malformed(f"job {job} is still running")
            self._running.add(job)

    def end(self, result: JobResult) -> None:
        with self.changed:
            self._ended.append(result)
            self._running.discard(result.job)
            self.changed.notify_all()

    def take(self) -> list[JobResult]:
        """Those that ended since the last call."""
        with self.changed:
            ended, self._ended = self._ended, []
        return ended

    def wait(
        self,
        jobs: Collection[int],
        timeout: float,
        due: Callable[[], bool] = lambda: False,
        work: Callable[[], None] = lambda: None,
    ) -> None:
        """Until all of `jobs` have ended. Whenever `due()`, `work()` is done meanwhile, by this
        thread; `due` is asked with `changed` held. Raises `Expired`."""
        wanted, deadline = set(jobs), time.monotonic() + timeout
        while True:
            with self.changed:
                self.changed.wait_for(
                    lambda: due() or not (wanted & self._running),
                    max(0.0, deadline - time.monotonic()),
                )
                late = sorted(wanted & self._running)
                if not late:
                    return
                if not due():
                    raise Expired(f"copy jobs {late} have not ended within {timeout} s")
            work()


class Lane(Generic[_T]):
    """Runs one task after another on a thread of its own. `run` must not raise."""

    def __init__(self, name: str, run: Callable[[_T], None]) -> None:
        self._tasks: queue.SimpleQueue[tuple[_T] | None] = queue.SimpleQueue()
        self._run = run
        self._thread = threading.Thread(target=self._loop, name=f"kvstrata-{name}", daemon=True)
        self._thread.start()

    def put(self, task: _T) -> None:
        self._tasks.put((task,))

    def stop(self) -> None:
        """When all that was put has been run. Idempotent."""
        self._tasks.put(None)
        self._thread.join()

    def _loop(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._run(task[0])
            del task  # not to keep a task's arrays alive until the next one comes
