"""A mount in trouble: what it stops, what it says, and how it ends, all without a restart."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fs_kit import FaultySystem, blank, item, key, loads, mount, temps, unmount

from kvstrata.errors import ConfigError, Expired
from kvstrata.keys import Key
from kvstrata.testing import FakeClock
from kvstrata.testing.waiting import until
from kvstrata.tiers.base import Outcome, TierContext
from kvstrata.tiers.fs import FsTier
from kvstrata.tiers.fs_format import file_bytes
from kvstrata.tiers.fs_health import CONDITION_OF, Condition, Health, condition_of
from kvstrata.tiers.fs_root import IDENTITY, RootGone

STORED, PRESENT, LOADED = Outcome.STORED, Outcome.PRESENT, Outcome.LOADED
MISSING, NO_ROOM, FAILED = Outcome.MISSING, Outcome.NO_ROOM, Outcome.FAILED


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(1000.0)


@pytest.fixture
def removed() -> list[Key]:
    return []


@pytest.fixture
def system() -> FaultySystem:
    return FaultySystem()


@pytest.fixture
async def opened(
    tmp_path: Path, clock: FakeClock, removed: list[Key], system: FaultySystem
) -> AsyncIterator[Callable[..., Any]]:
    tiers: list[FsTier] = []

    async def open_tier(**options: Any) -> FsTier:
        context = TierContext("node", clock=clock, on_removed=removed.extend)
        tiers.append(await FsTier.open({"root": tmp_path / "s", **options}, context, system))
        return tiers[-1]

    yield open_tier
    system.let_go()
    system.errors.clear()
    for tier in tiers:
        await tier.close()


async def recovered(tier: FsTier, clock: FakeClock) -> None:
    """Let time pass until the tier is healthy: but none for a probe's threads, however slow."""

    def healthy() -> bool:
        probe = tier._upkeep._tasks.get("probe")
        if probe is None or probe.done():
            clock.advance(0.5)
        return tier.usage().healthy

    await until(healthy)


# ---------------------------------------------------------------- the table


def test_every_errno_tells_one_condition() -> None:
    assert condition_of(OSError(errno.ENOSPC, "")) is Condition.FULL
    assert condition_of(OSError(errno.EDQUOT, "")) is Condition.FULL
    assert condition_of(OSError(errno.EROFS, "")) is Condition.READ_ONLY
    assert condition_of(OSError(errno.EIO, "")) is Condition.IO_ERROR
    assert condition_of(OSError(errno.ESTALE, "")) is Condition.STALE
    assert condition_of(OSError(errno.ETIMEDOUT, "")) is Condition.TIMED_OUT
    assert condition_of(RootGone("moved")) is Condition.GONE
    assert condition_of(OSError(errno.ENOTDIR, "")) is None
    assert set(CONDITION_OF.values()) == set(Condition) - {Condition.GONE, Condition.HUNG}


def test_conditions_begin_cool_off_and_end() -> None:
    clock = FakeClock(0.0)
    health = Health(clock, lambda: 0.0, "/mnt")
    for _ in range(3):
        health.failed(Condition.IO_ERROR, "bad sector")
    assert not health.detail
    health.worked()
    health.failed(Condition.IO_ERROR, "bad sector")
    assert not health.stops_stores
    for _ in range(3):
        health.failed(Condition.IO_ERROR, "bad disk")
    assert health.stops_loads
    assert health.detail == "io_error since 1970-01-01T00:00:00Z, answers miss: bad disk"
    waits = []
    for _ in range(6):
        while not health.due:
            clock.advance(0.25)
        waits.append(clock())
        health.probed(Condition.IO_ERROR, "bad disk")
    gaps = [b - a for a, b in itertools.pairwise(waits)]
    assert max(gaps) <= 30.25
    assert gaps[-1] > gaps[0]
    health.failed(Condition.FULL, "no space")
    assert not health.only_full
    health.probed(Condition.READ_ONLY, "read-only now")
    assert not health.stops_loads
    assert health.stops_stores
    health.probed(None)
    assert not health.stops_stores
    assert not health.due


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("number", "outcome", "condition"),
    [
        (errno.ENOSPC, NO_ROOM, "full"),
        (errno.EDQUOT, NO_ROOM, "full"),
        (errno.EROFS, FAILED, "read_only"),
    ],
)
async def test_what_stops_stores_lets_loads_go_on(
    opened: Callable[..., Any],
    system: FaultySystem,
    clock: FakeClock,
    tmp_path: Path,
    number: int,
    outcome: Outcome,
    condition: str,
) -> None:
    tier = await opened()
    await tier.store([item(i) for i in range(3)])
    system.only = lambda path: path.endswith((".tmp", ".kv"))
    system.errors = dict.fromkeys(["pwritev", "unlink"], number)
    system.errors["link"] = number
    assert await tier.store([item(3)]) == [outcome]
    usage = tier.usage()
    assert not usage.healthy
    assert usage.detail.startswith(f"{condition} since 2")
    assert await loads(tier, 0, 1, 2) == [True] * 3
    assert await tier.lookup([key(0), key(3)]) == [True, False]
    asked = system.faults
    assert await tier.store([item(4), item(0)]) == [outcome, PRESENT]
    assert asked == system.faults
    clock.advance(60)  # probes find it as it was
    await asyncio.sleep(0.1)
    assert not tier.usage().healthy
    system.errors.clear()
    await recovered(tier, clock)
    assert await tier.store([item(3)]) == [STORED]


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN])
async def test_errors_in_a_row_stop_everything_until_a_probe_works(
    opened: Callable[..., Any], system: FaultySystem, clock: FakeClock, number: int
) -> None:
    tier = await opened()
    await tier.store([item(i) for i in range(6)])
    system.errors = dict.fromkeys(["open", "stat", "entries"], number)
    assert await tier.load([blank(0)]) == [FAILED]
    assert tier.usage().healthy, "one bad file is not a bad mount"
    assert await loads(tier, *range(1, 6)) == [False] * 5
    assert not tier.usage().healthy
    assert CONDITION_OF[number] in tier.usage().detail
    assert await tier.lookup([key(0), key(9)]) == [False, False]
    assert await tier.load([blank(0)]) == [FAILED]
    assert await tier.store([item(9)]) == [FAILED]
    assert await tier.evict([key(0)]) == [False]
    await tier.drain()
    system.errors.clear()
    await recovered(tier, clock)
    assert await loads(tier, *range(6)) == [True] * 6


