"""The fs tier: the contract of every tier, and what only a directory can suffer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fs_kit import SIZE, FaultySystem, blank, item, key, loads, path, temps

from kvstrata.errors import ConfigError, Expired
from kvstrata.keys import Key, Namespace, make_key
from kvstrata.testing import Damage, FakeClock, TierTests
from kvstrata.testing.chunks import a_namespace
from kvstrata.testing.tiers import aligned
from kvstrata.tiers.base import Item, Outcome, TierContext
from kvstrata.tiers.fs import FsTier
from kvstrata.tiers.fs_format import PAGE_BYTES, file_bytes, path_of

STORED, PRESENT, LOADED = Outcome.STORED, Outcome.PRESENT, Outcome.LOADED
MISSING, NO_ROOM, FAILED = Outcome.MISSING, Outcome.NO_ROOM, Outcome.FAILED


class TestFsTier(TierTests):
    keeps_heads = True
    damages = tuple(Damage)

    async def open_tier(self, tmp_path: Path, context: TierContext) -> FsTier:
        self.root = tmp_path
        self.system = FaultySystem()
        return await FsTier.open({"root": tmp_path}, context, self.system)

    async def open_bounded(self, tmp_path: Path, context: TierContext, capacity: int) -> FsTier:
        return await FsTier.open({"root": tmp_path, "capacity": capacity}, context)

    async def damage(self, tier: Any, key: Key, how: Damage, other: Key) -> None:
        path, partner = self.root / path_of(key), self.root / path_of(other)
        content = bytearray(path.read_bytes())
        match how:
            case Damage.FLIP:
                content[PAGE_BYTES + 5] ^= 1
            case Damage.TRUNCATE:
                content = content[: len(content) // 2]
            case Damage.SWAP:
                content, theirs = bytearray(partner.read_bytes()), content
                partner.write_bytes(theirs)
            case Damage.HEADER:
                content[73] ^= 1
            case Damage.EMPTY:
                content.clear()
            case Damage.GROWN:
                content += bytes(PAGE_BYTES)
            case Damage.ZEROED:
                content = bytearray(len(content))
            case Damage.VERSION:
                content[8] = 9
        path.write_bytes(content)

    @contextlib.contextmanager
    def stall(self, tier: Any) -> Iterator[None]:
        self.system.only = lambda path: path.endswith((".kv", ".tmp"))
        self.system.hold("preadv", "pwritev")
        try:
            yield
        finally:
            self.system.let_go()

    async def kill(self, tier: Any) -> None:
        tier._upkeep._watch.cancel()
        os.close(tier._core.root.writers._lock)  # as the kernel does
        tier._core.root.writers._lock = -1


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
    """Opens a tier over `tmp_path` with the options given, and closes it at the end."""
    tiers: list[FsTier] = []

    async def open_tier(**options: Any) -> FsTier:
        context = TierContext("node", clock=clock, on_removed=removed.extend)
        tiers.append(await FsTier.open({"root": tmp_path, **options}, context, system))
        return tiers[-1]

    yield open_tier
    for tier in tiers:
        await tier.close()


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "root: this must be set"),
        ({"root": "x", "capacty": "1GiB"}, "capacty: there is no such setting"),
        ({"root": "x", "capacity": "lots"}, "capacity"),
        ({"root": "x", "low_watermark": 0.9, "high_watermark": 0.8}, "low_watermark is above"),
        ({"root": "x", "read_threads": 0}, "read_threads"),
        ({"root": "x", "deadline": "soon"}, "'soon' is not a time"),
    ],
)
async def test_options_that_cannot_work(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        await FsTier.open(options, TierContext("node"))


async def test_sizes_are_human(opened: Callable[..., Any]) -> None:
    tier = await opened(capacity="1MiB", deadline="200ms")
    assert tier.usage().capacity_bytes == 1 << 20


async def test_no_bound_is_said(opened: Callable[..., Any]) -> None:
    usage = (await opened()).usage()
    assert usage.capacity_bytes is None
    assert "set `capacity`" in usage.detail


# ---------------------------------------------------------------- files and namespaces


async def test_used_bytes_are_those_of_the_disk(opened: Callable[..., Any], tmp_path: Path) -> None:
    tier = await opened()
    sizes = [1, 4096, 5000, 100_000]
    await tier.store([item(i, size) for i, size in enumerate(sizes)])
    taken = [path(tmp_path, i).stat().st_blocks * 512 for i in range(4)]
    assert tier.usage().used_bytes == sum(taken)
    await tier.evict([key(3)])
    assert tier.usage().used_bytes == sum(taken[:3])


async def test_counters(opened: Callable[..., Any]) -> None:
    tier = await opened()
    await tier.store([item(0), item(1)])
    await tier.store([item(1)])
    await tier.load([blank(0), blank(0), blank(7)])
    await tier.evict([key(1)])
    assert tier.usage().counters == {
        "stored": 2,
        "store_bytes": 2 * SIZE,
        "loaded": 2,
        "load_bytes": 2 * SIZE,
        "evicted": 1,
        "expired": 0,
        "corrupt": 0,
        "errors": 0,
        "stuck": 0,
        "direct": 0,
    }


async def test_the_namespace_is_written_down_once_known(tmp_path: Path) -> None:
    known, unknown = a_namespace(), a_namespace(tenant="other")
    context = TierContext("node", namespace_of={known.digest: known}.get)
    tier = await FsTier.open({"root": tmp_path}, context)
    for namespace in (known, unknown):
        assert await tier.store([Item(namespace.key(0, b"h"), aligned(1))]) == [STORED]
    assert Namespace.parse((tmp_path / known.digest.hex() / "namespace.json").read_bytes()) == known
    assert not (tmp_path / unknown.digest.hex() / "namespace.json").exists()
    await tier.close()


async def test_payloads_are_not_copied(opened: Callable[..., Any]) -> None:
    tier = await opened()
    size = 8 << 20
    memory = item(0, size), blank(0, size)
    await tier.store([item(1)])  # threads and modules are there
    tracemalloc.start()
    try:
        assert await tier.store([memory[0]]) == [STORED]
        assert await tier.load([memory[1]]) == [LOADED]
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


# ---------------------------------------------------------------- the bound


def room(chunks: float) -> dict[str, Any]:
    """Options under which that many chunks fit, evicting one chunk at a time."""
    return {
        "capacity": int(chunks * file_bytes(SIZE)),
        "high_watermark": 1.0,
        "low_watermark": 1.0,
    }


async def test_the_least_recently_used_goes_first(
    opened: Callable[..., Any], removed: list[Key]
) -> None:
    tier = await opened(**room(3))
    for i in range(3):
        await tier.store([item(i)])
    await loads(tier, 0)
    await tier.lookup([key(1)])  # a probe is not a use
    await tier.store([item(3)])
    assert removed == [key(1)]
    assert await loads(tier, 0, 2, 3) == [True] * 3


async def test_the_head_of_a_chain_goes_last(
    opened: Callable[..., Any], removed: list[Key]
) -> None:
    tier = await opened(**room(4))
    await tier.store([item(i) for i in range(4)])
    await tier.store([item(4)])
    await tier.store([item(5)])
    assert removed == [key(3), key(2)]


async def test_eviction_goes_down_to_the_low_mark(
    opened: Callable[..., Any], removed: list[Key]
) -> None:
    size = file_bytes(SIZE)
    tier = await opened(capacity=10 * size, high_watermark=0.8, low_watermark=0.5)
    for i in range(8):
        await tier.store([item(i)])
    assert removed == []
    await tier.store([item(8)])
    assert removed == [key(i) for i in range(4)]
    assert tier.usage().used_bytes == 5 * size


async def test_a_batch_is_never_evicted_for_itself(opened: Callable[..., Any]) -> None:
    tier = await opened(**room(3))
    await tier.store([item(0), item(1)])
    outcomes = await tier.store([item(i) for i in range(5)])
    assert outcomes == [PRESENT, PRESENT, STORED, NO_ROOM, NO_ROOM]
    assert await loads(tier, 0, 1, 2) == [True] * 3


async def test_a_smaller_bound_holds_from_the_start(
    opened: Callable[..., Any], tmp_path: Path
) -> None:
    tier = await opened()
    await tier.store([item(i) for i in range(6)])
    for i in range(6):
        os.utime(path(tmp_path, i), ns=(0, 1_000_000 * ((i + 3) % 6)))  # 3 is the oldest
    await tier.close()
    tier = await opened(**room(3))
    assert set(tier.keys()) == {key(i) for i in (0, 1, 2)}
    assert not any(path(tmp_path, i).exists() for i in (3, 4, 5))


# ---------------------------------------------------------------- a shared directory


async def test_two_nodes_share_one_store(opened: Callable[..., Any], removed: list[Key]) -> None:
    here, there = await opened(), await opened()
    assert here.store_id == there.store_id
    assert await here.store([item(0), item(1), item(2)]) == [STORED] * 3
    assert there.keys() == []
    assert await there.lookup([key(0), key(9), key(1)]) == [True, False, True]
    assert set(there.keys()) == {key(0), key(1)}
    assert await loads(there, 0, 1, 2) == [True] * 3
    assert there.usage().used_bytes == here.usage().used_bytes
    assert await there.store([item(2), item(3)]) == [PRESENT, STORED]
    assert await there.evict([key(0)]) == [True]
    removed.clear()
    assert await here.load([blank(0), blank(1)]) == [MISSING, LOADED]
    assert removed == [key(0)], "a chunk that vanished is still in the index"
    assert set(here.keys()) == {key(1), key(2)}


async def test_a_chunk_stored_again_elsewhere_stays(opened: Callable[..., Any]) -> None:
    here, there = await opened(), await opened()
    for _ in range(3):
        await here.store([item(0)])
        await there.evict([key(0)])
        assert await there.store([item(0)]) == [STORED]
        assert await loads(here, 0) == [True]
        await here.evict([key(0)])


# ---------------------------------------------------------------- errors


async def test_an_error_of_one_chunk_is_its_own(opened: Callable[..., Any], tmp_path: Path) -> None:
    tier = await opened()
    blocker = path(tmp_path, 1).parent.parent
    blocker.parent.mkdir(parents=True)
    blocker.write_text("a file where a directory should be")
    assert await tier.store([item(0), item(1), item(2)]) == [STORED, FAILED, STORED]
    assert tier.usage().counters["errors"] == 1
    assert await tier.load([blank(0), blank(1)]) == [LOADED, FAILED]
    assert await tier.lookup([key(1), key(2)]) == [False, True]
    blocker.unlink()
    assert await tier.store([item(1)]) == [STORED]


async def test_what_cannot_be_unlinked_does_not_block_eviction(
    opened: Callable[..., Any], tmp_path: Path, removed: list[Key]
) -> None:
    tier = await opened(**room(3))
    for i in range(3):
        await tier.store([item(i)])
    stuck = path(tmp_path, 0)
    stuck.unlink()
    (stuck / "inside").mkdir(parents=True)
    assert await tier.store([item(3)]) == [NO_ROOM]
    assert await tier.store([item(3)]) == [STORED]
    assert removed == [key(1)]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "mount"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(mount)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


async def test_a_full_disk_is_no_room(small_disk: Path) -> None:
    tier = await FsTier.open({"root": small_disk}, TierContext("node"))
    outcomes = await tier.store([item(i) for i in range(40)])
    stored = [i for i, o in enumerate(outcomes) if o is STORED]
    assert set(outcomes) == {STORED, NO_ROOM}
    assert await loads(tier, *stored) == [True] * len(stored)
    assert tier.usage().counters["errors"] == 0
    assert not temps(small_disk), "a part of a file was left behind"
    await tier.evict([key(i) for i in stored])
    assert await tier.store([item(99)]) == [STORED]
    await tier.close()


# ---------------------------------------------------------------- deadlines and threads


@contextlib.contextmanager
def busy_writers(system: FaultySystem) -> Iterator[None]:
    """Whoever writes or links a chunk's file waits."""
    system.only = lambda path: path.endswith(".kv")
    system.hold("rename")
    try:
        yield
    finally:
        system.let_go()


