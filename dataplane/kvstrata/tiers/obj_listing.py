"""Keeping an index up to date by listing the store, now and then."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager

from kvstrata.backoff import Backoff
from kvstrata.errors import KVStrataError
from kvstrata.keys import Key
from kvstrata.tiers.calls import Call
from kvstrata.tiers.obj_batches import Batches
from kvstrata.tiers.obj_chunks import ChunkObjects, ChunkPage
from kvstrata.tiers.obj_conditions import Fault
from kvstrata.tiers.obj_index import Index

__all__ = ["Listing"]

_log = logging.getLogger(__name__)

_LONGEST_WAIT = 30.0  # seconds, after failures
_SLICE = 10_000  # keys between two turns of the loop: a millisecond or two


class Listing:
    """`once` lists the whole store, page by page; `trouble` says why the last one ended early."""

    def __init__(
        self,
        index: Index,
        chunks: ChunkObjects,
        batches: Batches,
        a_call: Callable[[], AbstractContextManager[Call]],
        on_gone: Callable[[Sequence[Key]], None],
        on_fault: Callable[[Fault], None],
        confirm: Callable[[], Awaitable[None]],
    ) -> None:
        """`confirm` raises `Fault` if it isn't this store that would be listed."""
        self._index = index
        self._chunks = chunks
        self._batches = batches
        self._a_call = a_call
        self._on_gone = on_gone
        self._on_fault = on_fault
        self._confirm = confirm
        self._complete = asyncio.Event()
        self.trouble = ""

    async def complete(self) -> None:
        """Return when the store has been listed once."""
        await self._complete.wait()

    async def repeat(self, every: float, after: Callable[[], Awaitable[None]]) -> None:
        """List every so many seconds, `after` each one; sooner again after a failure."""
        backoff = Backoff(base=min(1.0, every), cap=min(_LONGEST_WAIT, every))
        while True:
            wait = every
            try:
                await self.once()
                await after()
                backoff.reset()
                self.trouble = ""
            except Exception as e:
                wait = backoff.next()
                self.trouble = f"listing: {e}"
                if isinstance(e, Fault):
                    self._on_fault(e)
                expected = isinstance(e, KVStrataError)
                _log.warning("obj tier: listing its store: %s", e, exc_info=not expected)
            await asyncio.sleep(wait)

    async def once(self) -> None:
        await self._confirm()
        index = self._index
        first = not index.complete
        found: list[tuple[float, Key]] = []
        index.begin_listing()
        try:
            token: str | None = None
            while True:
                page = await self._page(token)
                index.list_page(page.chunks)
                if first:
                    fresh = (c for c in page.chunks if index.unused(c.key))
                    found += [(c.modified, c.key) for c in fresh]
                token = page.token
                if token is None:
                    break
            for part in _slices(index.keys()):
                self._on_gone(index.drop_unlisted(part))
                await asyncio.sleep(0)
        finally:
            index.end_listing()
        if first:
            # What nobody has used yet is used up in the order it was stored.
            await asyncio.to_thread(found.sort, reverse=True)
            for part in _slices([key for _, key in found]):
                index.older([key for key in part if index.unused(key)])
                await asyncio.sleep(0)
            index.complete = True
        self._complete.set()

    async def _page(self, token: str | None) -> ChunkPage:
        with self._a_call() as call:
            return await self._batches.one(call, self._chunks.page(call, token))


def _slices(keys: list[Key]) -> Iterator[list[Key]]:
    for start in range(0, len(keys), _SLICE):
        yield keys[start : start + _SLICE]
