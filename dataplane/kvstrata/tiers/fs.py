"""The fs tier: one file per chunk in a directory, local or shared by several nodes.

Metadata lives on the event loop: an index of keys and their bytes on disk, in LRU order. Bytes
move in threads: loads, stores and probes have each their own, and loads go first. The directory
is the truth and others may change it, so a key that the index lacks is looked for on disk, and an
indexed file that is gone is a miss.

The bound covers the disk that chunks really use; outside it are directories, the quarantine with
its own bounds, and a few MiB of news. Of several nodes on one directory one evicts, and all
share the room that is left: `fs_shared` and `fs_lease` say how. What a mount in trouble stops,
and how that ends, is in `fs_health`; what goes on in the background in `fs_upkeep`.

    fs           the tier: its calls          fs_files       chunk files, fs_format their bytes
    fs_core      what calls and upkeep share  fs_root        the directory and its identity
    fs_upkeep    the background               fs_walk        what is in it
    fs_index     what is held, in order       fs_quarantine  where damage goes
    fs_shared    the others on the mount      fs_lease       who evicts
    fs_health    what is wrong with it        fs_news        what they tell each other
    fs_threads   threads that may hang        fs_system      the system's calls, to be faked
    fs_work      what they do to a chunk      fs_writers     who uses the store
    drops        what crosses a removal       fs_options     what can be set
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from typing import Any

from kvstrata.errors import ConfigError
from kvstrata.keys import DIGEST_BYTES, Key
from kvstrata.tiers.base import Item, Outcome, Tier, TierContext, Usage
from kvstrata.tiers.calls import Call
from kvstrata.tiers.fs_core import Core
from kvstrata.tiers.fs_format import file_bytes
from kvstrata.tiers.fs_health import Condition
from kvstrata.tiers.fs_index import Held
from kvstrata.tiers.fs_options import FsOptions
from kvstrata.tiers.fs_root import Root
from kvstrata.tiers.fs_system import FileSystem
from kvstrata.tiers.fs_threads import Workers
from kvstrata.tiers.fs_upkeep import Upkeep
from kvstrata.tiers.fs_work import LATE, Done, failed

__all__ = ["FsOptions", "FsTier"]

_log = logging.getLogger(__name__)

# Closing waits no longer for calls that run, and opening for a mount that doesn't answer.
_CLOSE_SECONDS = 10.0
_OPEN_DEADLINES = 3
# On a full disk, how often a store makes room before it says so, each time for so much more.
_ROOM_TRIED = (1, 2, 4)
_MISSING = Outcome.MISSING
_KEPT = (Outcome.STORED, Outcome.PRESENT)


class FsTier(Tier):
    """Chunks as files; see `FsOptions` for its options."""

    name = "fs"

    def __init__(self, options: FsOptions, context: TierContext, root: Root) -> None:
        """Use `open`."""
        self.store_id = f"fs-{root.id}"
        self._options = options
        self._core = Core(self.name, options, context, root)
        self._upkeep = Upkeep(self._core)
        self._evicting = asyncio.Lock()
        self._described: set[bytes] = set()

    @classmethod
    async def open(
        cls, options: dict[str, Any], context: TierContext, system: FileSystem | None = None
    ) -> FsTier:
        """Create or join the store at `root` and recover its index from the directory.

        Recovery takes a `stat` per file. After `recovery_wait` the tier is open although it goes
        on: what is not found yet is looked for on disk when it is asked for. Raises `ConfigError`.
        """
        parsed = FsOptions.parse(options)
        root = await _opened(parsed, context, FileSystem() if system is None else system)
        tier = cls(parsed, context, root)
        try:
            await tier._upkeep.start()
        except BaseException:
            await tier.close()
            raise
        if parsed.capacity is None:
            _log.warning("fs tier at %s has no bound: set `capacity`", root.path)
        return tier

    async def lookup(self, keys: Sequence[Key], deadline: float | None = None) -> list[bool]:
        core = self._core
        # Nothing of it touches memory, so that it need not wait for a mount that hangs.
        soon = core.clock() + self._options.stuck_after
        with core.calls.running(soon if deadline is None else min(deadline, soon)) as call:
            if core.health.stops_loads:
                return [False] * len(keys)
            unknown = [key for key in dict.fromkeys(keys) if key not in core.index]
            if unknown:
                mark = core.drops.mark()
                probed = await core.probers.spread(
                    call, core.work.probe, unknown, LATE, memory=False
                )
                for key, d in zip(unknown, probed, strict=True):
                    if d.outcome is Outcome.PRESENT and not core.drops.since(key, mark):
                        core.index.learn(key, d.disk_bytes, d.time)
                core.report(probed)
                if core.health.stops_loads:
                    return [False] * len(keys)
            expired = self._expired(keys)
            return [key in core.index and key not in expired for key in keys]

    async def store(self, batch: Sequence[Item], deadline: float | None = None) -> list[Outcome]:
        core = self._core
        with core.calls.running(deadline) as call:
            first: dict[Key, int] = {}
            for i, item in enumerate(batch):
                first.setdefault(item.key, i)
            outcomes = dict.fromkeys(first, Outcome.NO_ROOM)
            wanted = []
            for i in first.values():
                refusal = core.refusal(batch[i])
                if refusal is None:
                    wanted.append(batch[i])
                else:
                    outcomes[batch[i].key] = refusal
            mark, began = core.drops.mark(), core.now()
            there, present, absent = await self._confirm(call, wanted)
            admitted, claim = await self._admit(call, absent, keep=first.keys())
            try:
                await self._describe(call, admitted)
                done = await core.writers.spread(call, core.work.store, admitted, LATE)
                done = await self._try_again_if_full(call, admitted, done, keep=first.keys())
                items, done = [*there, *admitted], [*present, *done]
                gone = await self._settle_store(call, items, done, mark, began)
            finally:
                core.claimed -= claim
            outcomes |= {x.key: d.outcome for x, d in zip(items, done, strict=True)}
            # Whoever is told of the removal first must not be told then that it is there.
            outcomes |= dict.fromkeys(gone, Outcome.FAILED)
            again = outcomes | {
                key: Outcome.PRESENT for key, o in outcomes.items() if o is Outcome.STORED
            }
            return [
                (outcomes if first[item.key] == i else again)[item.key]
                for i, item in enumerate(batch)
            ]

    async def load(self, batch: Sequence[Item], deadline: float | None = None) -> list[Outcome]:
        core = self._core
        with core.calls.running(deadline) as call:
            if core.health.stops_loads:
                return [Outcome.FAILED] * len(batch)
            keys = [item.key for item in batch]
            expired, known, mark = self._expired(keys), core.index_of(keys), core.drops.mark()
            wanted = [item for item in batch if item.key not in expired]
            done = await core.readers.spread(call, core.work.load, wanted, LATE)
            self._settle_load(wanted, done, known, mark)
            results = iter(done)
            return [Outcome.MISSING if key in expired else next(results).outcome for key in keys]

    async def evict(self, keys: Sequence[Key]) -> list[bool]:
        core = self._core
        with core.calls.running(None) as call:
            if core.health.stops_loads:
                return [False] * len(keys)
            removed = await core.remove(call, list(dict.fromkeys(keys)), fenced=False)
            return [key in removed for key in keys]

    def keys(self) -> list[Key]:
        self._core.calls.check_open()
        return list(self._core.index)

    def usage(self) -> Usage:
        core = self._core
        core.calls.check_open()
        parts = [core.health.detail, self._upkeep.progress]
        if core.capacity is None:
            parts.append("no bound: set `capacity`")
        parts.append("O_DIRECT" if core.root.direct else "buffered")
        if not core.shared.evicts:
            parts.append("another node evicts")
        return Usage(
            used_bytes=core.index.used,
            chunks=len(core.index),
            capacity_bytes=core.capacity,
            healthy=not core.health.detail,
            detail="; ".join(part for part in parts if part),
            counters=dict(core.counters),
        )

    async def drain(self, deadline: float | None = None) -> None:
        await self._core.calls.drain_unless(self._core.hung, deadline)

    async def close(self) -> None:
        """Release everything. What hangs in the mount is not waited for: those calls have not
        returned, and hold their memory until they do."""
        core = self._core
        if core.closing is None:
            core.closing = asyncio.ensure_future(self._close())
        await asyncio.shield(core.closing)

    async def _close(self) -> None:
        core = self._core
        left = await core.calls.close_unless(core.hung, _CLOSE_SECONDS)
        if left:
            _log.error("fs tier at %s: closed with %d calls that hang", core.root.path, left)
        await self._upkeep.stop()
        if not core.hung():
            await core.off(core.keeper, core.root.close, None)
        core.close()

    # ------------------------------------------------------------ on the loop

    async def _confirm(
        self, call: Call, items: list[Item]
    ) -> tuple[list[Item], list[Done], list[Item]]:
        """Of those that we know: which are there indeed, how, and with the others which are not.

        Others may have removed or damaged what the index has, and then it takes room anew.
        """
        core = self._core
        known = [item for item in items if item.key in core.index]
        done = await core.writers.spread(call, core.work.look_for, known, LATE, memory=False)
        there = {i.key: d for i, d in zip(known, done, strict=True) if d.outcome is not _MISSING}
        gone = [i.key for i, d in zip(known, done, strict=True) if d.outcome is _MISSING]
        core.announce([key for key in gone if core.drop(key)])
        return (
            [item for item in known if item.key in there],
            list(there.values()),
            [item for item in items if item.key not in there],
        )

    async def _admit(
        self, call: Call, items: list[Item], keep: Collection[Key]
    ) -> tuple[list[Item], int]:
        """Make room and claim it: the items that fit, and the bytes claimed for them."""
        core = self._core
        if core.capacity is None or call.over() or not items:
            return items, 0
        sizes = [file_bytes(item.view.nbytes) for item in items]
        async with self._evicting:
            excess = core.excess(min(sum(sizes), core.capacity))
            if excess > 0 and core.shared.evicts:
                victims = core.index.oldest(excess, keep)
                await core.remove(call, victims, fenced=True)
            left = core.room() or 0
            admitted, claim = [], 0
            for item, size in zip(items, sizes, strict=True):
                if claim + size <= left:
                    admitted.append(item)
                    claim += size
            core.claimed += claim
            return admitted, claim

    async def _try_again_if_full(
        self, call: Call, items: Sequence[Item], done: list[Done], keep: Collection[Key]
    ) -> list[Done]:
        """What found the disk full, again as long as room can be made, each time for more: others
        that store want it as well."""
        core = self._core
        for factor in _ROOM_TRIED:
            full = [i for i, d in enumerate(done) if d.condition is Condition.FULL]
            if not full or call.over():
                break
            wanted = sum(file_bytes(items[i].view.nbytes) for i in full)
            async with self._evicting:  # or all would give up the same chunks
                if not await core.make_room_on_disk(call, factor * wanted, keep):
                    break
            again = await core.writers.spread(call, core.work.store, [items[i] for i in full], LATE)
            for i, d in zip(full, again, strict=True):
                done[i] = d
        return done

    async def _describe(self, call: Call, items: Sequence[Item]) -> None:
        """Write down the namespaces that come by for the first time."""
        core = self._core
        for digest in {item.key[:DIGEST_BYTES] for item in items} - self._described:
            namespace = core.context.namespace_of(digest)
            if namespace is None:
                continue
            document = namespace.document

            def describe(digest: bytes = digest, document: bytes = document) -> Done:
                try:
                    core.files.describe(digest, document)
                except OSError as e:
                    return failed(e)
                return Done(Outcome.PRESENT)

            [done] = await core.writers.spread(
                call, lambda work: work(), [describe], LATE, memory=False
            )
            core.report([done])
            if done.outcome is Outcome.PRESENT:
                self._described.add(digest)

    async def _settle_store(
        self, call: Call, items: Sequence[Item], done: Sequence[Done], mark: int, began: float
    ) -> set[Key]:
        """Take up what is there now; what is gone again. To be answered at once."""
        core = self._core
        gone = await self._removed_again(call, items, done, mark)
        held, new = [], set()
        for item, d in zip(items, done, strict=True):
            if d.outcome in _KEPT and item.key not in gone:
                held.append(Held(item.key, d.disk_bytes, d.parent))
                if d.outcome is Outcome.STORED:
                    new.add(item.key)
            if d.outcome is Outcome.STORED:
                core.counters["stored"] += 1
                core.counters["store_bytes"] += item.view.nbytes
                core.counters["direct"] += d.direct
        core.hold(held, new, began)
        core.report(done)
        return gone

    async def _removed_again(
        self, call: Call, items: Sequence[Item], done: Sequence[Done], mark: int
    ) -> set[Key]:
        """Which of those there are gone again, or may be: removed while we stored them."""
        core = self._core

        async def there(keys: list[Key]) -> list[bool]:
            probed = await core.probers.spread(call, core.work.probe, keys, LATE, memory=False)
            return [d.outcome is Outcome.PRESENT for d in probed]

        kept = [i.key for i, d in zip(items, done, strict=True) if d.outcome in _KEPT]
        return await core.drops.gone(kept, mark, there)

    def _settle_load(
        self, items: Sequence[Item], done: Sequence[Done], known: Collection[Key], mark: int
    ) -> None:
        core = self._core
        held: list[Held] = []
        gone: list[Key] = []
        for item, d in zip(items, done, strict=True):
            if d.outcome is Outcome.LOADED:
                held.append(Held(item.key, d.disk_bytes, d.parent))
                core.counters["loaded"] += 1
                core.counters["load_bytes"] += item.view.nbytes
                core.counters["direct"] += d.direct
            elif d.outcome is Outcome.CORRUPT:
                # Of two that find it damaged at one time, one says so.
                dropped = core.drop(item.key)
                if dropped or (item.key not in known and d.set_aside):
                    gone.append(item.key)
                core.counters["corrupt"] += d.set_aside
            elif d.outcome is Outcome.MISSING and item.key in known and core.drop(item.key):
                gone.append(item.key)
        # Removed by others since, or found damaged by another of this batch.
        core.hold([h for h in held if not core.drops.since(h.key, mark)], (), 0.0)
        core.announce(gone)
        core.report(done)

    def _expired(self, keys: Sequence[Key]) -> set[Key]:
        """Those too old to be served, though nobody has removed them yet."""
        ttl, index = self._options.ttl, self._core.index
        if ttl is None:
            return set()
        before = self._core.now() - ttl
        return {key for key in keys if (index.accessed(key) or before) < before}


async def _opened(options: FsOptions, context: TierContext, system: FileSystem) -> Root:
    """The root, looked at in a thread that a mount which hangs may keep."""
    workers = Workers("open", 1, context.clock)
    try:
        call = Call(context.clock, context.clock() + _OPEN_DEADLINES * options.stuck_after)
        [root] = await workers.spread(
            call,
            lambda _: Root(options.root, system, options.direct, options.durability),
            [None],
            None,
            memory=False,
        )
    finally:
        workers.close()
    if root is None:
        raise ConfigError(f"fs tier: {options.root} does not answer: is its server there?")
    return root
