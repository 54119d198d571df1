"""A tier in memory: something for tests to put wrappers around, stall and damage."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from kvstrata.keys import Key
from kvstrata.testing.tier_hooks import Damage
from kvstrata.tiers.base import Item, Outcome, Tier, TierContext, Usage, checksum
from kvstrata.tiers.calls import Calls

__all__ = ["MemoryTier"]


class MemoryTier(Tier):
    """Chunks in a dict; the first stored are the first to go, but not for their own batch, and
    not before what extends them. With `verify=False` it serves whatever it finds.

    `chunks` is what it holds: the bytes and their checksum.
    """

    name = "memory"
    store_id = "memory"

    def __init__(
        self, context: TierContext, capacity: int | None = None, verify: bool = True
    ) -> None:
        self.context = context
        self.capacity = capacity
        self.verify = verify
        self.chunks: dict[Key, tuple[bytes, int]] = {}
        self.parents: dict[Key, Key] = {}
        self.corrupt = 0
        self.calls = Calls(self.name, context.clock, 30.0)
        self.gate = asyncio.Event()
        self.gate.set()

    @classmethod
    async def open(cls, options: dict[str, Any], context: TierContext) -> MemoryTier:
        """Options: `capacity` in bytes, `verify`."""
        return cls(context, **options)

    @contextlib.contextmanager
    def stalled(self) -> Iterator[None]:
        """While entered, loads and stores wait."""
        self.gate.clear()
        try:
            yield
        finally:
            self.gate.set()

    def harm(self, key: Key, how: Damage, other: Key) -> None:
        """Damage the stored object; what it can't suffer is a `ValueError`."""
        content, known = self.chunks[key]
        match how:
            case Damage.FLIP:
                middle = len(content) // 2
                content = content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]
            case Damage.TRUNCATE:
                content = content[: len(content) // 2]
            case Damage.EMPTY:
                content = b""
            case Damage.GROWN:
                content += b"more"
            case Damage.ZEROED:
                content = bytes(len(content))
            case Damage.SWAP:
                # Only the bytes: a checksum that travels with them would need the key in it.
                theirs, their_known = self.chunks[other]
                self.chunks[other] = content, their_known
                content = theirs
            case _:
                raise ValueError(f"objects in memory can't suffer {how}")
        self.chunks[key] = content, known

    async def lookup(self, keys: Sequence[Key], deadline: float | None = None) -> list[bool]:
        self.check_open()
        return [key in self.chunks for key in keys]

    async def store(self, batch: Sequence[Item], deadline: float | None = None) -> list[Outcome]:
        self.check_open()
        with self.calls.running(deadline) as call:
            await self.gate.wait()
            if call.over():
                return [Outcome.FAILED] * len(batch)
            keys = {item.key for item in batch}
            return [self.store_one(item, keys) for item in batch]

    def store_one(self, item: Item, batch: set[Key]) -> Outcome:
        if item.key in self.chunks:
            return Outcome.PRESENT
        if self.capacity is not None and not self.make_room(item.view.nbytes, batch):
            return Outcome.NO_ROOM
        known = checksum(item.view) if item.checksum is None else item.checksum
        self.chunks[item.key] = bytes(item.view), known
        if item.parent is not None:
            self.parents[item.key] = item.parent
        return Outcome.STORED

    def make_room(self, nbytes: int, batch: set[Key]) -> bool:
        capacity = self.capacity or 0
        while self.used() + nbytes > capacity and nbytes <= capacity:
            extended = {self.parents[key] for key in self.chunks if key in self.parents}
            idle = (key for key in self.chunks if key not in batch and key not in extended)
            victim = next(idle, None)
            if victim is None:
                break
            self.remove([victim])
        return self.used() + nbytes <= capacity

    async def load(self, batch: Sequence[Item], deadline: float | None = None) -> list[Outcome]:
        self.check_open()
        with self.calls.running(deadline) as call:
            await self.gate.wait()
            late = call.over()
            return [Outcome.FAILED if late else self.load_one(item) for item in batch]

    def load_one(self, item: Item) -> Outcome:
        content, known = self.chunks.get(item.key, (None, 0))
        if content is None:
            return Outcome.MISSING
        space = item.view.nbytes
        if len(content) == space or (not item.exact and len(content) < space):
            item.view[: len(content)] = content
            if not self.verify or checksum(item.view[: len(content)]) == known:
                return Outcome.LOADED
        self.corrupt += 1
        self.remove([item.key])
        return Outcome.CORRUPT

    def remove(self, keys: Sequence[Key]) -> None:
        for key in keys:
            del self.chunks[key]
            self.parents.pop(key, None)
        if keys:
            self.context.on_removed(keys)

    async def evict(self, keys: Sequence[Key]) -> list[bool]:
        self.check_open()
        found = [key in self.chunks for key in keys]
        self.remove([key for key in dict.fromkeys(keys) if key in self.chunks])
        return found

    def keys(self) -> list[Key]:
        self.check_open()
        return list(self.chunks)

    def used(self) -> int:
        return sum(len(content) for content, _ in self.chunks.values())

    def usage(self) -> Usage:
        self.check_open()
        counters = {"corrupt": self.corrupt}
        return Usage(self.used(), len(self.chunks), self.capacity, counters=counters)

    def check_open(self) -> None:
        self.calls.check_open()

    async def drain(self, deadline: float | None = None) -> None:
        await self.calls.drain(deadline)

    async def close(self) -> None:
        await self.calls.close()
