"""Several nodes on one root: who evicts, what they tell each other, and how they share the room."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fs_kit import FaultySystem, blank, item, key, loads, mount, path, unmount

from kvstrata.keys import Key
from kvstrata.testing import FakeClock
from kvstrata.testing.waiting import until
from kvstrata.tiers.base import Outcome, TierContext
from kvstrata.tiers.fs import FsTier
from kvstrata.tiers.fs_format import file_bytes
from kvstrata.tiers.fs_lease import EVICTOR, TTL, LeaseFile, Use
from kvstrata.tiers.fs_news import NEWS, REMOVED, News, Record
from kvstrata.tiers.fs_news import STORED as TOLD
from kvstrata.tiers.fs_root import Root

STORED, PRESENT, LOADED = Outcome.STORED, Outcome.PRESENT, Outcome.LOADED
MISSING, NO_ROOM = Outcome.MISSING, Outcome.NO_ROOM
CHUNK = file_bytes(10_000)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(1000.0)


# ---------------------------------------------------------------- the lease


def lease(tmp_path: Path, clock: FakeClock) -> LeaseFile:
    return LeaseFile(Root(tmp_path), clock)


def test_one_of_many_holds_the_lease(tmp_path: Path, clock: FakeClock) -> None:
    leases = [lease(tmp_path, clock) for _ in range(4)]
    for _ in range(20):
        clock.advance(1)
        for one in random.Random(7).sample(leases, 4):
            one.step(Use())
        assert sum(one.held for one in leases) == 1
        assert sum(one.fenced() for one in leases) == 1
    assert len({one.latest.holder for one in leases if one.latest}) == 1


def test_a_silent_holder_is_replaced_and_knows_it(tmp_path: Path, clock: FakeClock) -> None:
    first, second = lease(tmp_path, clock), lease(tmp_path, clock)
    first.step(Use())
    second.step(Use())
    for _ in range(int(TTL) - 1):
        clock.advance(1)
        second.step(Use())
        assert not second.held
    clock.advance(1)
    assert not first.held, "its time is over by its own clock"
    second.step(Use())
    assert second.held
    first.step(Use())
    assert not first.held
    assert first.latest is not None
    assert first.latest.token == 1


def test_a_holder_that_slept_sees_a_higher_token(tmp_path: Path) -> None:
    here, there = FakeClock(0.0), FakeClock(0.0)
    first, second = lease(tmp_path, here), lease(tmp_path, there)
    first.step(Use())
    second.step(Use())
    there.advance(TTL)
    second.step(Use())
    assert first.held, "by its own clock"
    assert not first.fenced()
    assert second.fenced()


def test_a_lease_is_given_back(tmp_path: Path, clock: FakeClock) -> None:
    first, second = lease(tmp_path, clock), lease(tmp_path, clock)
    first.step(Use())
    second.step(Use())
    first.release()
    assert not first.held
    second.step(Use(used_bytes=7))
    assert second.held
    assert [p.name for p in (tmp_path / EVICTOR).iterdir()] == [f"{1:020d}"]


def test_the_impatient_do_not_wait_for_the_dead(tmp_path: Path, clock: FakeClock) -> None:
    root = Root(tmp_path)
    LeaseFile(root, clock).step(Use())
    os.close(root.writers._lock)  # as the kernel does at its death
    patient, impatient = lease(tmp_path, clock), lease(tmp_path, clock)
    patient.step(Use())
    assert not patient.held
    impatient.step(Use(), impatient=True)
    assert impatient.held


def test_renewing_takes_no_room(tmp_path: Path, clock: FakeClock) -> None:
    system = FaultySystem()
    one = LeaseFile(Root(tmp_path, system), clock)
    one.step(Use())
    system.errors = dict.fromkeys(["link", "mkdir", "rename"], errno.ENOSPC)
    before = (tmp_path / EVICTOR / f"{0:020d}").stat()
    one.step(Use(used_bytes=1 << 60, heard={f"{i}": 1 << 60 for i in range(500)}))
    after = (tmp_path / EVICTOR / f"{0:020d}").stat()
    assert (before.st_ino, before.st_size) == (after.st_ino, after.st_size)


def test_a_torn_lease_is_waited_out(tmp_path: Path, clock: FakeClock) -> None:
    first, second = lease(tmp_path, clock), lease(tmp_path, clock)
    first.step(Use())
    file = tmp_path / EVICTOR / f"{0:020d}"
    file.write_bytes(b"\x10\0\0\0garbage".ljust(16384, b"x"))
    second.step(Use())
    assert not second.held
    first.step(Use(used_bytes=5))
    second.step(Use())
    assert second.latest is not None
    assert second.latest.use.used_bytes == 5
    file.write_bytes(b"")
    clock.advance(1)
    second.step(Use())
    clock.advance(TTL)
    second.step(Use())
    assert second.held


def test_more_writers_than_a_lease_has_room_for(tmp_path: Path, clock: FakeClock) -> None:
    one = lease(tmp_path, clock)
    heard = {f"{i}-{i:012x}": 1 << 50 for i in range(3000)}
    one.step(Use(used_bytes=9, capacity=10, heard=heard))
    other = lease(tmp_path, clock)
    other.step(Use())
    assert other.latest is not None
    assert len(other.latest.use.heard) == 1000
    assert other.latest.use.limit("2999-000000000bb7") == 0
    assert other.latest.use.used_bytes == 9


def test_the_room_that_is_left_is_shared_equally() -> None:
    use = Use(used_bytes=70, capacity=100, heard={"a": 1000, "b": 5, "c": 0})
    assert [use.limit(writer) for writer in "abcd"] == [1010, 15, 10, 0]
    assert Use(used_bytes=170, capacity=100, heard={"a": 7}).limit("a") == 7


# ---------------------------------------------------------------- news


def record(i: int, what: bytes = TOLD) -> Record:
    return Record(what, key(i), 4096, 4096 * i, float(i))


def test_news_are_read_once_in_order_and_not_by_their_writer(tmp_path: Path) -> None:
    here, there = Root(tmp_path), Root(tmp_path)
    mine, theirs = News(here), News(there)
    mine.start()
    theirs.start()
    assert theirs.read() == []
    mine.write([record(1), record(2, REMOVED)])
    mine.write([record(3)])
    assert theirs.read() == [(here.writer, r) for r in (record(1), record(2, REMOVED), record(3))]
    assert theirs.read() == []
    assert mine.read() == []
    mine.write([record(4)])
    late = News(Root(tmp_path))
    late.start()
    assert late.read() == []
    assert theirs.read() == [(here.writer, record(4))]


def test_news_that_are_not_all_there_yet(tmp_path: Path) -> None:
    writer, reader = News(Root(tmp_path)), News(Root(tmp_path))
    writer.start()
    reader.start()
    writer.write([record(1), record(2)])
    [file] = (tmp_path / NEWS).iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:150])
    assert [r.key for _, r in reader.read()] == [key(1)]
    file.write_bytes(whole[:96] + bytes(96) + whole[96:])  # a hole not filled yet
    assert reader.read() == []
    file.write_bytes(whole)
    assert [r.key for _, r in reader.read()] == [key(2)]


def test_news_go_on_in_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstrata.tiers.fs_news._MOST_BYTES", 96 * 4)
    writer, reader = News(Root(tmp_path)), News(Root(tmp_path))
    writer.start()
    reader.start()
    got = []
    for i in range(20):
        writer.write([record(2 * i), record(2 * i + 1)])
        got += [r.key for _, r in reader.read()]
    assert got == [key(i) for i in range(40)]
    assert len(list((tmp_path / NEWS).iterdir())) == 2


def test_news_that_somebody_removed(tmp_path: Path) -> None:
    writer, reader = News(Root(tmp_path)), News(Root(tmp_path))
    writer.start()
    reader.start()
    writer.write([record(1), record(2)])
    reader.read()
    for file in (tmp_path / NEWS).iterdir():
        file.unlink()
    writer.write([record(3)])
    assert [r.key for _, r in reader.read()] == [key(3)]


# ---------------------------------------------------------------- two tiers


@pytest.fixture
def removed() -> list[list[Key]]:
    """What each tier opened has announced."""
    return []


@pytest.fixture
async def opened(
    tmp_path: Path, clock: FakeClock, removed: list[list[Key]]
) -> AsyncIterator[Callable[..., Any]]:
    tiers: list[FsTier] = []

    async def open_tier(system: Any = None, **options: Any) -> FsTier:
        removed.append([])
        context = TierContext("node", clock=clock, on_removed=removed[-1].extend)
        tiers.append(await FsTier.open({"root": tmp_path, **options}, context, system))
        return tiers[-1]

    yield open_tier
    for tier in tiers:
        await tier.close()


async def talk(clock: FakeClock, *tiers: FsTier) -> None:
    """Each tells its news, and then all have heard them."""
    for _ in range(2):
        for tier in tiers:
            await tier._upkeep.exchange()
        clock.advance(0.1)


def evicts(tier: FsTier) -> bool:
    return "another node evicts" not in tier.usage().detail


async def test_each_knows_what_the_others_do(
    opened: Callable[..., Any], clock: FakeClock, removed: list[list[Key]]
) -> None:
    here, there = await opened(), await opened()
    assert (evicts(here), evicts(there)) == (True, False)
    await here.store([item(0), item(1)])
    await there.store([item(2)])
    await talk(clock, here, there)
    assert set(there.keys()) == set(here.keys()) == {key(i) for i in range(3)}
    assert here.usage().used_bytes == there.usage().used_bytes == 3 * CHUNK
    await here.evict([key(0), key(2)])
    await talk(clock, here, there)
    assert there.keys() == [key(1)]
    assert sorted(removed[1]) == sorted([key(0), key(2)])
    assert removed[0] == [key(0), key(2)] or removed[0] == [key(2), key(0)]


async def test_a_root_that_one_made_again_is_empty_for_all(
    opened: Callable[..., Any], clock: FakeClock, removed: list[list[Key]], tmp_path: Path
) -> None:
    here, there = await opened(), await opened()
    await here.store([item(0), item(1)])
    await talk(clock, here, there)
    assert len(there.keys()) == 2
    shutil.rmtree(tmp_path)
    await here._upkeep.exchange()
    assert "gone" in here.usage().detail
    await here._upkeep.probe()  # makes it again
    assert here.usage().healthy
    assert here.keys() == []
    await there._upkeep.exchange()
    assert "made again empty" in there.usage().detail
    await there._upkeep.probe()
    assert there.usage().healthy
    assert there.keys() == []
    assert sorted(removed[0]) == sorted(removed[1]) == sorted([key(0), key(1)])
    await there.store([item(2)])
    await talk(clock, here, there)
    assert here.keys() == [key(2)]


async def test_news_of_a_round_that_came_too_late_are_heard(
    opened: Callable[..., Any], clock: FakeClock, removed: list[list[Key]]
) -> None:
    system = FaultySystem()
    here, there = await opened(), await opened(system)
    await here.store([item(0), item(1)])
    await talk(clock, here, there)
    await here.evict([key(0)])
    await here._upkeep.exchange()
    # The round of `there` hangs after it has read what `here` says.
    system.only = lambda path: "evictor" in path
    system.hold("open", "preadv", "stat", "entries")
    round_ = asyncio.ensure_future(there._upkeep.exchange())
    assert await asyncio.to_thread(system.reached.wait, 30)
    clock.advance(6)
    await round_
    assert removed[1] == []
    system.let_go()
    await until(lambda: there._upkeep._exchanged)
    await there._upkeep.exchange()
    assert removed[1] == [key(0)]


async def test_only_one_evicts_and_all_keep_the_bound(
    opened: Callable[..., Any], clock: FakeClock, tmp_path: Path
) -> None:
    capacity = 40 * CHUNK
    here, there = await opened(capacity=capacity), await opened(capacity=capacity)
    await talk(clock, here, there)
    outcomes: dict[int, set[Outcome]] = {0: set(), 1: set()}
    stored = 0
    for turn in range(30):
        for n, tier in enumerate((here, there)):
            batch = [item(1000 * n + 4 * turn + i) for i in range(4)]
            got = await tier.store(batch)
            outcomes[n] |= set(got)
            stored += got.count(STORED)
            # What was given up may be on its way out: one batch is the bound of the tier.
            assert on_disk(tmp_path) <= capacity + len(batch) * CHUNK
        if turn % 3 == 2:
            clock.advance(1)
            await talk(clock, here, there)
    assert stored > 100
    assert outcomes[0] == {STORED}
    assert outcomes[1] == {STORED, NO_ROOM}, "it may not evict, so it must wait at times"
    assert there.usage().counters["evicted"] == 0
    assert here.usage().counters["evicted"] > 50


async def test_what_others_use_is_kept(
    opened: Callable[..., Any], clock: FakeClock, removed: list[list[Key]]
) -> None:
    system = FaultySystem()
    system.wall = 10_000.0
    here, there = await opened(system), await opened(system)
    for i in range(4):
        await here.store([item(i)])
    await talk(clock, here, there)
    system.wall += 100
    assert await loads(there, 0) == [True]
    await there._upkeep.flush()
    await talk(clock, here, there)
    assert here.keys()[0] == key(1)
    assert here.keys()[-1] == key(0)


async def test_the_evictor_dies_and_another_takes_over(
    opened: Callable[..., Any], clock: FakeClock
) -> None:
    here, there = await opened(), await opened()
    here._upkeep._watch.cancel()  # it hangs
    began = clock()
    while not evicts(there):
        clock.advance(0.5)
        await there._upkeep.exchange()
    assert clock() - began < 15
    assert not evicts(here)
    await here._upkeep.exchange()
    assert not evicts(here)


async def test_a_chunk_too_old_is_a_miss_and_goes(
    opened: Callable[..., Any], clock: FakeClock, removed: list[list[Key]], tmp_path: Path
) -> None:
    system = FaultySystem()
    system.wall = time.time()
    tier = await opened(system, ttl="100s")
    await tier.store([item(0), item(1)])
    system.wall += 60
    assert await loads(tier, 1) == [True]
    system.wall += 60
    assert await tier.lookup([key(0), key(1)]) == [False, True]
    assert await tier.load([blank(0), blank(1)]) == [MISSING, LOADED]
    assert path(tmp_path, 0).exists()
    await tier._upkeep.exchange()
    assert not path(tmp_path, 0).exists()
    assert removed[0] == [key(0)]
    assert tier.usage().counters["expired"] == 1
    await tier.close()
    system.wall += 99
    again = await opened(system, ttl="100s")
    assert await loads(again, 1) == [True], "the access was not kept"


async def test_what_vanished_in_silence_is_found_out_by_a_walk(
    opened: Callable[..., Any], clock: FakeClock, removed: list[list[Key]], tmp_path: Path
) -> None:
    tier = await opened(rescan="60s")
    await tier.store([item(i) for i in range(3)])
    path(tmp_path, 1).unlink()
    other = await FsTier.open({"root": tmp_path}, TierContext("node"))
    await other.store([item(9)])
    await other.close()
    for file in (tmp_path / NEWS).iterdir():
        file.unlink()
    clock.advance(61)
    await until(lambda: removed[0] == [key(1)])
    await until(lambda: set(tier.keys()) == {key(0), key(2), key(9)})
    assert tier.usage().used_bytes == 3 * CHUNK


# ---------------------------------------------------------------- processes

SECONDS = float(os.environ.get("KVSTRATA_FS_SECONDS", "60"))
CAPACITY = 16 << 20


async def neighbour(root: Path, seconds: float, seed: int) -> asyncio.subprocess.Process:
    script = Path(__file__).parent / "fs_neighbour.py"
    arguments = [str(root), str(seconds), str(CAPACITY), str(seed)]
    return await asyncio.create_subprocess_exec(
        sys.executable, str(script), *arguments, stdout=asyncio.subprocess.PIPE
    )


def holder(root: Path) -> int | None:
    """The process that holds the lease, while it is not given back."""
    names = sorted(p for p in (root / EVICTOR).glob("*") if p.name.isdigit())
    content = names[-1].read_bytes()
    length = int.from_bytes(content[:4], "little")
    try:
        lease = msgspec.json.decode(content[12 : 12 + length])
    except msgspec.DecodeError:
        return None  # being renewed
    return None if lease["released"] else int(lease["holder"].split("-")[0])


def on_disk(root: Path) -> int:
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            if name.endswith((".kv", ".tmp")) and "quarantine" not in folder:
                try:
                    total += os.stat(f"{folder}/{name}").st_blocks * 512
                except FileNotFoundError:
                    continue
    return total


@pytest.fixture
def shared_root(tmp_path: Path) -> Iterator[Path]:
    """On a file system of its own, whose use can be told in one moment."""
    folder = tmp_path / "mount"
    folder.mkdir()
    mount("-t", "tmpfs", "-o", "size=128m", "tmpfs", str(folder))
    yield folder
    unmount(folder)


def in_use(root: Path) -> int:
    """Bytes of chunks, and of what is being written."""
    system = os.statvfs(root)
    used = (system.f_blocks - system.f_bfree) * system.f_frsize
    return used - sum(
        file.stat().st_blocks * 512 for name in (NEWS, EVICTOR) for file in (root / name).glob("*")
    )


@pytest.mark.timeout(max(300, 3 * SECONDS))
async def test_two_nodes_at_full_speed_on_one_root(shared_root: Path) -> None:
    """Stores, loads and evictions by two processes; the evictor is killed, and another comes."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}, {SECONDS:g} s")
    end = time.monotonic() + SECONDS
    nodes = {}
    for n in range(2):
        process = await neighbour(shared_root, SECONDS, seed + n)
        assert process.stdout is not None
        assert (await asyncio.wait_for(process.stdout.readline(), 30)).strip()
        nodes[process.pid] = process
    most, killed_at, took, dead = 0, 0.0, 0.0, 0
    while time.monotonic() < end:
        most = max(most, in_use(shared_root))
        now, pid = time.monotonic(), holder(shared_root)
        if not killed_at and now > end - SECONDS * 0.7 and pid in nodes:
            nodes.pop(pid).send_signal(signal.SIGKILL)
            killed_at, dead = now, pid
            process = await neighbour(shared_root, end - now, seed + 2)
            nodes[process.pid] = process
            assert process.stdout is not None
            await asyncio.wait_for(process.stdout.readline(), 30)
        if killed_at and not took and pid not in (None, dead):
            took = now - killed_at
        await asyncio.sleep(0.1)
    reports = []
    for process in nodes.values():
        out, _ = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 0
        reports.append(json.loads(out.splitlines()[-1]))
    for report in reports:
        print(report)
        assert report["wrong"] == 0
        assert report["longest_offered"] <= 5.0, "an index offers what is long gone"
        assert report["outcomes"].get("corrupt", 0) == 0
        # Of stores, those that the other's eviction crossed; that is rare.
        assert report["outcomes"].get("failed", 0) <= max(10, report["outcomes"][STORED] // 20)
        assert report["outcomes"][STORED] > 100
        assert report["outcomes"][LOADED] > 100
    spans = sorted(span for report in reports for span in report["evicting"])
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans)), "two evicted at once"
    assert 0 < took < 15, "nobody took over from the evictor that was killed"
    # What is unlinked under a load, and what is being written, takes room for a moment.
    assert most <= CAPACITY + 4 * 8 * CHUNK
    assert sum(report["counters"]["evicted"] for report in reports) > 100
