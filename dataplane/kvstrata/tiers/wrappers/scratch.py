"""Memory for another form of payloads: bounded, page-aligned like slots, reused."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Sequence

__all__ = ["Scratch"]


class Scratch:
    """At most `capacity` bytes; one request that is larger gets them while nobody else has any.

    For one event loop. Requests are served in order, each wholly or not at all, so two of them
    never wait for each other's halves. What is given back is kept for the next of its size.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._taken = 0
        self._idle: dict[int, list[memoryview]] = {}
        self._idle_bytes = 0
        self._turn = asyncio.Lock()
        self._returned = asyncio.Event()

    @property
    def held_bytes(self) -> int:
        """What it holds of the machine's memory now."""
        return self._taken + self._idle_bytes

    async def take(self, sizes: Sequence[int], seconds: float) -> list[memoryview] | None:
        """A writable view of each size, with any content; None if there was no room in time."""
        asked = sum(map(_pages, sizes))
        try:
            async with asyncio.timeout(max(seconds, 0)), self._turn:
                while self._taken and self._taken + asked > self.capacity:
                    self._returned.clear()
                    await self._returned.wait()
        except TimeoutError:
            return None
        self._taken += asked
        whole = [self._reuse(_pages(size)) for size in sizes]
        missing = sum(_pages(s) for s, view in zip(sizes, whole, strict=True) if view is None)
        if self.held_bytes > self.capacity and missing:
            self._idle.clear()  # of sizes that are not asked for now
            self._idle_bytes = 0
        return [
            (memoryview(mmap.mmap(-1, _pages(size))) if view is None else view)[:size]
            for size, view in zip(sizes, whole, strict=True)
        ]

    def give_back(self, views: Sequence[memoryview]) -> None:
        """Nobody touches them any more."""
        for view in views:
            whole = memoryview(view.obj)
            self._taken -= whole.nbytes
            if self.held_bytes + whole.nbytes <= self.capacity:
                self._idle.setdefault(whole.nbytes, []).append(whole)
                self._idle_bytes += whole.nbytes
        self._returned.set()

    def _reuse(self, nbytes: int) -> memoryview | None:
        idle = self._idle.get(nbytes)
        if not idle:
            return None
        self._idle_bytes -= nbytes
        return idle.pop()


def _pages(nbytes: int) -> int:
    return -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
