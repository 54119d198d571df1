"""The tiers of one vLLM tier, on their loop: lookups and jobs over all of them.

What they find out goes to the scheduler's thread through queues.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import re
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from kvstrata.config import TierSettings
from kvstrata.errors import ConfigError
from kvstrata.keys import DIGEST_BYTES, Key, Namespace
from kvstrata.tiers.base import Tier, TierContext
from kvstrata.tiers.opening import open_tier
from kvstrata_adapters.engines.vllm.tier_jobs import Chunk, Job
from kvstrata_adapters.engines.vllm.tier_options import TierOptions
from kvstrata_adapters.engines.vllm.tier_rows import Rows
from kvstrata_adapters.engines.vllm.tier_shelf import Shelf

__all__ = ["Change", "Found", "Shelves"]

_log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
_COPY_THREADS = 4
# The rest is for the way there and back.
_LOOKUP_PART = 0.9


class Found(NamedTuple):
    """The answer to a batch of lookups: per name the index of a tier that has it, or -1."""

    batch: int
    tiers: list[int]


class Change(NamedTuple):
    """Chunks that came, or that none of the tiers has any more."""

    names: Sequence[bytes]
    removed: bool


class Shelves:
    """`ended`, `found` and `changes` are for the scheduler's thread."""

    def __init__(
        self, namespace: Namespace, rows: Rows, options: TierOptions, engine: str, tell: bool
    ) -> None:
        """`tell`: keep `changes`."""
        self.ended: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self.found: deque[Found] = deque()
        self.changes: deque[Change] = deque()
        self.shelves: list[Shelf] = []
        self._namespace = namespace
        self._rows = rows
        self._options = options
        self._node = re.sub(r"[^A-Za-z0-9._-]", "-", f"vllm-{engine}")[:64]
        self._tell = tell
        # Which tiers hold what we told of, as bits.
        self._held: dict[bytes, int] = {}
        self._pool = ThreadPoolExecutor(_COPY_THREADS, "kvstrata-vllm-copy")

    async def open(self) -> None:
        """Raises `ConfigError` about a tier that can't work."""
        for i, settings in enumerate(self._options.tiers):
            tier = await self._open(i, settings)
            taken = {shelf.name for shelf in self.shelves}
            name = f"{tier.name}-{i}" if tier.name in taken else tier.name
            self.shelves.append(
                Shelf(
                    name,
                    tier,
                    self._rows,
                    self._options.staging,
                    self._pool,
                    lambda names, i=i: self._stored(i, names),  # type: ignore[misc]
                )
            )
            self.shelves[-1].look()

    async def watch(self) -> None:
        """Keep the state of the tiers fresh, for ever."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            for shelf in self.shelves:
                shelf.look()

    async def lookup(self, batch: int, names: Sequence[bytes]) -> None:
        """In order, each within its part of the time, so that all are asked."""
        tiers = [-1] * len(names)
        each = _LOOKUP_PART * self._options.lookup_deadline / len(self.shelves)
        for i, shelf in enumerate(self.shelves):
            left = [n for n, found in enumerate(tiers) if found < 0]
            there = await shelf.lookup([names[n] for n in left], each)
            for n, found in zip(left, there, strict=True):
                if found:
                    tiers[n] = i
        self.found.append(Found(batch, tiers))

    async def run(self, job: Job) -> None:
        try:
            await (self._load(job) if job.is_load else self._store(job))
        except Exception:
            _log.exception("a job of %d chunks failed", len(job.chunks))
        finally:
            if job.end():
                self.ended.put(job)

    async def close(self, seconds: float) -> None:
        """Close the tiers, waiting so long for all of them together."""
        closing = [asyncio.ensure_future(shelf.tier.close()) for shelf in self.shelves]
        if closing:
            done, late = await asyncio.wait(closing, timeout=seconds)
            for task in done:
                if error := task.exception():
                    _log.warning("closing a tier failed: %s", error)
            if late:
                _log.warning("%d tiers did not close within %g s", len(late), seconds)
        self._pool.shutdown(wait=False)

    async def _open(self, i: int, settings: TierSettings) -> Tier:
        def removed(keys: Sequence[Key]) -> None:
            self._removed(i, keys)

        context = TierContext(
            self._node,
            namespace_of=lambda digest: (
                self._namespace if digest == self._namespace.digest else None
            ),
            on_removed=removed,
        )
        tier, _ = await open_tier(settings, context)
        if not tier.writable:
            await tier.close()
            raise ConfigError(f"tiers[{i}]: a {settings.type} tier only reads, so it stays empty")
        return tier

    async def _load(self, job: Job) -> None:
        waiting = list(job.chunks)
        left: list[Chunk] = []
        for i, shelf in enumerate(self.shelves):
            now = left + [chunk for chunk in waiting if chunk.hint <= i]
            waiting = [chunk for chunk in waiting if chunk.hint > i]
            left = await shelf.load(job, now) if now else []

    async def _store(self, job: Job) -> None:
        await asyncio.gather(*(shelf.store(job, job.chunks) for shelf in self.shelves))

    def _stored(self, i: int, names: Sequence[bytes]) -> None:
        if self._tell and names:
            for name in names:
                self._held[name] = self._held.get(name, 0) | 1 << i
            self.changes.append(Change(names, removed=False))

    def _removed(self, i: int, keys: Sequence[Key]) -> None:
        if not self._tell:
            return
        gone = []
        for key in keys:
            if key[:DIGEST_BYTES] == self._namespace.digest:
                # What was there before us may be in other tiers too; not to offer it is safe.
                held = self._held.pop(key, 0) & ~(1 << i)
                if held:
                    self._held[key] = held
                else:
                    gone.append(key)
        if gone:
            self.changes.append(Change(gone, removed=True))
