"""The fs tier where a removal crosses another call of the same chunk: whatever the order, nothing
is acknowledged or offered that was said to be gone before."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fs_kit import FaultySystem, blank, item, key, path

from kvstrata.keys import Key
from kvstrata.testing import FakeClock
from kvstrata.testing.waiting import until
from kvstrata.tiers.base import Outcome, TierContext
from kvstrata.tiers.fs import FsTier
from kvstrata.tiers.fs_quarantine import Quarantine
from kvstrata.tiers.fs_root import Root

STORED, PRESENT, LOADED = Outcome.STORED, Outcome.PRESENT, Outcome.LOADED
CORRUPT, FAILED = Outcome.CORRUPT, Outcome.FAILED


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(1000.0)


@pytest.fixture
def system() -> Iterator[FaultySystem]:
    system = FaultySystem()
    yield system
    system.let_go()


@pytest.fixture
def removed() -> list[Key]:
    return []


@pytest.fixture
async def opened(
    tmp_path: Path, clock: FakeClock, removed: list[Key], system: FaultySystem
) -> AsyncIterator[Callable[..., Any]]:
    tiers: list[FsTier] = []

    async def open_tier(system: FaultySystem = system) -> FsTier:
        context = TierContext("node", clock=clock, on_removed=removed.extend)
        options = {"root": tmp_path / "s", "stuck_after": "1h", "read_threads": 1}
        tiers.append(await FsTier.open(options, context, system))
        return tiers[-1]

    yield open_tier
    system.let_go()
    for tier in tiers:
        await tier.close()


async def held(system: FaultySystem, call: str, file: Path) -> None:
    """Whoever makes the call on that file waits, from now on."""
    system.only = lambda name: name == str(file)
    system.hold(call)


async def reached(system: FaultySystem) -> None:
    assert await asyncio.to_thread(system.reached.wait, 30)


@pytest.mark.parametrize("before", [False, True])
async def test_a_chunk_removed_while_its_batch_is_stored_is_not_acknowledged(
    opened: Callable[..., Any],
    system: FaultySystem,
    removed: list[Key],
    tmp_path: Path,
    before: bool,
) -> None:
    tier = await opened()
    if before:
        assert await tier.store([item(0)]) == [STORED]
    await held(system, "rename", path(tmp_path / "s", 1))
    store = asyncio.ensure_future(tier.store([item(0), item(1), item(0)]))
    await reached(system)
    await until(lambda: path(tmp_path / "s", 0).exists())
    assert await tier.evict([key(0)]) == [True]
    assert removed == [key(0)]
    system.let_go()
    assert await store == [FAILED, STORED, FAILED]
    assert tier.keys() == [key(1)]
    assert await tier.store([item(0)]) == [STORED]


async def test_a_chunk_that_is_stored_after_its_removal_is(
    opened: Callable[..., Any], system: FaultySystem, removed: list[Key], tmp_path: Path
) -> None:
    tier = await opened()
    await tier.store([item(0)])
    await held(system, "rename", path(tmp_path / "s", 0))
    path(tmp_path / "s", 0).unlink()
    store = asyncio.ensure_future(tier.store([item(0)]))
    await reached(system)
    await tier.evict([key(0)])
    assert removed == [key(0)]
    system.let_go()
    assert await store == [STORED]
    assert tier.keys() == [key(0)]


async def test_a_removal_that_nobody_waits_for_any_more_is_announced(
    opened: Callable[..., Any],
    clock: FakeClock,
    system: FaultySystem,
    removed: list[Key],
    tmp_path: Path,
) -> None:
    tier = await opened()
    await tier.store([item(0)])
    await held(system, "unlink", path(tmp_path / "s", 0))
    evict = asyncio.ensure_future(tier.evict([key(0)]))
    await reached(system)
    clock.advance(31)
    assert await evict == [False]
    assert tier.keys() == [key(0)]
    assert removed == []
    system.let_go()
    await until(lambda: removed)
    assert removed == [key(0)]
    assert tier.keys() == []
    assert tier.usage().used_bytes == 0


async def test_what_is_evicted_under_a_lookup_is_not_offered(
    opened: Callable[..., Any], system: FaultySystem, tmp_path: Path
) -> None:
    other, tier = await opened(FaultySystem()), await opened()
    await other.store([item(0), item(1)])
    await held(system, "stat", path(tmp_path / "s", 1))
    seen: list[str] = []
    stat = system.stat

    def watched(name: str) -> os.stat_result:
        result = stat(name)
        seen.append(name)
        return result

    system.stat = watched  # type: ignore[method-assign]
    lookup = asyncio.ensure_future(tier.lookup([key(0), key(1)]))
    await until(lambda: str(path(tmp_path / "s", 0)) in seen)
    await reached(system)
    assert await tier.evict([key(0)]) == [True]
    system.let_go()
    assert await lookup == [False, True]
    assert tier.keys() == [key(1)]


async def test_of_two_loads_in_a_batch_one_that_finds_damage_has_the_last_word(
    opened: Callable[..., Any], removed: list[Key], tmp_path: Path
) -> None:
    class Flips(FaultySystem):
        good = 1

        def preadv(self, fd: int, parts: Sequence[memoryview], offset: int) -> int:
            got = super().preadv(fd, parts, offset)
            if self._paths.get(fd, "").endswith(".kv"):
                self.good -= 1
                if self.good < 0:
                    parts[1][0] ^= 1
            return got

    tier = await opened(system := Flips())
    await tier.store([item(0)])
    system.good = 1
    assert await tier.load([blank(0), blank(0)]) == [LOADED, CORRUPT]
    assert removed == [key(0)]
    assert tier.keys() == []


async def test_what_was_stored_into_a_store_that_was_made_anew_since_is_gone(
    opened: Callable[..., Any], system: FaultySystem, tmp_path: Path
) -> None:
    tier = await opened()
    await held(system, "rename", path(tmp_path / "s", 1))
    store = asyncio.ensure_future(tier.store([item(0), item(1)]))
    await reached(system)
    await until(lambda: path(tmp_path / "s", 0).exists())
    shutil.rmtree(tmp_path / "s")
    await tier._upkeep.probe()
    system.let_go()
    assert await store == [FAILED, FAILED]
    assert tier.keys() == []


async def test_what_a_walk_found_in_a_store_that_was_made_anew_since_is_gone(
    opened: Callable[..., Any], system: FaultySystem, tmp_path: Path
) -> None:
    tier = await opened()
    await tier.store([item(0), item(1)])
    tier._core.index.drop(key(0))
    folder = path(tmp_path / "s", 1).parents[1]
    assert folder != path(tmp_path / "s", 0).parents[1]
    await held(system, "entries", folder)
    walk = asyncio.ensure_future(tier._upkeep.walk())
    await reached(system)
    shutil.rmtree(tmp_path / "s")
    await tier._upkeep.probe()
    system.let_go()
    await walk
    assert tier.keys() == []


def test_quarantine_gives_back_what_was_stored_in_the_very_moment(tmp_path: Path) -> None:
    chunk = tmp_path / "chunk.kv"

    class Crossed(FaultySystem):
        def rename(self, source: str, target: str) -> None:
            if source == str(chunk):
                new = tmp_path / "new"
                new.write_bytes(b"good")
                new.rename(chunk)
            super().rename(source, target)

    root = Root(tmp_path, Crossed())
    chunk.write_bytes(b"bad")
    quarantine = Quarantine(root)
    assert not quarantine.take(str(chunk), chunk.stat())
    assert chunk.read_bytes() == b"good"
    assert not any((tmp_path / "quarantine").iterdir())
    root.close()
