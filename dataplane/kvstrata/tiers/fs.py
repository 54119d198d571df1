"""The fs tier: one file per chunk in a directory, local or shared by several nodes.

Metadata lives on the event loop: an index of keys and their bytes on disk, in LRU order. Bytes
move in threads: loads, stores and probes have each their own, so a load never waits for a store.
The directory is the truth and others may change it, so a key that the index lacks is looked for
on disk, and an indexed file that is gone is a miss.

The bound covers the chunks this node knows of, by the disk they really use. On a shared
directory that is what was there at start and what passed through this node since; outside the
bound are directories and at most 64 quarantined files.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from kvstrata.errors import Corrupt
from kvstrata.keys import DIGEST_BYTES, Key
from kvstrata.tiers.base import Item, Outcome, Tier, TierContext, Usage
from kvstrata.tiers.calls import Call, Calls
from kvstrata.tiers.fs_files import ChunkFiles
from kvstrata.tiers.fs_format import file_bytes
from kvstrata.tiers.fs_options import FsOptions
from kvstrata.tiers.fs_root import Root

__all__ = ["FsOptions", "FsTier"]

_log = logging.getLogger(__name__)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_PROBE_THREADS = 2


class _Done(NamedTuple):
    outcome: Outcome
    disk_bytes: int = 0
    error: str = ""


_LATE = _Done(Outcome.FAILED)


class FsTier(Tier):
    """Chunks as files; see `FsOptions` for its options."""

    name = "fs"

    def __init__(self, options: FsOptions, context: TierContext, root: Root) -> None:
        """Use `open`."""
        self.store_id = f"fs-{root.id}"
        self._options = options
        self._context = context
        self._root = root
        self._files = ChunkFiles(root)
        self._readers = ThreadPoolExecutor(options.read_threads, "kvstrata-fs-read")
        self._writers = ThreadPoolExecutor(options.write_threads, "kvstrata-fs-write")
        self._probers = ThreadPoolExecutor(_PROBE_THREADS, "kvstrata-fs-probe")
        self._index: OrderedDict[Key, int] = OrderedDict()
        self._used = 0
        self._claimed = 0  # by stores that have not settled
        self._evicting = asyncio.Lock()
        self._described: set[bytes] = set()
        self._calls = Calls(self.name, context.clock, options.deadline)
        self._counters = dict.fromkeys(
            ("stored", "loaded", "evicted", "corrupt", "errors", "store_bytes", "load_bytes"), 0
        )

    @classmethod
    async def open(cls, options: dict[str, Any], context: TierContext) -> FsTier:
        """Create or join the store at `root` and recover its index from the directory.

        Recovery takes a `stat` per file. Raises `ConfigError`.
        """
        parsed = FsOptions.parse(options)
        root = await asyncio.to_thread(Root, parsed.root)
        tier = cls(parsed, context, root)
        try:
            await tier._recover()
        except BaseException:
            await tier.close()
            raise
        if parsed.capacity is None:
            _log.warning("fs tier at %s has no bound: set `capacity`", root.path)
        return tier

    async def lookup(self, keys: Sequence[Key], deadline: float | None = None) -> list[bool]:
        with self._calls.running(deadline) as call:
            unknown = [key for key in dict.fromkeys(keys) if key not in self._index]
            if unknown:
                probed = await self._calls.spread(
                    call, self._probers, _PROBE_THREADS, self._probe, unknown, _LATE
                )
                found = zip(unknown, probed, strict=True)
                self._hold([(k, d.disk_bytes) for k, d in found if d.outcome is Outcome.PRESENT])
                self._report(probed)
            return [key in self._index for key in keys]

    async def store(self, batch: Sequence[Item], deadline: float | None = None) -> list[Outcome]:
        with self._calls.running(deadline) as call:
            first: dict[Key, int] = {}
            for i, item in enumerate(batch):
                first.setdefault(item.key, i)
            known = self._index.keys() & first.keys()
            outcomes = dict.fromkeys(first, Outcome.NO_ROOM)
            admitted, claim = await self._admit(call, [batch[i] for i in first.values()])
            try:
                await self._describe(admitted)
                done = await self._calls.spread(
                    call, self._writers, self._options.write_threads, self._store, admitted, _LATE
                )
            finally:
                self._claimed -= claim
            self._settle_store(admitted, done, known)
            outcomes |= {x.key: d.outcome for x, d in zip(admitted, done, strict=True)}
            again = outcomes | {
                key: Outcome.PRESENT for key, o in outcomes.items() if o is Outcome.STORED
            }
            return [
                (outcomes if first[item.key] == i else again)[item.key]
                for i, item in enumerate(batch)
            ]

    async def load(self, batch: Sequence[Item], deadline: float | None = None) -> list[Outcome]:
        with self._calls.running(deadline) as call:
            known = {item.key for item in batch if item.key in self._index}
            done = await self._calls.spread(
                call, self._readers, self._options.read_threads, self._load, batch, _LATE
            )
            self._settle_load(batch, done, known)
            return [d.outcome for d in done]

    async def evict(self, keys: Sequence[Key]) -> list[bool]:
        with self._calls.running(None) as call:
            removed = await self._remove(call, list(dict.fromkeys(keys)))
            self._announce(removed)
            return [key in removed for key in keys]

    def keys(self) -> list[Key]:
        self._calls.check_open()
        return list(self._index)

    def usage(self) -> Usage:
        self._calls.check_open()
        bound = self._options.capacity
        capacity = None if bound is None else int(bound)  # ByteSize has no wire form
        return Usage(
            used_bytes=self._used,
            chunks=len(self._index),
            capacity_bytes=capacity,
            detail="no bound: set `capacity`" if capacity is None else "",
            counters=dict(self._counters),
        )

    async def drain(self, deadline: float | None = None) -> None:
        await self._calls.drain(deadline)

    async def close(self) -> None:
        await self._calls.close()
        await asyncio.to_thread(self._shut)

    def _shut(self) -> None:
        for pool in (self._readers, self._writers, self._probers):
            pool.shutdown()
        self._root.close()

    # ------------------------------------------------------------ one chunk, in a thread

    def _probe(self, key: Key) -> _Done:
        try:
            taken = self._files.probe(key)
        except OSError as e:
            return _Done(Outcome.FAILED, error=str(e))
        return _Done(Outcome.MISSING) if taken is None else _Done(Outcome.PRESENT, taken)

    def _store(self, item: Item) -> _Done:
        try:
            written, taken = self._files.write(item.key, item.view, item.checksum)
        except OSError as e:
            return _Done(Outcome.NO_ROOM if e.errno in _FULL else Outcome.FAILED, error=str(e))
        return _Done(Outcome.STORED if written else Outcome.PRESENT, taken)

    def _load(self, item: Item) -> _Done:
        try:
            return _Done(Outcome.LOADED, self._files.read(item.key, item.view))
        except FileNotFoundError:
            return _Done(Outcome.MISSING)
        except Corrupt as e:
            return _Done(Outcome.CORRUPT, error=str(e))
        except OSError as e:
            return _Done(Outcome.FAILED, error=str(e))

    def _unlink(self, key: Key) -> _Done:
        try:
            return _Done(Outcome.PRESENT if self._files.remove(key) else Outcome.MISSING)
        except OSError as e:
            return _Done(Outcome.FAILED, error=str(e))

    # ------------------------------------------------------------ the index, on the loop

    async def _recover(self) -> None:
        with self._calls.running(None) as call:
            loop = asyncio.get_running_loop()
            found, broken = await loop.run_in_executor(self._writers, self._files.recover)
            self._hold([(f.key, f.disk_bytes) for f in reversed(found)])
            self._counters["corrupt"] += broken
            await self._remove(call, self._victims(0, keep=()))

    async def _admit(self, call: Call, items: list[Item]) -> tuple[list[Item], int]:
        """Make room and claim it: the items that fit, and the bytes claimed for them."""
        capacity = self._options.capacity
        if capacity is None or call.over():
            return items, 0
        sizes = [0 if i.key in self._index else file_bytes(i.view.nbytes) for i in items]
        async with self._evicting:
            asked = min(sum(sizes), capacity)
            victims = self._victims(asked, keep={item.key for item in items})
            self._announce(await self._remove(call, victims))
            left = capacity - self._used - self._claimed
            admitted, claim = [], 0
            for item, size in zip(items, sizes, strict=True):
                if claim + size <= left or not size:
                    admitted.append(item)
                    claim += size
            self._claimed += claim
            return admitted, claim

    def _victims(self, asked: int, keep: Collection[Key]) -> list[Key]:
        """What to evict, oldest first, before `asked` more bytes are claimed."""
        capacity = self._options.capacity
        wanted = self._used + self._claimed + asked
        if capacity is None or wanted <= capacity * self._options.high_watermark:
            return []
        excess = wanted - capacity * self._options.low_watermark
        victims = []
        for key, taken in self._index.items():
            if excess <= 0:
                break
            if key not in keep:
                victims.append(key)
                excess -= taken
        return victims

    async def _remove(self, call: Call, keys: list[Key]) -> dict[Key, None]:
        """Unlink; those that were there, or that we believed to be, in order."""
        done = await self._calls.spread(
            call, self._writers, self._options.write_threads, self._unlink, keys, _LATE
        )
        self._report(done)
        removed: dict[Key, None] = {}
        for key, d in zip(keys, done, strict=True):
            if d.outcome is Outcome.FAILED:
                # What can't be unlinked must not be the first victim of every store.
                if d.error and key in self._index:
                    self._index.move_to_end(key)
            elif self._drop(key) or d.outcome is Outcome.PRESENT:
                removed[key] = None
        self._counters["evicted"] += len(removed)
        return removed

    async def _describe(self, items: Sequence[Item]) -> None:
        """Write down the namespaces that come by for the first time."""
        loop = asyncio.get_running_loop()
        for digest in {item.key[:DIGEST_BYTES] for item in items} - self._described:
            namespace = self._context.namespace_of(digest)
            if namespace is None:
                continue
            try:
                await loop.run_in_executor(
                    self._writers, self._files.describe, digest, namespace.document
                )
            except OSError as e:
                self._report([_Done(Outcome.FAILED, error=str(e))])
            else:
                self._described.add(digest)

    def _settle_store(
        self, items: Sequence[Item], done: Sequence[_Done], known: Collection[Key]
    ) -> None:
        held = []
        for item, d in zip(items, done, strict=True):
            if d.outcome is Outcome.STORED or (
                d.outcome is Outcome.PRESENT and not self._evicted_since(item.key, known)
            ):
                held.append((item.key, d.disk_bytes))
            if d.outcome is Outcome.STORED:
                self._counters["stored"] += 1
                self._counters["store_bytes"] += item.view.nbytes
        self._hold(held)
        self._report(done)

    def _settle_load(
        self, items: Sequence[Item], done: Sequence[_Done], known: Collection[Key]
    ) -> None:
        held: list[tuple[Key, int]] = []
        gone: list[Key] = []
        for item, d in zip(items, done, strict=True):
            if d.outcome is Outcome.LOADED:
                if not self._evicted_since(item.key, known):
                    held.append((item.key, d.disk_bytes))
                self._counters["loaded"] += 1
                self._counters["load_bytes"] += item.view.nbytes
            elif d.outcome is Outcome.CORRUPT:
                self._drop(item.key)
                gone.append(item.key)
                self._counters["corrupt"] += 1
            elif d.outcome is Outcome.MISSING and self._drop(item.key):
                gone.append(item.key)
        self._hold(held)
        self._announce(gone)
        self._report(done)

    def _evicted_since(self, key: Key, known: Collection[Key]) -> bool:
        """Whether a chunk that a thread saw, of those `known` at first, has been dropped since."""
        return key in known and key not in self._index

    def _hold(self, chunks: Sequence[tuple[Key, int]]) -> None:
        """They are on disk, and the first of them is the youngest now: see `policies.Policy`."""
        for key, taken in reversed(chunks):
            self._used += taken - self._index.get(key, 0)
            self._index[key] = taken
            self._index.move_to_end(key)

    def _drop(self, key: Key) -> bool:
        taken = self._index.pop(key, None)
        self._used -= taken or 0
        return taken is not None

    def _announce(self, removed: Collection[Key]) -> None:
        if removed:
            self._context.on_removed(list(removed))

    def _report(self, done: Sequence[_Done]) -> None:
        """Count errors, and log the first of a batch."""
        errors = [d for d in done if d.error]
        if errors:
            self._counters["errors"] += sum(d.outcome is Outcome.FAILED for d in errors)
            _log.warning("fs tier: %d chunks, first of them: %s", len(errors), errors[0].error)
