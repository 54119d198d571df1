"""What the fs tier does by itself: watch its threads, probe a mount in trouble, walk the
directory, talk to the others, evict, and keep the times of accesses.

One loop looks twenty times a second, by the tier's clock, at what is due. Each piece of work is a
task of its own in threads of its own, so that none waits for another that hangs.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from itertools import islice
from typing import NamedTuple

from kvstrata.keys import Key
from kvstrata.tiers.calls import Call
from kvstrata.tiers.fs_core import Core
from kvstrata.tiers.fs_health import Condition, condition_of
from kvstrata.tiers.fs_index import SKEW, Found
from kvstrata.tiers.fs_news import REMOVED, TOTAL, Record
from kvstrata.tiers.fs_root import RootGone
from kvstrata.tiers.fs_shared import Exchange
from kvstrata.tiers.fs_walk import Folder, Step, folders, look

__all__ = ["Upkeep"]

_log = logging.getLogger(__name__)

_POLL = 0.05
_EXCHANGE_EVERY = 1.0
_FLUSH_EVERY = 10.0
_FLUSH_MOST = 16_384
_EXPIRE_MOST = 4096
# News come by writer, so that of a removal may come before that of the store.
_MOST_REMOVED = 65_536
_PROGRESS_EVERY = 5.0
# For what is under way at the end; threads that take longer are left behind.
_STOP_SECONDS = 2.0
# Of a walk: folders looked at between two updates of the index, and chunks put in order at once.
_STEPS = 8
_SLICE = 16_384
# What a probe of a disk that was full must be able to write.
_PROBED_BYTES = 128 << 10


class _Probed(NamedTuple):
    """What is wrong, and when the store that is there was made: see `Root.made`."""

    found: Condition | None
    why: str
    made: str


class Upkeep:
    def __init__(self, core: Core) -> None:
        self._core = core
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._watch: asyncio.Task[None] | None = None
        self._next = dict.fromkeys(("exchange", "flush", "walk"), float("-inf"))
        self._impatient = True
        self._removed: OrderedDict[Key, float] = OrderedDict()  # by others, and when
        # What threads brought, in time or later, and of which making of the store.
        self._exchanged: deque[tuple[str, Exchange]] = deque()
        self.progress = ""
        """Of a walk that goes on."""

    async def start(self) -> None:
        """Talk to the others once, begin the first walk and wait for it a while."""
        core = self._core
        await core.off(core.keeper, core.shared.start, None)
        await self.exchange()
        self._begin("walk", self.walk)
        self._watch = asyncio.create_task(self._run(), name="fs tier upkeep")
        await asyncio.wait([self._tasks["walk"]], timeout=core.options.recovery_wait)

    async def stop(self) -> None:
        """End what runs, and leave the others what they should know. Doesn't wait for a hung
        mount."""
        core = self._core
        tasks = [task for task in (self._watch, *self._tasks.values()) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            _, pending = await asyncio.wait(tasks, timeout=_STOP_SECONDS)
            if pending:
                for pool in (*core.pools, core.doctor):
                    pool.give_up(0)
                await asyncio.wait(pending)
        if not core.health.stops_loads:
            await self.flush()
            await core.off(core.keeper, self._say_goodbye, None)

    async def _run(self) -> None:
        while True:
            try:
                self.look()
            except Exception:
                _log.exception("fs tier at %s: upkeep", self._core.root.path)
            await asyncio.sleep(_POLL)

    def look(self) -> None:
        """Begin what is due."""
        core = self._core
        self._look_for_stuck()
        if core.health.due:
            self._begin("probe", self.probe)
        if core.health.stops_loads:
            return
        now = core.clock()
        for name, work, every in (
            ("exchange", self.exchange, _EXCHANGE_EVERY),
            ("flush", self.flush, _FLUSH_EVERY),
            ("walk", self.walk, core.options.rescan if core.recovered else _EXCHANGE_EVERY),
        ):
            if now >= self._next[name] + every:
                self._begin(name, work)

    def _begin(self, name: str, work: Callable[[], Awaitable[object]]) -> None:
        running = self._tasks.get(name)
        if running is not None and not running.done():
            return
        self._next[name] = self._core.clock()
        self._tasks[name] = asyncio.create_task(self._guarded(name, work), name=f"fs tier {name}")

    async def _guarded(self, name: str, work: Callable[[], Awaitable[object]]) -> None:
        try:
            await work()
        except Exception:
            _log.exception("fs tier at %s: %s", self._core.root.path, name)

    # ------------------------------------------------------------ health

    def _look_for_stuck(self) -> None:
        core = self._core
        seconds = core.options.stuck_after
        stuck = {pool.name: pool.stuck(seconds) for pool in core.pools}
        if not any(stuck.values()):
            return
        core.counters["stuck"] += sum(stuck.values())
        threads = ", ".join(f"{n} {name}" for name, n in stuck.items() if n)
        core.trouble(Condition.HUNG, f"threads that don't come back: {threads}")
        for pool in core.pools:
            pool.give_up(seconds)

    async def probe(self) -> None:
        """Try the mount, and end or renew what is wrong with it."""
        core = self._core
        root = core.root
        late = _Probed(Condition.HUNG, "a probe does not come back", root.made)
        found, why, made = await core.off(core.doctor, self._try_mount, late)
        if found is Condition.HUNG:
            core.doctor.give_up(core.options.stuck_after / 2)
        if made != root.made:
            core.forget_all()
            root.made = made
            await core.off(core.keeper, core.shared.start, None)
        if found is Condition.FULL and await self._give_way():
            found = None
        if found is None:
            # Before anything is stored again: a lease that ran out meanwhile leaves no room.
            error = await self.exchange()
            if error is not None:
                found, why = condition_of(error) or Condition.IO_ERROR, str(error)
        core.health.probed(found, why)

    async def _give_way(self) -> bool:
        """The disk is full, and stores that would make room are not tried: nothing else will."""
        core = self._core
        call = Call(core.clock, core.clock() + core.options.stuck_after)
        made = core.recovered and await core.make_room_on_disk(call, _PROBED_BYTES, ())
        _end_if_cancelled(call)
        return made

    def _try_mount(self) -> _Probed:
        """In a thread."""
        root, made = self._core.root, self._core.root.made
        try:
            try:
                root.check()
            except RootGone:
                made = root.restore()
            root.try_write(_PROBED_BYTES if self._core.health.has(Condition.FULL) else 1)
        except OSError as e:
            return _Probed(condition_of(e) or Condition.IO_ERROR, str(e), made)
        return _Probed(None, "", made)

    # ------------------------------------------------------------ the others

    async def exchange(self) -> OSError | None:
        """Tell and hear, then evict if that is our part; what went wrong."""
        core = self._core
        shared = core.shared
        pending, use = shared.take_pending(), shared.use(core.index.used)
        impatient, self._impatient = self._impatient, False
        made = core.root.made

        def work() -> OSError | None:
            try:
                done = shared.exchange(pending, use, impatient)
            except OSError as e:
                done = Exchange(errors=[e])
            self._exchanged.append((made, done))
            return done.errors[0] if done.errors else None

        late: OSError | None = OSError(errno.ETIMEDOUT, "no answer in time")
        error = await core.off(core.keeper, work, late)
        if error is not None:
            shared.put_back(pending)
        # News are read once: those of a round that came too late count as well.
        while self._exchanged:
            of, done = self._exchanged.popleft()
            if of == core.root.made:
                self._heard(done)
        await self._evict()
        return error

    def _heard(self, done: Exchange) -> None:
        """What a round brought."""
        core, shared = self._core, self._core.shared
        for error in done.errors:
            condition = condition_of(error)
            if condition is not None:
                core.trouble(condition, str(error))
            else:
                _log.warning("fs tier at %s: %s", core.root.path, error)
        self._apply(done.news)
        if done.took_over or (shared.lost and shared.evicts):
            # Who died may not have told of all that it stored.
            shared.sure, shared.lost = not done.took_over, False
            self._next["walk"] = float("-inf")

    def _apply(self, news: list[tuple[str, Record]]) -> None:
        core = self._core
        gone: list[Key] = []
        for writer, record in news:
            core.shared.hear(writer, record)
            key = record.key
            if record.what == REMOVED:
                accessed = core.index.accessed(key)
                # Stored again after it was removed.
                if accessed is not None and core.index.written(key) <= record.time:
                    core.drop(key)
                    gone.append(key)
                if core.gone is not None:
                    core.gone[key] = None  # a walk may have seen it before
                self._removed[key] = record.time
                if len(self._removed) > _MOST_REMOVED:
                    self._removed.popitem(last=False)
            elif record.what != TOTAL and record.time > self._removed.get(key, 0.0):
                core.index.learn(key, record.disk_bytes, min(record.time, core.now() + SKEW))
        core.announce(gone)

    async def _evict(self) -> None:
        """What is too old, and what is over the high watermark."""
        core = self._core
        if not core.shared.evicts or not core.recovered or core.health.stops_loads:
            return
        call = Call(core.clock, core.clock() + core.options.deadline)
        if core.options.ttl is not None:
            old = core.index.expired(core.now() - core.options.ttl, _EXPIRE_MOST)
            await core.remove(call, old, fenced=True, counter="expired")
        excess = core.excess(0)
        if excess > 0:
            await core.remove(call, core.index.oldest(excess), fenced=True)
        _end_if_cancelled(call)

    async def flush(self) -> None:
        """Keep the times of accesses in the files' own."""
        core = self._core
        times = core.index.take_accesses(_FLUSH_MOST)
        if not times or core.health.stops_stores:
            return
        core.shared.used((key, core.index.bytes_of(key), time) for key, time in times)
        call = Call(core.clock, core.clock() + core.options.stuck_after)
        await core.walkers.spread(call, self._write_access, times, None, memory=False)
        _end_if_cancelled(call)

    def _write_access(self, pair: tuple[Key, float]) -> None:
        """In a thread. What can't be kept is only an age."""
        try:
            self._core.files.write_access(*pair)
        except OSError as e:
            _log.debug("fs tier: access time of %s: %s", pair[0].hex(), e)

    def _say_goodbye(self) -> None:
        """In a thread."""
        shared = self._core.shared
        try:
            shared.exchange(shared.take_pending(), shared.use(self._core.index.used), False)
            shared.lease.release()
        except OSError as e:
            _log.warning("fs tier at %s: leaving it: %s", self._core.root.path, e)

    # ------------------------------------------------------------ walks

    async def walk(self) -> None:
        """Learn what is on disk; the first walk recovers the index."""
        core = self._core
        made = core.root.made
        core.gone = {}
        if not core.recovered:
            self.progress = "recovering"
        before = list(core.index)
        began, wall = core.clock(), core.now()
        found: list[Found] = []
        try:
            steps = await core.off(core.walkers, self._folders, None)
            if steps is None:
                return
            shown = began
            for at in range(0, len(steps), _STEPS):
                batch = steps[at : at + _STEPS]
                call = Call(core.clock, core.clock() + core.options.deadline)
                done = await core.walkers.spread(call, self._look, batch, None, memory=False)
                _end_if_cancelled(call)
                if core.root.made != made:
                    return  # what was found is gone
                for step in done:
                    if step is None:
                        return  # later again
                    there = [f for f in step.found if f.key not in core.gone]
                    new = core.index.recover(there)
                    if new:
                        core.context.on_found(new)
                    core.counters["corrupt"] += step.broken
                    found += there
                if not core.recovered:
                    self.progress = (
                        f"recovering: {len(core.index)} chunks so far, "
                        f"{at + len(batch)} of {len(steps)} folders"
                    )
                    if core.clock() - shown >= _PROGRESS_EVERY:
                        shown = core.clock()
                        _log.info("fs tier at %s: %s", core.root.path, self.progress)
            await self._reconcile(found, before, wall)
            if not core.recovered:
                seconds = core.clock() - began
                _log.info("fs tier: found %d chunks in %.1f s", len(found), seconds)
            core.recovered = core.shared.sure = True
        finally:
            core.gone = None
            self.progress = ""
        await core.off(core.keeper, self._tidy, None)
        await self._evict()

    def _folders(self) -> list[Folder] | None:
        """In a thread."""
        try:
            return folders(self._core.root)
        except OSError as e:
            _log.warning("fs tier at %s: can't be walked: %s", self._core.root.path, e)
            return None

    def _look(self, folder: Folder) -> Step | None:
        """In a thread."""
        try:
            return look(self._core.root, self._core.files.quarantine, folder)
        except OSError as e:
            _log.warning("fs tier at %s: %s: %s", self._core.root.path, folder, e)
            return None

    async def _reconcile(self, found: list[Found], before: list[Key], wall: float) -> None:
        """Put the index in order of age, and drop what the walk has not found."""
        core = self._core

        def sort() -> set[Key]:
            found.sort(reverse=True)
            return set(before).difference(f.key for f in found) if before else set()

        missing = await asyncio.to_thread(sort)
        youngest = iter(found)
        while slice_ := list(islice(youngest, _SLICE)):
            core.index.order(slice_)
            await asyncio.sleep(0)
        vanished = [k for k in missing if k in core.index and core.index.written(k) < wall]
        for key in vanished:
            core.drop(key)
        core.announce(vanished)

    def _tidy(self) -> None:
        """In a thread."""
        try:
            self._core.shared.tidy()
        except OSError as e:
            _log.warning("fs tier at %s: %s", self._core.root.path, e)


def _end_if_cancelled(call: Call) -> None:
    """Threads keep a cancelled task until what they did is settled."""
    if call.cancelled:
        raise asyncio.CancelledError
