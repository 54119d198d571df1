"""Opening a store that is there: quick, beside the work, in the right order."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from fs_kit import FaultySystem, item, key, loads, path

from kvstrata.keys import Key, make_key
from kvstrata.testing import FakeClock
from kvstrata.testing.waiting import until
from kvstrata.tiers.base import Outcome, TierContext
from kvstrata.tiers.fs import FsTier
from kvstrata.tiers.fs_format import PAGE_BYTES, file_bytes, path_of

STORED, NO_ROOM = Outcome.STORED, Outcome.NO_ROOM
CHUNK = file_bytes(10_000)
MANY = int(os.environ.get("KVSTRATA_FS_FILES", "100000"))


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(1000.0)


@pytest.fixture
def system() -> FaultySystem:
    return FaultySystem()


@pytest.fixture
def found() -> list[Key]:
    """What the node was told that walks have found."""
    return []


@pytest.fixture
async def opened(
    tmp_path: Path, clock: FakeClock, system: FaultySystem, found: list[Key]
) -> AsyncIterator[Callable[..., Any]]:
    tiers: list[FsTier] = []

    async def open_tier(**options: Any) -> FsTier:
        context = TierContext("node", clock=clock, on_found=found.extend)
        tiers.append(await FsTier.open({"root": tmp_path, **options}, context, system))
        return tiers[-1]

    yield open_tier
    system.let_go()
    for tier in tiers:
        await tier.close()


async def test_age_and_order_survive_a_restart(
    opened: Callable[..., Any], system: FaultySystem
) -> None:
    """What was used last is kept longest, and the head of a chain longer than its tail."""
    system.wall = time.time()
    tier = await opened()
    await tier.store([item(i, parent=i - 1 if i else None) for i in range(4)])
    for i in range(10, 13):
        system.wall += 1
        await tier.store([item(i)])
    system.wall += 100
    assert await loads(tier, 10) == [True]
    system.wall += 1
    assert await loads(tier, 2) == [True]  # and so 1 and 0, which it extends
    order = tier.keys()
    assert order == [key(i) for i in (3, 11, 12, 10, 2, 1, 0)]
    await tier.close()
    again = await opened()
    assert again.keys() == order
    await again.close()
    bounded = await opened(capacity=4 * CHUNK, high_watermark=1, low_watermark=1)
    assert bounded.keys() == order[3:]


async def test_links_are_learned_from_headers(opened: Callable[..., Any]) -> None:
    tier = await opened()
    await tier.store([item(0), item(1, parent=0), item(2, parent=1)])
    await tier.store([item(9)])
    await tier.close()
    tier = await opened()
    assert await loads(tier, 1) == [True]
    assert await loads(tier, 2) == [True]
    assert await loads(tier, 9) == [True]
    assert await loads(tier, 2) == [True]
    assert tier.keys() == [key(i) for i in (9, 2, 1, 0)]


async def test_opening_does_not_wait_for_a_long_walk(
    opened: Callable[..., Any], system: FaultySystem, tmp_path: Path, found: list[Key]
) -> None:
    tier = await opened(capacity=7 * CHUNK)
    await tier.store([item(i) for i in range(4)])
    await tier.close()
    inner = {str(path(tmp_path, i).parent) for i in range(4)}
    system.only = inner.__contains__
    system.hold("entries")
    found.clear()
    full = {"capacity": 7 * CHUNK, "high_watermark": 1, "low_watermark": 1}
    tier = await opened(recovery_wait="50ms", **full)
    assert tier.keys() == found == []
    assert "recovering" in tier.usage().detail
    assert tier.usage().healthy
    # What is not found yet is looked for, and what is there takes room.
    assert await loads(tier, 0, 1) == [True, True]
    assert await tier.lookup([key(2), key(9)]) == [True, False]
    assert await tier.store([item(10 + i) for i in range(5)]) == [STORED] * 3 + [NO_ROOM] * 2
    system.let_go()
    await until(lambda: "recovering" not in tier.usage().detail)
    assert len(tier.keys()) == 7
    assert found == [key(3)], "the node was not told what it did not know"
    assert tier.usage().used_bytes == 7 * CHUNK


async def test_many_files_are_found_in_seconds(tmp_path: Path) -> None:
    """100,000 here, a million with KVSTRATA_FS_FILES=1000000; figures are in docs/fs.md."""
    shm = "/dev/shm"
    root = Path(shm if os.path.isdir(shm) else tmp_path, f"kvstrata-{os.getpid()}")  # noqa: ASYNC240
    try:
        await asyncio.to_thread(make_files, root, MANY)
        began = time.monotonic()
        options = {"root": root, "capacity": "64GiB", "recovery_wait": "10m"}
        tier = await FsTier.open(options, TierContext("node"))
        seconds = time.monotonic() - began
        print(f"{MANY} files in {seconds:.1f} s")
        assert len(tier.keys()) == MANY
        await tier.close()
        assert seconds < 30 * MANY / 100_000
    finally:
        await asyncio.to_thread(remove, root)


def make_files(root: Path, count: int) -> None:
    """Sparse ones, as a store has them after long use."""
    made: set[str] = set()
    for i in range(count):
        hash_ = (i * 0x9E3779B97F4A7C15 & (1 << 64) - 1).to_bytes(8, "big") * 4
        file = root / path_of(make_key(bytes(16), 0, hash_))
        folder = os.path.dirname(file)
        if folder not in made:
            os.makedirs(folder, exist_ok=True)
            made.add(folder)
        fd = os.open(file, os.O_WRONLY | os.O_CREAT, 0o644)
        os.ftruncate(fd, 2 * PAGE_BYTES)
        os.close(fd)


def remove(root: Path) -> None:
    for folder, folders, names in os.walk(root, topdown=False):
        for name in names:
            os.unlink(f"{folder}/{name}")
        for name in folders:
            os.rmdir(f"{folder}/{name}")
    os.rmdir(root)


EVICTOR = """
import asyncio, sys
from kvstrata.tiers.base import TierContext
from kvstrata.tiers.fs import FsTier

async def main():
    tier = await FsTier.open({"root": sys.argv[1]}, TierContext("node"))
    print(tier.usage().detail, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_a_survivor_evicts_within_15_s_of_a_kill(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", EVICTOR, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), 30)
    assert b"another node evicts" not in line
    tier = await FsTier.open({"root": tmp_path}, TierContext("node"))
    assert "another node evicts" in tier.usage().detail
    process.send_signal(signal.SIGKILL)
    began = time.monotonic()
    await until(lambda: "another node evicts" not in tier.usage().detail, 20)
    assert time.monotonic() - began < 15
    await process.wait()
    await tier.close()