async def reached(system: FaultySystem) -> None:
    assert await asyncio.to_thread(system.reached.wait, 30)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_loads_and_lookups_do_not_wait_for_stores(
    opened: Callable[..., Any], system: FaultySystem
) -> None:
    tier = await opened(write_threads=2)
    await tier.store([item(0)])
    with busy_writers(system):
        store = asyncio.ensure_future(tier.store([item(i) for i in range(1, 9)]))
        await reached(system)
        assert await loads(tier, 0) == [True]
        assert await tier.lookup([key(0), key(1)]) == [True, False]
        assert not store.done()
    assert await store == [STORED] * 8


async def test_what_was_not_begun_by_the_deadline_fails(
    opened: Callable[..., Any], clock: FakeClock, tmp_path: Path, system: FaultySystem
) -> None:
    tier = await opened(write_threads=1, capacity="1MiB")
    with busy_writers(system):
        first = asyncio.ensure_future(tier.store([item(9)], deadline=clock() + 60))
        await reached(system)
        late = await_all(tier.store([item(0), item(1)], deadline=clock() + 0.5))
        await settle()
        clock.advance(0.5)
        # Nothing of it was begun, so nothing keeps it.
        assert await late == [FAILED, FAILED]
    assert await first == [STORED]
    assert not path(tmp_path, 0).exists()
    assert await tier.store([item(0)]) == [STORED], "the room it claimed was not given back"
    assert tier.usage().counters["errors"] == 0


