"""Tiers that hang, fail and come back when a test says so, and a loop on which time is free."""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from kvstrata.config import CascadeMode, HostSettings
from kvstrata.host import Chunk
from kvstrata.keys import Key
from kvstrata.node.namespaces import Namespaces
from kvstrata.node.store import Store
from kvstrata.testing.chunks import a_namespace
from kvstrata.tiers.base import Item, Outcome, Tier, TierContext, Usage

PAGE = 4096
NAMESPACE = a_namespace(PAGE)


def key(n: int) -> Key:
    return NAMESPACE.key(0, n.to_bytes(4, "big"))


def payload(k: Key) -> bytes:
    return (k * PAGE)[:PAGE]


class _Selector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Where nothing happens until a timer fires, it fires now; `threads` work for the loop."""

    skipped = 0.0
    threads = 0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None or self.threads:
            return super().select(timeout if timeout is None else min(timeout, 1.0))
        events = super().select(0)
        if not events:
            self.skipped += timeout
        return events


class TimelessLoop(asyncio.SelectorEventLoop):
    """Waits are over as soon as nothing else is left to do; `time()` has gone on by as much."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.skipped

    def run_in_executor(self, *args: Any) -> Any:
        def ended(future: object) -> None:
            self._virtual.threads -= 1

        self._virtual.threads += 1
        future = super().run_in_executor(*args)
        future.add_done_callback(ended)
        return future


def timeless(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test on a `TimelessLoop`."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        with asyncio.Runner(loop_factory=TimelessLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run


def now() -> float:
    return asyncio.get_running_loop().time()


class TroubledTier(Tier):
    """Chunks in a dict. `hangs` are the calls that don't return before `release`; a load that
    hangs scribbles over its memory when it does. `raises` and `fails` are those that fail."""

    name = "troubled"

    def __init__(
        self, name: str = "troubled", writable: bool = True, store: str | None = None
    ) -> None:
        self.store_id = store or f"{name}-store"
        self.name = name
        self.writable = writable  # type: ignore[misc]
        self.chunks: dict[Key, bytes] = {}
        self.hangs: set[str] = set()
        self.raises: set[str] = set()
        self.fails: set[str] = set()
        self.calls: list[str] = []
        self.loads: list[list[Key]] = []
        self.stores: list[list[Item]] = []
        self.spoiled: list[Key] = []
        self.running = 0
        self.closed = False
        self._gate = asyncio.Event()

    @classmethod
    async def open(cls, options: dict[str, Any], context: TierContext) -> Tier:
        return cls(**options)

    def release(self) -> None:
        """What hangs goes on, and nothing hangs any more."""
        self.hangs.clear()
        self._gate.set()
        self._gate = asyncio.Event()

    async def _enter(self, call: str) -> bool:
        self.calls.append(call)
        if call in self.hangs:
            self.running += 1
            try:
                await self._gate.wait()
            finally:
                self.running -= 1
            return True
        if call in self.raises:
            raise OSError(f"{call} is broken")
        return False

    async def lookup(self, keys: Sequence[Key], deadline: float | None = None) -> list[bool]:
        await self._enter("lookup")
        return [k in self.chunks for k in keys]

    async def store(self, batch: Sequence[Item], deadline: float | None = None) -> list[Outcome]:
        self.stores.append(list(batch))
        before = [bytes(item.view) for item in batch]
        await self._enter("store")
        # However long it took: nobody may have written there meanwhile.
        self.spoiled += [i.key for i, b in zip(batch, before, strict=True) if bytes(i.view) != b]
        if "store" in self.fails:
            return [Outcome.FAILED] * len(batch)
        for item, content in zip(batch, before, strict=True):
            self.chunks[item.key] = content
        return [Outcome.STORED] * len(batch)

    async def load(self, batch: Sequence[Item], deadline: float | None = None) -> list[Outcome]:
        self.loads.append([item.key for item in batch])
        late = await self._enter("load")
        if late or "load" in self.fails:
            for item in batch:
                item.view[:] = b"\xee" * PAGE
            return [Outcome.FAILED] * len(batch)
        for item in batch:
            item.view[:] = self.chunks[item.key]
        return [Outcome.LOADED] * len(batch)

    async def evict(self, keys: Sequence[Key]) -> list[bool]:
        await self._enter("evict")
        return [self.chunks.pop(k, None) is not None for k in keys]

    def keys(self) -> list[Key]:
        return list(self.chunks)

    def usage(self) -> Usage:
        return Usage(len(self.chunks) * PAGE, len(self.chunks))

    async def drain(self, deadline: float | None = None) -> None:
        await self._enter("drain")

    async def close(self) -> None:
        await self._enter("close")
        self.closed = True


def make_store(
    *tiers: Tier,
    pages: int = 16,
    promotion_budget: float = 0.5,
    cascade: CascadeMode = "write_through",
) -> Store:
    """On the clock of the running loop."""
    namespaces = Namespaces()
    namespaces.add(NAMESPACE)
    settings = HostSettings(promotion_budget=promotion_budget)
    region = memoryview(bytearray(pages * PAGE))
    store = Store(region, settings, namespaces, asyncio.get_running_loop().time)
    store.placements.enabled = True
    for tier in tiers:
        store.attach(tier, cascade)
    return store


def put(store: Store, *numbers: int) -> None:
    keys = [key(n) for n in numbers]
    offsets = store.host.reserve("engine", [(k, PAGE) for k in keys])
    for k, offset in zip(keys, offsets, strict=True):
        store.region[offset : offset + PAGE] = payload(k)
    assert all(store.host.commit("engine", keys))


def data(store: Store, chunk: Chunk) -> bytes:
    return bytes(store.item(chunk).view)


async def find(
    store: Store, *numbers: int, want: Any = "prefix", lease: int = 1, wait: float = 5.0
) -> dict[Key, Chunk]:
    found = await store.find("reader", lease, [key(n) for n in numbers], want, wait)
    for k, chunk in found.items():
        assert data(store, chunk) == payload(k)
    return found
