"""What the calls of the fs tier and its work in the background share.

Here are the index and the threads, the counters, and the one way in which chunks are taken up,
dropped and announced. All but the functions marked so run on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import TypeVar

from kvstrata.errors import Expired
from kvstrata.keys import Key
from kvstrata.tiers.base import Item, Outcome, TierContext
from kvstrata.tiers.calls import Call, Calls
from kvstrata.tiers.drops import Drops
from kvstrata.tiers.fs_files import DIRECT_FROM, ChunkFiles
from kvstrata.tiers.fs_health import Condition, Health
from kvstrata.tiers.fs_index import Held, Index
from kvstrata.tiers.fs_options import FsOptions
from kvstrata.tiers.fs_quarantine import Quarantine
from kvstrata.tiers.fs_root import Root
from kvstrata.tiers.fs_shared import Shared
from kvstrata.tiers.fs_threads import Workers
from kvstrata.tiers.fs_work import LATE, Done, Work

__all__ = ["Core", "FsCalls"]

R = TypeVar("R")

_log = logging.getLogger(__name__)

# Removed between two looks at the lease.
_FENCED = 256
_POLL = 0.05


class FsCalls(Calls):
    """Calls of which some may never come back."""

    def stop_running(self) -> None:
        """Begin no further item of those that run."""
        for call in self._running:
            call.stopped = True

    async def drain_unless(self, hung: Callable[[], bool], deadline: float | None) -> None:
        """`drain`, but at once `Expired` when threads hang: nobody knows for how long."""
        self.check_open()
        until = self._until(deadline)
        loop = asyncio.get_running_loop()
        latest = loop.time() + max(until - self._clock(), 0)
        while not self._idle.is_set():
            if hung() or self._clock() >= until or loop.time() >= latest:
                why = "the mount hangs" if hung() else "at the deadline"
                raise Expired(f"{self._name} tier: {len(self._running)} calls still run: {why}")
            await self._idle_for(_POLL)

    async def close_unless(self, hung: Callable[[], bool], seconds: float) -> int:
        """`close`, but not waiting for what hangs; how many calls still run, and hold memory."""
        self._closed = True
        self.stop_running()
        for _ in range(int(seconds / _POLL)):
            if self._idle.is_set() or hung():
                break
            await self._idle_for(_POLL)
        return len(self._running)

    async def _idle_for(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            pass


class Core:
    def __init__(self, name: str, options: FsOptions, context: TierContext, root: Root) -> None:
        clock = context.clock
        self.options, self.context, self.root, self.clock = options, context, root, clock
        self.capacity = None if options.capacity is None else int(options.capacity)
        quarantine = Quarantine(root, options.quarantine_files, options.quarantine_bytes)
        direct_from = 0 if options.direct == "on" else DIRECT_FROM
        self.files = ChunkFiles(root, quarantine, direct_from)
        self.work = Work(self.files)
        self.now = root.system.now
        self.index = Index()
        self.shared = Shared(root, clock, self.capacity)
        self.health = Health(clock, self.now, root.path)
        self.calls = FsCalls(name, clock, options.deadline)
        self.readers = Workers("read", options.read_threads, clock)
        self.writers = Workers("write", options.write_threads, clock, after=self.readers)
        self.probers = Workers("probe", 2, clock)
        self.walkers = Workers("walk", 2, clock)
        self.keeper = Workers("keep", 1, clock)
        self.doctor = Workers("health", 1, clock)
        self.claimed = 0
        """Bytes promised to stores that have not settled."""
        self.gone: dict[Key, None] | None = None
        """What was dropped since the walk that goes on began; None: no walk."""
        self.drops = Drops(self.calls)
        self.recovered = False
        self.closing: asyncio.Future[None] | None = None
        self.counters = dict.fromkeys(
            (
                "stored",
                "loaded",
                "evicted",
                "expired",
                "corrupt",
                "errors",
                "stuck",
                "direct",
                "store_bytes",
                "load_bytes",
            ),
            0,
        )

    @property
    def pools(self) -> tuple[Workers, ...]:
        """Those that touch the mount in the course of things: what hangs there says that it
        hangs."""
        return self.readers, self.writers, self.probers, self.walkers, self.keeper

    def hung(self) -> bool:
        return self.health.has(Condition.HUNG)

    async def off(self, workers: Workers, work: Callable[[], R], late: R) -> R:
        """One piece of work in a thread; `late` if it takes longer than a chunk may."""
        call = Call(self.clock, self.clock() + self.options.stuck_after)
        [done] = await workers.spread(call, lambda _: work(), [None], late, memory=False)
        if call.cancelled:
            raise asyncio.CancelledError
        return done

    def close(self) -> None:
        for workers in (*self.pools, self.doctor):
            workers.close()

    # ------------------------------------------------------------ the index

    def index_of(self, keys: Iterable[Key]) -> set[Key]:
        """Those that are held now."""
        return {key for key in keys if key in self.index}

    def hold(self, chunks: Sequence[Held], new: Collection[Key], began: float) -> None:
        """They are on disk and were used; `new` ones of them we wrote, after `began`."""
        if self.gone:
            for key in new:
                self.gone.pop(key, None)
        old = [c for c in chunks if c.key not in new]
        fresh = [c for c in chunks if c.key in new]
        if old:
            self.index.hold(old, self.now())
        if fresh:
            self.index.hold(fresh, self.now(), written=began)
            self.shared.stored([(c.key, c.disk_bytes) for c in fresh], began)

    def drop(self, key: Key) -> bool:
        if self.gone is not None:
            self.gone[key] = None
        self.drops.note(key)
        return self.index.drop(key)

    def announce(self, removed: Collection[Key]) -> None:
        if removed:
            self.context.on_removed(list(removed))

    def forget_all(self) -> None:
        """The store was made anew, empty."""
        keys = list(self.index)
        for key in keys:
            self.drop(key)
        self.drops.note_all()
        self.announce(keys)
        self.shared.forget()

    # ------------------------------------------------------------ room

    def room(self) -> int | None:
        """Bytes that may be claimed now; None: no bound."""
        used = self.index.used
        if not self.shared.sure:
            return 0
        if not self.recovered:
            before = self.shared.used_before
            # While the walk goes on, what it has not found yet is there.
            used = max(used, (self.capacity or 0) if before < 0 else before)
        return self.shared.room(used, self.claimed)

    def excess(self, asked: int) -> float:
        """Bytes to evict before `asked` more are claimed."""
        if self.capacity is None or not self.recovered or not self.shared.sure:
            return 0
        wanted = self.index.used + self.claimed + asked
        # Of what others may still store, too, we make room for ours.
        short = asked - (self.room() or 0) if asked and not self.shared.alone else 0
        if wanted <= self.capacity * self.options.high_watermark:
            return short
        return max(short, wanted - self.capacity * self.options.low_watermark)

    async def make_room_on_disk(self, call: Call, nbytes: int, keep: Collection[Key]) -> bool:
        """The disk is full, whatever our bound says: a cache gives way."""
        if await self.off(self.keeper, self.files.quarantine.empty, False):
            return True
        if not self.shared.evicts and self.shared.lease.latest is not None:
            return False
        victims = self.index.oldest(max(nbytes, self.index.used // 50), keep)
        # Where the disk is too full for a first lease, one batch goes without.
        return bool(await self.remove(call, victims, fenced=self.shared.evicts))

    async def remove(
        self, call: Call, keys: Sequence[Key], fenced: bool, counter: str = "evicted"
    ) -> dict[Key, None]:
        """Unlink and announce; those that were there, or that we believed to be, in order.
        `fenced`: only while we are the evictor."""
        removed: dict[Key, None] = {}
        for start in range(0, len(keys), _FENCED):
            batch = keys[start : start + _FENCED]
            may = await self.off(self.keeper, partial(self.shared.tell_first, batch), False)
            if fenced and not may:
                break
            known = self.index_of(batch)
            done = await self.writers.spread(
                call, self.work.unlink, batch, LATE, memory=False, missed=self._removed_late
            )
            self.report(done)
            for key, d in zip(batch, done, strict=True):
                if d.outcome is Outcome.FAILED:
                    if d.error and key in self.index:
                        self.index.spare(key)
                    continue
                dropped = self.drop(key)
                # Of two that remove it at one time, one says so.
                if dropped or (key not in known and d.outcome is Outcome.PRESENT):
                    removed[key] = None
        self.announce(removed)
        self.counters[counter] += len(removed)
        self.shared.removed(removed, self.now())
        if removed:
            self.health.end(Condition.FULL)
        return removed

    def _removed_late(self, key: Key, done: Done) -> None:
        """A file went whose removal nobody waited for any more."""
        if done.outcome is not Outcome.FAILED:
            if self.drop(key):
                self.announce([key])
            self.shared.removed([key], self.now())

    # ------------------------------------------------------------ errors

    def report(self, done: Sequence[Done]) -> None:
        """Count errors, log the first of a batch, and learn what is wrong with the mount."""
        errors = [d for d in done if d.error]
        if errors:
            self.counters["errors"] += sum(d.outcome is Outcome.FAILED for d in errors)
            _log.warning("fs tier: %d chunks, first of them: %s", len(errors), errors[0].error)
        for d in done:
            if d.condition is not None:
                self.trouble(d.condition, d.error)
            elif d.outcome in (Outcome.STORED, Outcome.LOADED):
                self.health.worked()

    def trouble(self, condition: Condition, why: str) -> None:
        stopped = self.health.stops_loads
        self.health.failed(condition, why)
        if self.health.stops_loads and not stopped:
            self.calls.stop_running()

    def refusal(self, item: Item) -> Outcome | None:
        """What a store of this item is answered at once; None: it may be tried."""
        health = self.health
        if not health.stops_stores or (item.key in self.index and not health.stops_loads):
            return None
        return Outcome.NO_ROOM if health.only_full else Outcome.FAILED