def await_all(call: Any) -> asyncio.Future[Any]:
    return asyncio.ensure_future(call)


async def test_the_default_deadline(
    opened: Callable[..., Any], clock: FakeClock, system: FaultySystem
) -> None:
    tier = await opened(write_threads=1, deadline="2s", stuck_after="1h")
    with busy_writers(system):
        first = asyncio.ensure_future(tier.store([item(9)], deadline=clock() + 60))
        await reached(system)
        store = asyncio.ensure_future(tier.store([item(0)]))
        await settle()
        clock.advance(2)
        assert await store == [FAILED]
    assert await first == [STORED]


async def test_a_cancelled_store_ends_when_its_threads_have(
    opened: Callable[..., Any], system: FaultySystem
) -> None:
    tier = await opened(write_threads=2)
    with busy_writers(system):
        store = asyncio.ensure_future(tier.store([item(i) for i in range(4)]))
        await reached(system)
        for _ in range(2):
            store.cancel()
            await settle()
        assert not store.done(), "its memory may still be read"
    with pytest.raises(asyncio.CancelledError):
        await store
    assert set(tier.keys()) <= {key(0), key(1)}, "more was begun after it was cancelled"
    assert await tier.lookup([key(2), key(3)]) == [False, False]


async def test_drain_gives_up_at_its_deadline(
    opened: Callable[..., Any], clock: FakeClock, system: FaultySystem
) -> None:
    tier = await opened(write_threads=1)
    with busy_writers(system):
        store = asyncio.ensure_future(tier.store([item(0)]))
        await reached(system)
        with pytest.raises(Expired, match="1 calls still run"):
            await tier.drain(deadline=clock())
    assert await store == [STORED]


