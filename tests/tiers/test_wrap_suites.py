"""Every wrapper, and what they compose to, keeps the contract of the tier it is around."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import pytest
from wrap_kit import context_of, memory, wrapped

from kvstrata.keys import Key
from kvstrata.testing import Damage, FakeClock, FaultScript, Faulty, TierTests
from kvstrata.testing.memory_tier import MemoryTier
from kvstrata.tiers.base import Tier, TierContext
from kvstrata.tiers.fs import FsTier
from kvstrata.tiers.fs_format import PAGE_BYTES, path_of


class Around(TierTests):
    """`names` are the wrappers, from the innermost on."""

    names: ClassVar[list[str]]
    durable = False
    keeps_heads = True

    @pytest.fixture
    def context(self, clock: FakeClock, removed: list[Key]) -> TierContext:
        return context_of(clock, removed)

    async def open_tier(self, tmp_path: Path, context: TierContext) -> Tier:
        self.inner: Any = await self.open_inner(tmp_path, context)
        return wrapped(self.inner, self.names, tmp_path, context)

    async def open_inner(self, tmp_path: Path, context: TierContext) -> Tier:
        return memory(context, verify="metered" in self.names)

    async def open_bounded(self, tmp_path: Path, context: TierContext, capacity: int) -> Tier:
        self.inner = memory(context, capacity=capacity)
        return wrapped(self.inner, self.names, tmp_path, context)

    async def damage(self, tier: Tier, key: Key, how: Damage, other: Key) -> None:
        if how in (Damage.HEADER, Damage.VERSION):
            content, known = self.inner.chunks[key]
            at = 8 if how is Damage.VERSION else 70
            content = content[:at] + bytes([content[at] ^ 2]) + content[at + 1 :]
            self.inner.chunks[key] = content, known
        else:
            self.inner.harm(key, how, other)

    def stall(self, tier: Tier) -> AbstractContextManager[None]:
        return stalled(self.inner)


@contextlib.contextmanager
def stalled(inner: Any) -> Iterator[None]:
    with inner.stalled():
        yield


class OverFs(Around):
    """A tier that is durable, and bounded in bytes of disk."""

    durable = True
    damages = tuple(set(Damage) - {Damage.VERSION})  # that one is a test of the fs tier itself
    root: Path

    async def open_inner(self, tmp_path: Path, context: TierContext) -> Tier:
        self.root = tmp_path / "fs"
        return await FsTier.open({"root": self.root}, context)

    async def open_bounded(self, tmp_path: Path, context: TierContext, capacity: int) -> Tier:
        inner = await FsTier.open({"root": tmp_path / "fs", "capacity": capacity}, context)
        return wrapped(inner, self.names, tmp_path, context)

    async def damage(self, tier: Tier, key: Key, how: Damage, other: Key) -> None:
        path, partner = self.root / path_of(key), self.root / path_of(other)
        content = bytearray(path.read_bytes())
        match how:
            case Damage.FLIP:
                content[PAGE_BYTES + 200] ^= 1
                path.write_bytes(content)
            case Damage.HEADER:
                content[20] ^= 1
                path.write_bytes(content)
            case Damage.EMPTY:
                path.write_bytes(b"")
            case Damage.GROWN:
                path.write_bytes(content + b"more")
            case Damage.ZEROED:
                path.write_bytes(bytes(len(content)))
            case Damage.TRUNCATE:
                path.write_bytes(content[: len(content) // 2])
            case Damage.SWAP:
                path.write_bytes(partner.read_bytes())
                partner.write_bytes(content)

    def stall(self, tier: Tier) -> AbstractContextManager[None]:
        pytest.skip("that a medium hangs is tested over memory")


class TestMetered(Around):
    names: ClassVar[list[str]] = ["metered"]
    damages = tuple(set(Damage) - {Damage.HEADER, Damage.VERSION})


class TestChecked(Around):
    names: ClassVar[list[str]] = ["checked"]
    damages = tuple(Damage)


class TestCompressed(Around):
    names: ClassVar[list[str]] = ["compressed"]
    damages = tuple(Damage)


class TestEncrypted(Around):
    names: ClassVar[list[str]] = ["encrypted"]
    damages = tuple(Damage)


class TestFaultyWithoutFaults(Around):
    names: ClassVar[list[str]] = []
    damages = tuple(set(Damage) - {Damage.HEADER, Damage.VERSION})

    async def open_tier(self, tmp_path: Path, context: TierContext) -> Tier:
        self.inner = memory(context, verify=True)
        return Faulty(self.inner, FaultScript(1, rate=0.0))


class TestEveryWrapper(Around):
    names: ClassVar[list[str]] = ["checked", "encrypted", "compressed", "metered"]
    damages = tuple(Damage)

    async def open_inner(self, tmp_path: Path, context: TierContext) -> MemoryTier:
        return memory(context)


class TestCompressedOverFs(OverFs):
    names: ClassVar[list[str]] = ["compressed"]


class TestMeteredCompressedEncryptedOverFs(OverFs):
    names: ClassVar[list[str]] = ["encrypted", "compressed", "metered"]
