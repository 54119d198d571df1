"""Host -> one secondary tier.

The queue holds keys, not memory: only batches being stored are pinned, and those of all tiers
together a bounded part of the region, so a slow or stuck tier can't hold the host tier hostage.
A chunk that is evicted before its turn, or that finds the queue full, is not stored; that is
counted, and the chunk is lost only if nobody computes it again. Stores step back while the tier
has something to load.

What is queued, and when:

    write_through  every chunk as it becomes ready
    second_touch   a chunk that is used once more after it became ready, or that came from
                   another tier, which shows the same
    on_evict       the chunks next to be evicted, while little of the region is free, so that
                   room can be made at once and costs nothing that isn't stored
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from kvstrata.config import CascadeMode
from kvstrata.host import Chunk, HostTier
from kvstrata.keys import Key
from kvstrata.node.breaker import Kind
from kvstrata.node.guard import Guard
from kvstrata.node.placements import Placements
from kvstrata.tiers.base import Item, Outcome, Tier, checksum

__all__ = ["Cascade"]

_log = logging.getLogger(__name__)

_QUEUE_KEYS = 65_536
_BATCH_KEYS = 64
_BATCH_BYTES = 32 << 20
_DEADLINE = 30.0
# Overdue stores count too: one may be stuck, and another still go.
_MOST_PINNED = 2
# How long a batch steps back for loads; then a little is stored all the same.
_YIELD = 1.0
# `on_evict` keeps this part of the region free or stored, and looks again when half of that has
# been written: a look takes about 3 us a chunk, on the event loop.
_AHEAD = 8
_MOST_AHEAD = 1 << 30


class Cascade:
    """The way from the host tier to one tier. `run` is its loop, to be supervised.

    `share` is the most bytes that one batch may pin.
    """

    def __init__(
        self,
        guard: Guard,
        host: HostTier,
        item: Callable[[Chunk], Item],
        placements: Placements,
        clock: Callable[[], float],
        mode: CascadeMode = "write_through",
        share: Callable[[], int] | None = None,
    ) -> None:
        self.guard = guard
        self.mode = mode
        self.stored = 0
        self.dropped = 0
        self.failed = 0
        self.pinned = 0
        self._host = host
        self._item = item
        self._placements = placements
        self._clock = clock
        self._share = share or (lambda: host.slots.capacity // 4)
        self._queue: dict[Key, None] = {}
        # Ready in the host tier, not in this one, not queued: kept unless written through.
        self._unstored: set[Key] = set()
        self._ahead = min(host.slots.capacity // _AHEAD, _MOST_AHEAD)
        self._written = 0
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._unpinned = asyncio.Event()
        self._stopped = asyncio.Event()
        self._stopped.set()
        self._closed = False
        guard.watchers += [self._wake.set, self._unpinned.set]

    @property
    def tier(self) -> Tier:
        return self.guard.tier

    @property
    def waiting(self) -> int:
        return len(self._queue)

    # ------------------------------------------------------------ what the store tells

    def arrived(self, chunks: Sequence[Chunk], used: bool) -> None:
        """Chunks became ready and did not come from this tier. `used`: they came from another."""
        if not chunks:
            return
        keys = [chunk.key for chunk in chunks]
        if self.mode == "write_through" or (self.mode == "second_touch" and used):
            self.offer(keys)
            return
        if self._closed:
            return
        self._unstored.update(keys)
        if self.mode == "on_evict":
            self._written += sum(chunk.nbytes for chunk in chunks)
            if 2 * self._written >= self._ahead:
                self._wake.set()

    def used(self, keys: Sequence[Key]) -> None:
        """A request found these in the host tier."""
        if self.mode == "second_touch" and self._unstored:
            again = [key for key in keys if key in self._unstored]
            self._unstored.difference_update(again)
            self.offer(again)

    def gone(self, keys: Sequence[Key]) -> None:
        """These are not in the host tier any more."""
        if self._unstored:
            before = len(self._unstored)
            self._unstored.difference_update(keys)
            if self.mode == "on_evict":
                self.dropped += before - len(self._unstored)

    def lost(self, keys: Sequence[Key]) -> None:
        """The tier gave these up: what the host tier has of them is its only copy here."""
        if self.mode != "write_through" and not self._closed:
            self._unstored.update(key for key in keys if self._host.get(key) is not None)

    def flush(self) -> None:
        """The end is near: what is to be kept beyond it should be stored now, if it can be."""
        if self.mode == "on_evict":
            last = self._host.next_victims(self._host.slots.capacity)
            self._queue_unstored(chunk.key for chunk in reversed(last))

    def offer(self, keys: Sequence[Key]) -> None:
        """Store these when it is their turn."""
        if not keys or self._closed:
            return
        room = _QUEUE_KEYS - len(self._queue)
        self._queue.update(dict.fromkeys(keys[:room]))
        self.dropped += max(0, len(keys) - room)
        self._idle.clear()
        self._wake.set()

    async def keep(self, keys: Sequence[Key]) -> dict[Key, Outcome]:
        """Store these now and in this order, beside what is queued; what became of each. `MISSING`
        is what the host tier doesn't have. Waits while the tier is at other batches."""
        outcomes = dict.fromkeys(keys, Outcome.FAILED)
        left = dict.fromkeys(keys)
        while left and not self._closed:
            if not self._may_store():
                if not self.guard.allows(Kind.STORE):
                    break
                self._unpinned.clear()
                await self._unpinned.wait()
                continue
            before = list(left)
            batch = self._next_batch(left)
            outcomes |= {key: Outcome.MISSING for key in before if key not in left}
            told = await self._store(batch)
            outcomes |= zip((chunk.key for chunk in batch), told, strict=True)
        return outcomes

    # ------------------------------------------------------------ the loop

    async def run(self) -> None:
        """Store what is offered, batch by batch, until closed."""
        self._stopped.clear()
        try:
            while not self._closed:
                self._wake.clear()
                self._clean()
                if self._queue and self._may_store():
                    if self.guard.loading:
                        await self._step_back()
                        if not self._may_store():
                            continue  # what it stepped back for was overdue
                    waiting = len(self._queue)
                    batch = self._next_batch(self._queue)
                    self.dropped += waiting - len(self._queue) - len(batch)
                    await self._store(batch)
                    continue
                if not self._queue:
                    self._idle.set()
                await self._wake.wait()
        finally:
            self._idle.set()
            self._stopped.set()

    async def drain(self) -> None:
        """Return when everything offered so far is stored or given up."""
        await self._idle.wait()

    async def close(self) -> None:
        """Take no more, and return when the batch under way has ended or is overdue."""
        self._closed = True
        self._queue.clear()
        self._unstored.clear()
        self._wake.set()
        self._unpinned.set()
        await self._stopped.wait()

    def _may_store(self) -> bool:
        most = (_MOST_PINNED - 1) * self._batch_bytes()
        return self.guard.allows(Kind.STORE) and self.pinned <= most

    def _batch_bytes(self) -> int:
        return min(_BATCH_BYTES, self._share())

    async def _step_back(self) -> None:
        try:
            async with asyncio.timeout(_YIELD):
                while self.guard.loading and not self._closed:
                    self._wake.clear()
                    await self._wake.wait()
        except TimeoutError:
            pass

    def _clean(self) -> None:
        """`on_evict`: queue what would have to go next."""
        if self.mode != "on_evict" or 2 * self._written < self._ahead:
            return
        self._written = 0
        slots = self._host.slots
        wanted = self._ahead - (slots.capacity - slots.used)
        if wanted > 0:
            self._queue_unstored(chunk.key for chunk in self._host.next_victims(wanted))

    def _queue_unstored(self, keys: Iterable[Key]) -> None:
        room = _QUEUE_KEYS - len(self._queue)
        dirty = list(islice((key for key in keys if key in self._unstored), room))
        self._unstored.difference_update(dirty)
        self.offer(dirty)

    def _next_batch(self, queue: dict[Key, None]) -> list[Chunk]:
        """Taken from the queue, and pinned; those that are not here any more are only taken."""
        batch: list[Chunk] = []
        size, most = 0, self._batch_bytes()
        for key in list(islice(queue, _BATCH_KEYS)):
            chunk = self._host.get(key)
            if chunk is not None and batch and size + chunk.nbytes > most:
                break
            del queue[key]
            if chunk is not None:
                batch += self._host.pin([key])
                size += chunk.nbytes
        self.pinned += size
        return batch

    async def _store(self, batch: Sequence[Chunk]) -> Sequence[Outcome]:
        """An outcome each; `FAILED` where the call is overdue."""
        if not batch:
            return ()
        try:
            await self._add_checksums(batch)
        except BaseException:
            self._settle(batch, [Outcome.FAILED] * len(batch))
            raise
        items = [self._item(chunk) for chunk in batch]
        outcomes = await self.guard.store(
            items, self._clock() + _DEADLINE, lambda late: self._settle(batch, late), self._kept
        )
        if outcomes is None:
            return [Outcome.FAILED] * len(batch)
        self._settle(batch, outcomes)
        return outcomes

    def _kept(self, keys: list[Key]) -> None:
        self._placements.added(self.guard.store_id, keys)
        self._unstored.difference_update(keys)

    def _settle(self, batch: Sequence[Chunk], outcomes: Sequence[Outcome]) -> None:
        """The call is over, in time or late: nothing reads the chunks for it any more."""
        for chunk in batch:
            self._host.unpin(chunk)
        self.pinned -= sum(chunk.nbytes for chunk in batch)
        failed = [
            chunk.key
            for chunk, outcome in zip(batch, outcomes, strict=True)
            if outcome not in (Outcome.STORED, Outcome.PRESENT)
        ]
        self.stored += len(batch) - len(failed)
        self.failed += len(failed)
        self._wake.set()
        self._unpinned.set()
        if failed:
            self.lost(failed)
            _log.warning(
                "tier %s kept %d of %d chunks: %s",
                self.guard.name,
                len(batch) - len(failed),
                len(batch),
                sorted({o.value for o in outcomes}),
            )

    async def _add_checksums(self, batch: Sequence[Chunk]) -> None:
        views = [(chunk, self._item(chunk).view) for chunk in batch if chunk.checksum is None]
        if views:
            sums = await asyncio.to_thread(lambda: [checksum(view) for _, view in views])
            for (chunk, _), value in zip(views, sums, strict=True):
                chunk.checksum = value
