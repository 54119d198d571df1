"""Host -> secondary tier, written through.

The queue holds keys, not memory: only the batch being stored is pinned, so a slow tier can't
hold the host tier hostage. A chunk that is evicted before its turn, or that finds the queue
full, is not stored; that is counted, and the chunk is lost only if nobody computes it again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from itertools import islice

from kvstrata.host import Chunk, HostTier
from kvstrata.keys import Key
from kvstrata.node.placements import Placements
from kvstrata.tiers.base import Item, Outcome, Tier, checksum, complete

__all__ = ["Cascade"]

_log = logging.getLogger(__name__)

_QUEUE_KEYS = 65_536
_BATCH_KEYS = 64
_BATCH_BYTES = 32 << 20
_DEADLINE = 30.0


class Cascade:
    """The way from the host tier to one tier. `run` is its loop, to be supervised."""

    def __init__(
        self,
        tier: Tier,
        host: HostTier,
        item: Callable[[Chunk], Item],
        placements: Placements,
        clock: Callable[[], float],
    ) -> None:
        self.tier = tier
        self.stored = 0
        self.dropped = 0
        self.failed = 0
        self._host = host
        self._item = item
        self._placements = placements
        self._clock = clock
        self._queue: dict[Key, None] = {}
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._stopped = asyncio.Event()
        self._stopped.set()
        self._closed = False
        # What one batch may pin of a small region.
        self._batch_bytes = min(_BATCH_BYTES, host.slots.capacity // 4)

    def offer(self, keys: Sequence[Key]) -> None:
        """Chunks that became ready and did not come from this tier."""
        if not keys or self._closed:
            return
        room = _QUEUE_KEYS - len(self._queue)
        self._queue.update(dict.fromkeys(keys[:room]))
        self.dropped += max(0, len(keys) - room)
        self._idle.clear()
        self._wake.set()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    async def run(self) -> None:
        """Store what is offered, batch by batch, until closed."""
        self._stopped.clear()
        try:
            while not self._closed:
                if self._queue:
                    await self._store(self._next_batch())
                    continue
                self._idle.set()
                self._wake.clear()
                await self._wake.wait()
        finally:
            self._idle.set()
            self._stopped.set()

    async def drain(self) -> None:
        """Return when everything offered so far is stored or given up."""
        await self._idle.wait()

    async def close(self) -> None:
        """Take no more, and return when the batch under way has ended."""
        self._closed = True
        self._queue.clear()
        self._wake.set()
        await self._stopped.wait()

    def _next_batch(self) -> list[Chunk]:
        batch: list[Chunk] = []
        size = 0
        for key in list(islice(self._queue, _BATCH_KEYS)):
            chunk = self._host.get(key)
            if chunk is not None and batch and size + chunk.nbytes > self._batch_bytes:
                break
            del self._queue[key]
            if chunk is None:
                self.dropped += 1
            else:
                batch += self._host.pin([key])
                size += chunk.nbytes
        return batch

    async def _store(self, batch: Sequence[Chunk]) -> None:
        if not batch:
            return
        try:
            await self._add_checksums(batch)
            items = [self._item(chunk) for chunk in batch]
            answers = await self.tier.store(items, self._clock() + _DEADLINE)
            outcomes = complete(answers, len(batch))
        except Exception:
            _log.exception("tier %s: store failed", self.tier.name)
            outcomes = [Outcome.FAILED] * len(batch)
        finally:
            for chunk in batch:
                self._host.unpin(chunk)
        kept = [
            chunk.key
            for chunk, outcome in zip(batch, outcomes, strict=True)
            if outcome in (Outcome.STORED, Outcome.PRESENT)
        ]
        self.stored += len(kept)
        self.failed += len(batch) - len(kept)
        self._placements.added(self.tier.store_id, kept)
        if len(kept) < len(batch):
            _log.warning(
                "tier %s kept %d of %d chunks: %s",
                self.tier.name,
                len(kept),
                len(batch),
                sorted({o.value for o in outcomes}),
            )

    async def _add_checksums(self, batch: Sequence[Chunk]) -> None:
        views = [(chunk, self._item(chunk).view) for chunk in batch if chunk.checksum is None]
        if views:
            sums = await asyncio.to_thread(lambda: [checksum(view) for _, view in views])
            for (chunk, _), value in zip(views, sums, strict=True):
                chunk.checksum = value
