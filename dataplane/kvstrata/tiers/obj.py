"""The obj tier: one object per chunk in a bucket, shared by the nodes that name the same prefix.

Metadata lives on the node's event loop: an index of what was seen in the store, in LRU order.
Requests run in the loop of a thread of their own, a batch at a time. Nothing is asked of the
store that is known well enough, and nothing at all while it fails: see `obj_health`.

The index is filled by listing, in the background from the start on and every `refresh` seconds;
what it lacks is asked for. The bound covers payloads, of the chunks that this node knows of: what
others stored since the last listing is not counted before the next one. Outside it are metadata,
unfinished uploads and at most 64 quarantined objects.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvstrata.backoff import Backoff
from kvstrata.errors import ConfigError, KVStrataError, Missing
from kvstrata.keys import DIGEST_BYTES, Key
from kvstrata.tiers.base import Item, Outcome, Tier, TierContext, Usage
from kvstrata.tiers.calls import Call, Calls
from kvstrata.tiers.obj_batches import LATE, Batches, Done
from kvstrata.tiers.obj_chunks import ChunkObjects
from kvstrata.tiers.obj_client import ObjectClient
from kvstrata.tiers.obj_conditions import Condition, Fault, Unsupported
from kvstrata.tiers.obj_health import Health
from kvstrata.tiers.obj_identity import Confirming, identify
from kvstrata.tiers.obj_known import Known
from kvstrata.tiers.obj_listing import Listing
from kvstrata.tiers.obj_options import ObjOptions
from kvstrata.tiers.obj_pace import Retry
from kvstrata.tiers.obj_thread import LoopThread

__all__ = ["ObjOptions", "ObjTier"]

_log = logging.getLogger(__name__)

_OPENING = 10.0
_GRACE = 2.0


class ObjTier(Tier):
    """Chunks as objects of an S3-compatible store; see `ObjOptions` for its options."""

    name = "obj"

    def __init__(
        self,
        options: ObjOptions,
        context: TierContext,
        thread: LoopThread,
        client: ObjectClient,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Use `open`."""
        self.store_id = ""
        self._options = options
        self._context = context
        self._thread = thread
        self._client = client
        self._wall = wall
        self._retry = Retry(options.attempts)
        self._chunks = ChunkObjects(client, self._retry, options)
        self._calls = Calls(self.name, context.clock, options.deadline)
        self._health = Health(self._probe_store, Backoff(options.cool_off, 30 * options.cool_off))
        self._batches = Batches(thread, self._chunks, options)
        self._known = Known(self.name, options, context, self._calls, self._batches, self._health)
        self._index = self._known.index
        self._listing = Listing(
            self._index,
            self._chunks,
            self._batches,
            self._aside,
            self._known.announce,
            self._health.failed,
            self._confirm,
        )
        self._evicting = asyncio.Lock()
        self._described: set[bytes] = set()
        self._confirming = Confirming(
            self._batches, self._chunks, None, self._forget, self._described.clear
        )
        self._background: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, options: dict[str, Any], context: TierContext) -> ObjTier:
        """Create or join the store, and begin to list it.

        A store that can't be reached is waited for in the background; until then all is missing.
        Raises `ConfigError`.
        """
        parsed = ObjOptions.parse(options)
        if importlib.util.find_spec("aioboto3") is None:
            raise ConfigError("obj tier needs aioboto3: `pip install 'kvstrata[s3]'`")
        thread = LoopThread("kvstrata-obj")
        tier = cls(parsed, context, thread, ObjectClient(parsed))
        try:
            await tier._connect()
        except BaseException:
            await tier.close()
            raise
        tier._background = asyncio.create_task(tier._listing.repeat(parsed.refresh, tier._tidy))
        if parsed.capacity is None and parsed.eviction == "list":
            _log.warning("obj tier on bucket %s has no bound: set `capacity`", parsed.bucket)
        return tier

    async def listed(self) -> None:
        """Return when the store has been listed once: then `keys` and `usage` tell all of it."""
        await self._listing.complete()

    # ------------------------------------------------------------ calls

    async def lookup(self, keys: Sequence[Key], deadline: float | None = None) -> list[bool]:
        with self._calls.running(deadline) as call:
            if not self._health.well:
                return [False] * len(keys)
            there = {key: self._index.there(key) for key in dict.fromkeys(keys)}
            unknown = [key for key, known in there.items() if known is None]
            for key, d in zip(unknown, await self._known.ask(call, unknown), strict=True):
                there[key] = d.outcome is Outcome.PRESENT and key in self._index
            return [bool(there[key]) for key in keys]

    async def store(self, batch: Sequence[Item], deadline: float | None = None) -> list[Outcome]:
        with self._calls.running(deadline) as call:
            if not self._health.well:
                return [Outcome.FAILED] * len(batch)
            first: dict[Key, int] = {}
            for i, item in enumerate(batch):
                first.setdefault(item.key, i)
            self._index.learn(batch)
            mark = self._known.drops.mark()
            there = {key: self._index.there(key) for key in first}
            outcomes = dict.fromkeys(first, Outcome.PRESENT)
            self._index.touch([key for key, known in there.items() if known])
            new = [batch[i] for key, i in first.items() if not there[key]]
            outcomes |= await self._store_new(call, new)
            sizes = {key: batch[i].view.nbytes for key, i in first.items()}
            outcomes = await self._known.settle_store(call, sizes, outcomes, mark)
            again = outcomes | {
                key: Outcome.PRESENT for key, o in outcomes.items() if o is Outcome.STORED
            }
            return [
                (outcomes if first[item.key] == i else again)[item.key]
                for i, item in enumerate(batch)
            ]

    async def load(self, batch: Sequence[Item], deadline: float | None = None) -> list[Outcome]:
        with self._calls.running(deadline) as call:
            if not self._health.well:
                return [Outcome.FAILED] * len(batch)
            outcomes = [Outcome.MISSING] * len(batch)
            asked = [n for n, i in enumerate(batch) if self._index.there(i.key) is not False]
            items = [batch[n] for n in asked]
            known = {item.key for item in items if item.key in self._index}
            mark = self._known.drops.mark()
            done = await self._batches.load(call, items)
            self._known.settle_load(items, done, known, mark)
            for n, d in zip(asked, done, strict=True):
                outcomes[n] = d.outcome
            return outcomes

    async def evict(self, keys: Sequence[Key]) -> list[bool]:
        with self._calls.running(None) as call:
            if not self._health.well:
                return [False] * len(keys)
            unique = dict.fromkeys(keys)
            await self._known.ask(call, [k for k in unique if self._index.there(k) is None])
            removed = await self._known.remove(call, [key for key in unique if key in self._index])
            self._known.announce(removed)
            return [key in removed for key in keys]

    def keys(self) -> list[Key]:
        self._calls.check_open()
        return self._index.keys()

    def usage(self) -> Usage:
        self._calls.check_open()
        bound = self._options.capacity
        detail = self._health.detail or self._listing.trouble
        if not detail and not self._index.complete:
            detail = f"listing: {len(self._index)} chunks so far"
        if not detail and bound is None and self._options.eviction == "list":
            detail = "no bound: set `capacity`"
        return Usage(
            used_bytes=self._index.used_bytes,
            chunks=len(self._index),
            capacity_bytes=None if bound is None else int(bound),  # ByteSize has no wire form
            healthy=self._health.well,
            detail=detail,
            counters=self._known.counters | self._others_counters(),
        )

    def _others_counters(self) -> dict[str, int]:
        found = {"retries": self._retry.retries, "reread": self._chunks.reread}
        if self._options.nixl:
            found |= {"by_nixl": self._client.by_nixl, "not_by_nixl": self._client.not_by_nixl}
        return found

    async def drain(self, deadline: float | None = None) -> None:
        await self._calls.drain(deadline)

    async def close(self) -> None:
        """Requests under way get a short time, then they are cut."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        ending = [asyncio.create_task(self._calls.close())]
        ending.append(asyncio.create_task(self._health.close()))
        if self._background is not None:
            self._background.cancel()
            ending.append(self._background)
        await asyncio.wait(ending, timeout=_GRACE)
        self._thread.cut()
        await asyncio.wait(ending)
        await self._thread.run(self._client.close())
        await self._thread.close()

    # ------------------------------------------------------------ stores

    async def _store_new(self, call: Call, items: list[Item]) -> dict[Key, Outcome]:
        """Store what isn't known to be there, as far as there is room."""
        outcomes = dict.fromkeys((item.key for item in items), Outcome.NO_ROOM)
        admitted, claim = await self._admit(call, items)
        try:
            await self._describe(call, admitted)
            done = await self._batches.store(
                call, [(item, self._index.there(item.key) is False) for item in admitted]
            )
        finally:
            self._known.claimed -= claim
        for item, d in zip(admitted, done, strict=True):
            outcomes[item.key] = d.outcome
            if d.outcome is Outcome.FAILED and d is not LATE:
                self._index.forget(item.key)  # it may have come to be there all the same
            if d.outcome is Outcome.STORED:
                self._known.counters["stored"] += 1
                self._known.counters["store_bytes"] += item.view.nbytes
        self._known.report(done)
        return outcomes

    async def _admit(self, call: Call, items: list[Item]) -> tuple[list[Item], int]:
        """Make room and claim it: the items that fit, and the bytes claimed for them."""
        capacity = self._options.capacity
        if capacity is None or call.over():
            return items, 0
        try:
            async with asyncio.timeout(max(call.left(), 0)):
                await self._evicting.acquire()
        except TimeoutError:
            return items, 0  # too late to begin any
        try:
            sizes = [0 if item.key in self._index else item.view.nbytes for item in items]
            # What never fits makes nothing else go.
            asked = min(sum(size for size in sizes if size <= capacity), capacity)
            victims = self._known.victims(asked, keep={item.key for item in items})
            self._known.announce(await self._known.remove(call, victims))
            left = capacity - self._index.used_bytes - self._known.claimed
            admitted, claim = [], 0
            for item, size in zip(items, sizes, strict=True):
                if claim + size <= left or not size:
                    admitted.append(item)
                    claim += size
            self._known.claimed += claim
            return admitted, claim
        finally:
            self._evicting.release()

    async def _describe(self, call: Call, items: Sequence[Item]) -> None:
        """Write down the namespaces that come by for the first time."""
        for digest in {item.key[:DIGEST_BYTES] for item in items} - self._described:
            namespace = self._context.namespace_of(digest)
            if namespace is None or call.over():
                continue
            try:
                await self._batches.one(
                    call, self._chunks.describe(call, digest, namespace.document)
                )
            except KVStrataError as e:
                self._known.report([Done.failed(e)])
            else:
                self._described.add(digest)

    # ------------------------------------------------------------ the store as a whole

    @contextlib.contextmanager
    def _aside(self, seconds: float | None = None) -> Iterator[Call]:
        """A call in the background, which `drain` doesn't wait for."""
        patience = self._options.deadline if seconds is None else seconds
        call = Call(self._context.clock, self._context.clock() + patience)
        try:
            yield call
        finally:
            if call.cancelled:
                raise asyncio.CancelledError

    async def _connect(self) -> None:
        await self._thread.run(self._client.open())
        with self._aside(_OPENING) as call:
            found = await identify(self._batches, self._chunks, call, self._options)
        self.store_id = found.store_id
        self._confirming.known = found.identity
        if found.fault is not None:
            self._health.cool_off(found.fault)

    async def _probe_store(self) -> None:
        with self._aside(self._options.connect_timeout + 2.0) as call:
            if self._health.condition is Condition.DENIED:
                await self._batches.one(call, self._client.open())  # they may have been renewed
            await self._confirming.confirm(call)

    async def _confirm(self) -> None:
        with self._aside() as call:
            await self._confirming.confirm(call)

    def _forget(self) -> None:
        self._described.clear()
        self._known.announce(self._index.clear())

    async def _tidy(self) -> None:
        """After each listing: abort orphaned uploads, and evict what is over the bound."""
        before = self._wall() - self._options.orphans_after
        try:
            with self._aside() as call:
                self._known.counters["orphans"] += await self._batches.one(
                    call, self._chunks.abort_orphans(call, before)
                )
        except (Missing, Unsupported, Fault) as e:
            _log.info("obj tier: unfinished uploads can't be listed: %s", e)
        if self._options.capacity is not None:
            async with self._evicting:
                with self._aside() as call:
                    self._known.announce(
                        await self._known.remove(call, self._known.victims(0, keep=()))
                    )
