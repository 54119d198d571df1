"""Batches of chunks, handed over to the loop that talks to the store: see `obj_thread`.

Called on the node's loop. Every item gets a `Done`; what went wrong is told in it, not raised.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, NamedTuple, TypeVar

from kvstrata.errors import Corrupt, KVStrataError, Missing
from kvstrata.keys import Key
from kvstrata.tiers.base import Item, Outcome
from kvstrata.tiers.calls import Call
from kvstrata.tiers.obj_chunks import ChunkObjects
from kvstrata.tiers.obj_conditions import Condition, Fault
from kvstrata.tiers.obj_options import ObjOptions
from kvstrata.tiers.obj_thread import LoopThread

__all__ = ["LATE", "Batches", "Done"]

T = TypeVar("T")

_DELETES_AT_ONCE = 1000


class Done(NamedTuple):
    """`nbytes` of the payload in the store, where there is one."""

    outcome: Outcome
    nbytes: int = 0
    error: str = ""
    fault: Fault | None = None

    @classmethod
    def failed(cls, error: Exception) -> Done:
        fault = error if isinstance(error, Fault) else None
        full = fault is not None and fault.condition is Condition.FULL
        return cls(Outcome.NO_ROOM if full else Outcome.FAILED, 0, str(error), fault)


LATE = Done(Outcome.FAILED)
"""Not begun: the call was over."""
_CUT = Done.failed(Fault(Condition.TIMEOUT, "nothing came before the deadline"))


class Batches:
    def __init__(self, thread: LoopThread, chunks: ChunkObjects, options: ObjOptions) -> None:
        self._thread = thread
        self._chunks = chunks
        self._widths = (
            options.lookup_concurrency,
            options.store_concurrency,
            options.load_concurrency,
        )
        self._probes, self._stores, self._loads = map(asyncio.Semaphore, self._widths)

    async def probe(self, call: Call, keys: Sequence[Key]) -> list[Done]:
        """`PRESENT | MISSING | FAILED` each."""

        async def probe(key: Key) -> Done:
            try:
                nbytes = await self._chunks.probe(call, key)
            except KVStrataError as e:
                return Done.failed(e)
            return Done(Outcome.MISSING) if nbytes is None else Done(Outcome.PRESENT, nbytes)

        if not keys:
            return []
        return await self._run(
            call,
            self._thread.spread(call, self._probes, self._widths[0], probe, keys, LATE, _CUT),
        )

    async def store(self, call: Call, items: Sequence[tuple[Item, bool]]) -> list[Done]:
        """`STORED | PRESENT | NO_ROOM | FAILED` each; with each item, whether it is known not to
        be there."""

        async def store(item_missing: tuple[Item, bool]) -> Done:
            item, missing = item_missing
            try:
                written = await self._chunks.store(call, item, missing)
            except KVStrataError as e:
                return Done.failed(e)
            return Done(Outcome.STORED if written else Outcome.PRESENT, item.view.nbytes)

        if not items:
            return []
        return await self._run(
            call,
            self._thread.spread(call, self._stores, self._widths[1], store, items, LATE, _CUT),
        )

    async def load(self, call: Call, items: Sequence[Item]) -> list[Done]:
        """`LOADED | MISSING | CORRUPT | FAILED` each."""

        async def load(item: Item) -> Done:
            try:
                return Done(Outcome.LOADED, await self._chunks.load(call, item))
            except Missing:
                return Done(Outcome.MISSING)
            except Corrupt as e:
                return Done(Outcome.CORRUPT, error=str(e))
            except KVStrataError as e:
                return Done.failed(e)

        if not items:
            return []
        return await self._run(
            call,
            self._thread.spread(call, self._loads, self._widths[2], load, items, LATE, _CUT),
        )

    async def remove(self, call: Call, keys: Sequence[Key]) -> list[Done]:
        """`MISSING | FAILED` each: whether it was there is not told."""
        done: list[Done] = []
        for start in range(0, len(keys), _DELETES_AT_ONCE):
            part = keys[start : start + _DELETES_AT_ONCE]
            try:
                gone = await self.one(call, self._chunks.remove(call, part))
            except KVStrataError as e:
                done += [Done.failed(e)] * len(part)
            else:
                stuck = Done(Outcome.FAILED, error="the store did not delete it")
                done += [Done(Outcome.MISSING) if is_gone else stuck for is_gone in gone]
        return done

    async def one(self, call: Call, work: Coroutine[Any, Any, T]) -> T:
        """One piece of work that isn't of a batch. Raises `Fault` at the end of the call's time,
        or where the call was stopped before."""
        if call.stopped:
            work.close()
            raise Fault(Condition.TIMEOUT, "not begun: the call was stopped")
        try:
            return await self._run(call, self._thread.bounded(call, work))
        except TimeoutError:
            raise Fault(Condition.TIMEOUT, "nothing came before the deadline") from None

    async def _run(self, call: Call, work: Coroutine[Any, Any, T]) -> T:
        return await self._thread.run(work, call)