async def test_a_stale_handle_is_opened_again(
    opened: Callable[..., Any], system: FaultySystem
) -> None:
    tier = await opened(read_threads=1)
    await tier.store([item(0)])
    once = [errno.ESTALE]

    def only(path: str) -> bool:
        return path.endswith(".kv") and bool(once) and bool(once.pop())

    system.only = only
    system.errors["preadv"] = errno.ESTALE
    assert await loads(tier, 0) == [True]


async def test_a_full_disk_takes_what_the_oldest_chunks_give(
    opened: Callable[..., Any], system: FaultySystem, removed: list[Key]
) -> None:
    tier = await opened(capacity="1GiB")
    for i in range(4):
        await tier.store([item(i)])
    left = 2 * file_bytes(10_000)

    class Disk(dict[str, int]):
        """Says ENOSPC to writes as long as nothing was removed."""

        def __contains__(self, call: object) -> bool:
            return call == "pwritev" and len(removed) * file_bytes(10_000) < left

    system.only = lambda path: path.endswith(".tmp")
    system.errors = Disk(pwritev=errno.ENOSPC)
    assert await tier.store([item(9), item(8)]) == [STORED, STORED]
    assert removed == [key(0), key(1)]
    assert tier.usage().healthy


# ---------------------------------------------------------------- a hung mount


async def hang(tier: FsTier, system: FaultySystem, clock: FakeClock, call: Any) -> Any:
    """A call that hangs in the mount until the tier has noticed."""
    system.only = lambda path: True
    system.hold(
        "open", "preadv", "pwritev", "stat", "rename", "unlink", "utime", "entries", "mkdir"
    )
    running = asyncio.ensure_future(call)
    assert await asyncio.to_thread(system.reached.wait, 30)
    clock.advance(6)
    await until(lambda: not tier.usage().healthy)
    return running


async def test_a_hung_mount_answers_miss_until_it_comes_back(
    opened: Callable[..., Any], system: FaultySystem, clock: FakeClock
) -> None:
    tier = await opened()
    await tier.store([item(i) for i in range(8)])
    targets = [blank(i) for i in range(8)]
    stuck = await hang(tier, system, clock, tier.load(targets))
    detail = tier.usage().detail
    assert "hung since 2" in detail
    assert "threads that don't come back" in detail
    async with asyncio.timeout(5):
        assert await tier.lookup([key(0), key(99)]) == [False, False]
        assert await tier.load([blank(0)]) == [FAILED]
        assert await tier.store([item(0), item(50)]) == [FAILED, FAILED]
        assert await tier.evict([key(0)]) == [False]
        with pytest.raises(Expired, match="hangs"):
            await tier.drain()
    assert len(tier.keys()) == 8, "what is there is not forgotten"
    assert not stuck.done(), "threads may still touch its memory"
    for _ in range(5):  # probes hang too, and there is a bound to them
        clock.advance(20)
        await asyncio.sleep(0.06)
    system.let_go()
    assert set(await stuck) <= {LOADED, FAILED}
    await recovered(tier, clock)
    assert await loads(tier, *range(8)) == [True] * 8
    assert await tier.store([item(50)]) == [STORED]


