"""One tier of kvstrata, and what keeps an engine safe from it.

A tier may be slow, fail, or hang in a system call that never returns. Every call has a deadline
and a grace; one that is still not back by then makes the tier `stuck`: until it returns, nothing
more is asked of it and every answer is a miss. A tier whose calls fail rests for a while, longer
each time.

Loads land in staging memory and are copied to vLLM's rows when they are verified, so a call that
hangs holds none of vLLM's memory. Stores read the rows themselves; one that hangs keeps its rows,
at most two batches of them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from kvstrata.backoff import Backoff
from kvstrata.keys import Key
from kvstrata.tiers.base import Item, Outcome, Tier, Usage, checksum, complete
from kvstrata_adapters.engines.vllm.tier_jobs import Chunk, Job
from kvstrata_adapters.engines.vllm.tier_rows import Buffer, Rows, Staging, copy_bytes

__all__ = ["Shelf", "ShelfState"]

_log = logging.getLogger(__name__)
T = TypeVar("T")

# A tier that keeps its deadline may need a moment to say so.
_GRACE_SECONDS = 0.25
_LOOKUP_GRACE = 0.25  # of the lookup's time
_STORES_AT_ONCE = 2
_LOADS_AT_ONCE = 4
_KEPT = (Outcome.STORED, Outcome.PRESENT)


class ShelfState(NamedTuple):
    """What the engine's metrics show of a tier. `detail` is empty while it is well."""

    name: str
    used_bytes: int
    capacity_bytes: int | None
    chunks: int
    detail: str
    counters: dict[str, int]


class _LateError(Exception):
    def __init__(self, task: asyncio.Task[Any]) -> None:
        super().__init__("a call has not returned at its deadline")
        self.task = task


