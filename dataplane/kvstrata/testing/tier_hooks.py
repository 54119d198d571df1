"""What a test suite of a tier needs to know of it, and the parts its tests are made of."""

from __future__ import annotations

import contextlib
import enum
import hashlib
import mmap
import random
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import pytest
import pytest_asyncio

from kvstrata.keys import Key
from kvstrata.testing.chunks import a_namespace
from kvstrata.testing.clock import FakeClock
from kvstrata.tiers.base import Item, Outcome, Tier, TierContext

__all__ = ["Damage", "TierHooks", "aligned", "payload"]

STORED, PRESENT, LOADED = Outcome.STORED, Outcome.PRESENT, Outcome.LOADED

PAGE = mmap.PAGESIZE


class Damage(enum.StrEnum):
    """What can happen to a stored object behind a tier's back."""

    FLIP = "flip"  # a bit of the payload
    TRUNCATE = "truncate"  # its second half is gone
    SWAP = "swap"  # it has changed places with another chunk's object
    HEADER = "header"  # a bit of what the tier wrote of its own before the payload
    EMPTY = "empty"  # nothing is left of its bytes
    GROWN = "grown"  # bytes were added at its end
    ZEROED = "zeroed"  # zeros in its full length, as a power cut leaves them
    VERSION = "version"  # written by a version whose format nobody here knows


def aligned(nbytes: int, fill: int = 0) -> memoryview:
    """Page-aligned memory of `nbytes`, like a slot, every byte of it `fill`."""
    view = memoryview(mmap.mmap(-1, max(nbytes, 1)))[:nbytes]
    view[:] = bytes([fill]) * nbytes
    return view


def payload(key: Key, nbytes: int) -> bytes:
    """The bytes this suite stores under a key."""
    return random.Random(key).randbytes(nbytes)  # noqa: S311


class TierHooks:
    """Hooks, fixtures and parts: `TierTests` inherits them."""

    durable: ClassVar[bool] = True
    """Whether what was acknowledged is there when the tier is closed and opened again."""
    sizes: ClassVar[Sequence[int]] = (1, 511, 512, 4095, 4096, 4097, 65_536, 100_000)
    """Payload sizes in bytes that the tier must take."""
    size: ClassVar[int] = 10_000
    """Payload size of tests that don't vary it."""
    takes_shorter: ClassVar[bool] = True
    """Whether loads honour `Item.exact`; wrappers that compress need it."""
    keeps_heads: ClassVar[bool] = False
    """Whether a bounded one is known to evict the tail of a chain before its head."""
    damages: ClassVar[Sequence[Damage]] = (Damage.FLIP, Damage.TRUNCATE, Damage.SWAP)
    """Kinds of damage that `damage` can do; the more the better."""

    # ------------------------------------------------------------ hooks

    async def open_tier(self, tmp_path: Path, context: TierContext) -> Tier:
        """Open it over `tmp_path`; twice in one test means opening the same store again."""
        raise NotImplementedError

    async def open_bounded(self, tmp_path: Path, context: TierContext, capacity: int) -> Tier:
        """Open it so that it holds at most `capacity` bytes."""
        pytest.skip("this tier gives no open_bounded")

    async def damage(self, tier: Tier, key: Key, how: Damage, other: Key) -> None:
        """Damage the stored object of `key`; `other` is the chunk to swap with."""
        pytest.skip("this tier gives no damage")

    async def fill(self, tier: Tier, items: Sequence[Item]) -> None:
        """Make the tier hold these chunks."""
        assert await tier.store(items) == [STORED] * len(items)

    @contextlib.contextmanager
    def stall(self, tier: Tier) -> Iterator[None]:
        """While entered, loads and stores that reach the medium hang; then they go on."""
        pytest.skip("this tier gives no stall")
        yield

    async def kill(self, tier: Tier) -> None:
        """Leave the tier as its process would if it were killed now. It is closed later."""

    # ------------------------------------------------------------ fixtures and parts

    @pytest.fixture
    def clock(self) -> FakeClock:
        # Far behind time.monotonic: a tier that reads that one finds every deadline past.
        return FakeClock(-1e9)

    @pytest.fixture
    def removed(self) -> list[Key]:
        """What the tier has announced as removed."""
        return []

    @pytest.fixture
    def context(self, clock: FakeClock, removed: list[Key]) -> TierContext:
        loop_thread = threading.get_ident()
        namespace = a_namespace()

        def on_removed(keys: Sequence[Key]) -> None:
            assert threading.get_ident() == loop_thread, "on_removed called off the event loop"
            removed.extend(keys)

        return TierContext(
            node_id="node",
            clock=clock,
            namespace_of=lambda digest: namespace if digest == namespace.digest else None,
            on_removed=on_removed,
        )

    @pytest_asyncio.fixture
    async def tier(self, tmp_path: Path, context: TierContext) -> AsyncIterator[Tier]:
        tier = await self.open_tier(tmp_path, context)
        yield tier
        await tier.close()

    def key(self, i: int, group: int = 0) -> Key:
        """The i-th key of a chain."""
        return a_namespace().key(group, hashlib.sha256(b"%d" % i).digest())

    def item(self, key: Key, size: int | None = None) -> Item:
        """A chunk ready to be stored."""
        view = aligned(self.size if size is None else size)
        view[:] = payload(key, view.nbytes)
        return Item(key, view)

    def items(self, start: int, stop: int) -> list[Item]:
        return [self.item(self.key(i)) for i in range(start, stop)]

    def chain(self, start: int, stop: int) -> list[Item]:
        """Chunks that say which one they extend."""
        return [
            Item(item.key, item.view, parent=self.key(i - 1) if i else None)
            for i, item in enumerate(self.items(start, stop), start)
        ]

    def blank(self, items: Sequence[Item]) -> list[Item]:
        """Memory to load these chunks into."""
        return [Item(item.key, aligned(item.view.nbytes, fill=0xAA)) for item in items]

    def check_bytes(self, items: Sequence[Item], outcomes: Sequence[Outcome]) -> None:
        """Every `LOADED` item holds the bytes that were stored under its key."""
        assert len(outcomes) == len(items)
        for item, outcome in zip(items, outcomes, strict=True):
            if outcome is LOADED:
                assert item.view == payload(item.key, item.view.nbytes), "wrong bytes were served"

    async def check_loads(self, tier: Tier, items: Sequence[Item]) -> None:
        """All of them can be found and loaded, and are right."""
        assert await tier.lookup([item.key for item in items]) == [True] * len(items)
        blank = self.blank(items)
        outcomes = await tier.load(blank)
        assert outcomes == [LOADED] * len(items)
        self.check_bytes(blank, outcomes)

    async def do_damage(self, tier: Tier, key: Key, how: Damage, other: Key) -> None:
        if how not in self.damages:
            pytest.skip(f"this tier's objects can't suffer {how.value!r}, or it doesn't say how")
        await self.damage(tier, key, how, other)

    def needs_store(self, tier: Tier) -> None:
        if not tier.writable:
            pytest.skip("this tier only reads")

    def needs_shorter(self) -> None:
        if not self.takes_shorter:
            pytest.skip("this tier takes no shorter objects: no wrapper can be around it")