@pytest.mark.parametrize("outcome", [LOADED, PRESENT, STORED])
async def test_what_is_evicted_under_a_call_stays_evicted(
    opened: Callable[..., Any], system: FaultySystem, tmp_path: Path, outcome: Outcome
) -> None:
    tier = await opened()
    if outcome is not STORED:
        await tier.store([item(0)])
    # The file has been read or written, and the call has not settled.
    system.only = lambda name: name == str(path(tmp_path, 0)) or name.endswith(".tmp")
    system.hold("close")
    call = tier.load([blank(0)]) if outcome is LOADED else tier.store([item(0)])
    running = asyncio.ensure_future(call)
    await reached(system)
    if outcome is not STORED:
        assert await tier.evict([key(0)]) == [True]
    system.let_go()
    # Told of the removal already, nobody is told then that it is there.
    assert await running == [FAILED if outcome is PRESENT else outcome]
    if outcome is not STORED:
        assert tier.keys() == []
        assert tier.usage().used_bytes == 0
        assert await tier.lookup([key(0)]) == [False]


# ---------------------------------------------------------------- sudden death

WRITER = """
import asyncio, sys
from kvstrata.tiers.base import TierContext
from kvstrata.tiers.fs import FsTier
sys.path.insert(0, sys.argv[2])
from fs_kit import item

async def main():
    tier = await FsTier.open({"root": sys.argv[1]}, TierContext("node"))
    for i in range(0, 1 << 20, 8):
        await tier.store([item(j) for j in range(i, i + 8)])
        print(i, flush=True)

asyncio.run(main())
"""


async def test_kill_9_while_storing(opened: Callable[..., Any], tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path), str(Path(__file__).parent)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    acknowledged = -1
    for _ in range(20):
        line = await asyncio.wait_for(process.stdout.readline(), 30)
        acknowledged = int(line)
    process.send_signal(signal.SIGKILL)
    acknowledged = max([acknowledged, *map(int, (await process.stdout.read()).split())])
    await process.wait()
    # What a writer that dies inside a write leaves, whether or not this one did.
    [lock] = list((tmp_path / "writers").glob("*.lock"))
    (path(tmp_path, 0).parent / f".{lock.stem}.999999.tmp").write_bytes(b"half a ch")
    tier = await opened()
    ids = range(acknowledged + 8)
    assert await loads(tier, *ids) == [True] * len(ids)
    held = tier.keys()
    every = [Item(k, aligned(SIZE)) for k in held]
    assert await tier.load(every) == [LOADED] * len(every)
    assert not temps(tmp_path)
    assert not lock.exists()


async def test_short_hashes_have_files(opened: Callable[..., Any], tmp_path: Path) -> None:
    tier = await opened()
    short = make_key(bytes(16), 0, b"\x07")
    assert await tier.store([Item(short, aligned(1, fill=9))]) == [STORED]
    assert (tmp_path / bytes(16).hex() / "07" / "00" / "07.0.kv").exists()