class Shelf:
    """All of it but `state` runs on the loop. `on_stored(names)` is told what the tier has now."""

    def __init__(
        self,
        name: str,
        tier: Tier,
        rows: Rows,
        staging: int,
        pool: ThreadPoolExecutor,
        on_stored: Callable[[Sequence[bytes]], None],
    ) -> None:
        self.name = name
        self.tier = tier
        self.state = ShelfState(name, 0, None, 0, "", {})
        self._rows = rows
        self._staging = Staging(staging, rows.used)
        self._pool = pool
        self._on_stored = on_stored
        self._storing = asyncio.Semaphore(_STORES_AT_ONCE)
        self._overdue: set[asyncio.Task[Any]] = set()
        self._backoff = Backoff()
        self._rest_until = 0.0
        self._trouble = ""
        self._counters: Counter[str] = Counter()

    @property
    def silent(self) -> bool:
        """Whether nothing is to be asked of it now."""
        return bool(self._overdue) or time.monotonic() < self._rest_until

    async def lookup(self, names: Sequence[bytes], seconds: float) -> list[bool]:
        """Within that time, whatever the tier does."""
        keys = [Key(name) for name in names]
        if self.silent or not keys:
            return [False] * len(keys)
        try:
            end = time.monotonic() + seconds
            asked = end - seconds * _LOOKUP_GRACE
            answer = await self._call(self.tier.lookup(keys, asked), end)
            found = list(complete(answer, len(keys)))
        except Exception as e:
            self._failed("lookup", e)
            return [False] * len(keys)
        if self._trouble.startswith("lookup"):
            self._works()
        return found

    async def load(self, job: Job, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Into the rows; those that it did not get, in order."""
        todo = self._waves(chunks)
        left: list[Chunk] = []

        async def run() -> None:
            while todo:
                left.extend(await self._load_wave(job, todo.popleft()))

        await asyncio.gather(*(run() for _ in range(min(_LOADS_AT_ONCE, len(todo)))))
        missing = {chunk.row for chunk in left}
        return [chunk for chunk in chunks if chunk.row in missing]

    async def store(self, job: Job, chunks: Sequence[Chunk]) -> None:
        """Says to the job what was stored. Returns when nothing of it reads the rows any more."""
        todo = self._waves(chunks)

        async def run() -> None:
            while todo:
                await self._store_wave(job, todo.popleft())

        await asyncio.gather(*(run() for _ in range(min(_STORES_AT_ONCE, len(todo)))))

    def look(self) -> None:
        """Renew `state`."""
        try:
            use = self.tier.usage()
        except Exception as e:
            use = Usage(0, 0, healthy=False, detail=f"its usage is not known: {e}")
        detail = self._trouble or ("" if use.healthy else use.detail or "unhealthy")
        if self._overdue:
            detail = f"{len(self._overdue)} calls have not returned at their deadline"
        self.state = ShelfState(
            self.name,
            use.used_bytes,
            use.capacity_bytes,
            use.chunks,
            detail,
            use.counters | dict(self._counters),
        )

    def _waves(self, chunks: Sequence[Chunk]) -> deque[Sequence[Chunk]]:
        size = self._staging.chunks
        return deque(chunks[i : i + size] for i in range(0, len(chunks), size))

    async def _load_wave(self, job: Job, wave: Sequence[Chunk]) -> list[Chunk]:
        left = job.deadline - time.monotonic()
        if self.silent or job.ended or left <= 0:
            return list(wave)
        buffer = await self._staging.take(left)
        if buffer is None:
            return list(wave)
        views = buffer.views[: len(wave)]
        items = [Item(Key(c.name), view) for c, view in zip(wave, views, strict=True)]
        try:
            call = self.tier.load(items, job.deadline)
            answer = await self._call(call, job.deadline + _GRACE_SECONDS)
            outcomes = complete(answer, len(wave))
        except _LateError as e:
            # Whatever it still writes to is ours alone until it returns.
            e.task.add_done_callback(lambda _: self._staging.give(buffer))
            self._failed("load", e)
            return list(wave)
        except Exception as e:
            self._staging.give(buffer)
            self._failed("load", e)
            return list(wave)
        self._count("load", outcomes)
        loaded = [(c, v) for c, v, o in zip(wave, views, outcomes, strict=True) if o == "loaded"]
        await self._land(job, loaded, buffer)
        return [c for c, o in zip(wave, outcomes, strict=True) if o != "loaded"]

    async def _land(
        self, job: Job, loaded: Sequence[tuple[Chunk, memoryview]], buffer: Buffer
    ) -> None:
        """Copy what was verified to its rows, if vLLM still waits for it."""
        if not loaded or not job.touch():
            self._staging.give(buffer)
            return
        pairs = [(view, self._rows.row(chunk.row)) for chunk, view in loaded]
        copied = self._pool.submit(copy_bytes, pairs)
        # On its own, as this task may be cancelled while the copy goes on.
        keys = [chunk.key for chunk, _ in loaded]
        copied.add_done_callback(
            lambda f: job.untouch(() if f.cancelled() or f.exception() else keys)
        )
        try:
            await asyncio.wrap_future(copied)
        finally:
            self._staging.give(buffer)

    async def _store_wave(self, job: Job, wave: Sequence[Chunk]) -> None:
        try:
            async with asyncio.timeout(max(job.deadline - time.monotonic(), 0)):
                await self._storing.acquire()
        except TimeoutError:
            self._counters["late"] += len(wave)
            return
        try:
            if self.silent or time.monotonic() >= job.deadline:
                self._counters["skipped"] += len(wave)
            elif job.touch():
                kept: list[Chunk] = []
                try:
                    kept = await self._store(job, wave)
                finally:
                    job.untouch([chunk.key for chunk in kept])
        finally:
            self._storing.release()

    async def _store(self, job: Job, wave: Sequence[Chunk]) -> list[Chunk]:
        loop = asyncio.get_running_loop()
        with self._rows.rows(chunk.row for chunk in wave) as views:
            # Before anything is written: should these rows be given to other chunks while the
            # tier still reads them, what it writes does not fit its checksum.
            sums = await loop.run_in_executor(self._pool, _checksums, views)
            if job.ended:  # given up: the checksums may be of other chunks already
                self._counters["skipped"] += len(wave)
                return []
            items = [
                Item(Key(c.name), v, checksum=s, parent=Key(c.parent) if c.parent else None)
                for c, v, s in zip(wave, views, sums, strict=True)
            ]
            try:
                call = self.tier.store(items, job.deadline)
                answer = await self._call(call, job.deadline + _GRACE_SECONDS)
                outcomes = complete(answer, len(wave))
            except _LateError as e:
                self._failed("store", e)
                await asyncio.wait({e.task})
                return []
            except Exception as e:
                self._failed("store", e)
                return []
        self._count("store", outcomes)
        kept = [c for c, o in zip(wave, outcomes, strict=True) if o in _KEPT]
        self._on_stored([chunk.name for chunk in kept])
        return kept

    async def _call(self, work: Coroutine[Any, Any, T], end: float) -> T:
        task = asyncio.ensure_future(work)
        done, _ = await asyncio.wait({task}, timeout=max(end - time.monotonic(), 0))
        if not done:
            self._overdue.add(task)
            task.add_done_callback(self._returned)
            raise _LateError(task)
        return task.result()

    def _returned(self, task: asyncio.Task[Any]) -> None:
        self._overdue.discard(task)
        if not task.cancelled():
            task.exception()  # whatever it was, it came too late

    def _count(self, what: str, outcomes: Sequence[Outcome]) -> None:
        counts = Counter(outcomes)
        for outcome, n in counts.items():
            self._counters[f"{what}_{outcome}"] += n
        if counts[Outcome.FAILED] == len(outcomes):
            self._failed(what, None)
        elif self._trouble:
            self._works()

    def _works(self) -> None:
        _log.warning("tier %s works again", self.name)
        self._trouble, self._rest_until = "", 0.0
        self._backoff.reset()

    def _failed(self, what: str, error: Exception | None) -> None:
        self._counters[f"{what}_errors"] += 1
        self._rest_until = time.monotonic() + self._backoff.next()
        told = f"{what}: {error or 'every chunk failed'}"
        if not self._trouble:
            _log.warning("tier %s fails, and misses until it works: %s", self.name, told)
        self._trouble = told


def _checksums(views: Sequence[memoryview]) -> list[int]:
    return [checksum(view) for view in views]