async def test_a_lookup_that_hangs_is_a_miss_in_time(
    opened: Callable[..., Any], system: FaultySystem, clock: FakeClock
) -> None:
    tier = await opened()
    await tier.store([item(0)])
    system.only = lambda path: path.endswith(".kv")
    system.hold("stat")
    lookup = asyncio.ensure_future(tier.lookup([key(0), key(1)], deadline=clock() + 0.3))
    assert await asyncio.to_thread(system.reached.wait, 30)
    clock.advance(0.3)
    assert await lookup == [True, False]
    assert tier.usage().healthy, "a short deadline says nothing of the mount"


@pytest.mark.parametrize("noticed", [True, False])
async def test_closing_does_not_wait_for_a_hung_mount(
    opened: Callable[..., Any],
    system: FaultySystem,
    clock: FakeClock,
    noticed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvstrata.tiers.fs._CLOSE_SECONDS", 0.2)
    tier = await opened()
    await tier.store([item(0)])
    target = blank(0)
    stuck = await hang(tier, system, clock, tier.load([target]))
    if not noticed:
        tier._core.health.probed(None)
        assert tier.usage().healthy
    closing = asyncio.ensure_future(tier.close())
    while not closing.done():
        clock.advance(1)
        await asyncio.sleep(0.05)
    assert not stuck.done()
    system.let_go()
    assert set(await stuck) <= {LOADED, FAILED}


async def test_opening_does_not_wait_for_a_hung_mount(
    tmp_path: Path, system: FaultySystem, clock: FakeClock
) -> None:
    system.hold("mkdir")
    opening = asyncio.ensure_future(
        FsTier.open({"root": tmp_path}, TierContext("node", clock=clock), system)
    )
    assert await asyncio.to_thread(system.reached.wait, 30)
    clock.advance(16)
    with pytest.raises(ConfigError, match="does not answer"):
        await opening
    system.let_go()


# ---------------------------------------------------------------- a root that goes away


async def test_a_removed_root_is_made_again_empty(
    opened: Callable[..., Any], clock: FakeClock, removed: list[Key], tmp_path: Path
) -> None:
    tier = await opened()
    await tier.store([item(i) for i in range(4)])
    shutil.rmtree(tmp_path / "s")
    assert await tier.store([item(9)]) == [FAILED]
    assert "gone since" in tier.usage().detail
    assert await tier.lookup([key(0)]) == [False]
    assert not (tmp_path / "s").exists(), "a store made the root"
    await recovered(tier, clock)
    assert sorted(removed) == sorted(key(i) for i in range(4))
    assert tier.keys() == []
    assert tier.usage().used_bytes == 0
    assert await tier.store([item(0)]) == [STORED]
    assert await loads(tier, 0) == [True]
    again = await opened()
    assert again.store_id == tier.store_id


async def test_a_removed_root_is_noticed_by_itself(
    opened: Callable[..., Any], clock: FakeClock, removed: list[Key], tmp_path: Path
) -> None:
    tier = await opened()
    await tier.store([item(0)])
    shutil.rmtree(tmp_path / "s")
    clock.advance(1)
    await until(lambda: "gone" in tier.usage().detail)
    await recovered(tier, clock)
    assert removed == [key(0)]


async def test_a_root_that_is_made_again_by_a_probe_nobody_waits_for_is_empty(
    opened: Callable[..., Any],
    system: FaultySystem,
    clock: FakeClock,
    removed: list[Key],
    tmp_path: Path,
) -> None:
    tier = await opened()
    await tier.store([item(0)])
    shutil.rmtree(tmp_path / "s")
    system.hold("mkdir")  # of the directories below the root: its identity is there by then
    system.only = lambda path: not path.endswith("/s")

    def given_up() -> bool:
        clock.advance(0.5)
        return "a probe does not come back" in tier.usage().detail

    await until(given_up)
    assert system.reached.is_set()
    assert (tmp_path / "s" / IDENTITY).exists()
    system.let_go()
    await recovered(tier, clock)
    assert removed == [key(0)]
    assert await tier.lookup([key(0)]) == [False]
    assert await tier.store([item(0)]) == [STORED]


async def test_another_store_in_its_place_is_not_used(
    opened: Callable[..., Any], clock: FakeClock, tmp_path: Path
) -> None:
    tier = await opened()
    await tier.store([item(0)])
    (tmp_path / "s").rename(tmp_path / "away")
    other = await FsTier.open({"root": tmp_path / "s"}, TierContext("other"))
    await other.close()
    clock.advance(1)
    await until(lambda: "gone" in tier.usage().detail)
    clock.advance(2)
    await until(lambda: "holds another store" in tier.usage().detail)
    assert await tier.store([item(1)]) == [FAILED]
    shutil.rmtree(tmp_path / "s")
    (tmp_path / "away").rename(tmp_path / "s")
    await recovered(tier, clock)
    assert await loads(tier, 0) == [True]


# ---------------------------------------------------------------- real mounts


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB of its own."""
    folder = tmp_path / "mount"
    folder.mkdir()
    mount("-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder))
    yield folder
    unmount(folder)


@pytest.fixture
async def on_disk(disk: Path, clock: FakeClock, removed: list[Key]) -> AsyncIterator[FsTier]:
    context = TierContext("node", clock=clock, on_removed=removed.extend)
    tier = await FsTier.open({"root": disk, "capacity": "1GiB"}, context)
    yield tier
    await tier.close()


def fill(hog: Path) -> None:
    """Take all that is left of a disk."""
    with contextlib.suppress(OSError), hog.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


async def test_a_disk_that_our_own_chunks_fill_goes_on_taking_others(
    on_disk: FsTier, clock: FakeClock
) -> None:
    """Its bound is larger than the disk: batches that come at once take each other's room."""
    for start in range(0, 960, 160):
        batches = [[item(start + 20 * n + i) for i in range(20)] for n in range(8)]
        await asyncio.gather(*(on_disk.store(batch) for batch in batches))
    await recovered(on_disk, clock)
    kept = len(on_disk.keys())
    assert kept > 20
    for start in range(2000, 2100, 10):
        stored = await on_disk.store([item(start + i) for i in range(10)])
        assert stored == [STORED] * 10
        assert await loads(on_disk, *range(start, start + 10)) == [True] * 10
    assert on_disk.usage().healthy


async def test_a_disk_that_others_fill(
    on_disk: FsTier, disk: Path, clock: FakeClock, removed: list[Key]
) -> None:
    await on_disk.store([item(i) for i in range(8)])
    hog = disk / "hog"
    fill(hog)
    assert await on_disk.store([item(20)]) == [STORED], "the cache did not give way"
    assert removed
    kept = [i for i in range(8) if key(i) not in removed]
    assert await loads(on_disk, *kept) == [True] * len(kept)
    outcomes = await on_disk.store([item(100 + i) for i in range(80)])
    assert set(outcomes) == {STORED, NO_ROOM}
    assert "full since" in on_disk.usage().detail
    stored = [100 + i for i, o in enumerate(outcomes) if o is STORED]
    assert await loads(on_disk, *stored) == [True] * len(stored)
    assert not temps(disk)
    hog.unlink()
    await recovered(on_disk, clock)
    assert set(await on_disk.store([item(300 + i) for i in range(8)])) == {STORED}


async def test_a_read_only_remount(on_disk: FsTier, disk: Path, clock: FakeClock) -> None:
    await on_disk.store([item(0), item(1)])
    mount("-o", "remount,ro", str(disk))
    assert await on_disk.store([item(2)]) == [FAILED]
    assert "read_only since" in on_disk.usage().detail
    assert await loads(on_disk, 0, 1) == [True, True]
    assert await on_disk.lookup([key(0), key(2)]) == [True, False]
    assert await on_disk.evict([key(0)]) == [False]
    clock.advance(30)
    await asyncio.sleep(0.1)
    assert not on_disk.usage().healthy
    mount("-o", "remount,rw", str(disk))
    await recovered(on_disk, clock)
    assert await on_disk.store([item(2)]) == [STORED]


async def test_once_it_is_healthy_there_is_room(
    opened: Callable[..., Any], system: FaultySystem, clock: FakeClock
) -> None:
    tier = await opened(capacity="1GiB")
    tier._upkeep._watch.cancel()
    system.errors = {"pwritev": errno.EROFS}
    assert await tier.store([item(0)]) == [FAILED]
    clock.advance(30)  # its lease as the evictor runs out
    await tier._upkeep.probe()
    assert not tier.usage().healthy
    # A mount that is written to, but not all over, is not well yet.
    system.only = lambda path: "evictor" in path
    await tier._upkeep.probe()
    assert "read_only since" in tier.usage().detail
    system.errors.clear()
    await tier._upkeep.probe()
    assert tier.usage().healthy
    assert await tier.store([item(0)]) == [STORED]


async def test_an_unmounted_store_does_not_fill_the_disk_below(
    on_disk: FsTier, disk: Path, clock: FakeClock
) -> None:
    await on_disk.store([item(0)])
    unmount(disk)
    try:
        assert await on_disk.store([item(1)]) == [FAILED]
        clock.advance(1)
        await until(lambda: "gone" in on_disk.usage().detail)
        for _ in range(4):
            clock.advance(10)
            await asyncio.sleep(0.1)
        assert "another file system" in on_disk.usage().detail
        assert os.listdir(disk) == []
    finally:
        mount("-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk))
