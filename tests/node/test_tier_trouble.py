"""A whole node with a mount in trouble: it serves what else it has, says what is wrong, and is
well again without a restart when the cause ends."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ByteSize

from kvstrata.client import Client
from kvstrata.config import HostSettings, NodeSettings, TierSettings
from kvstrata.keys import Key
from kvstrata.node.process import Node
from kvstrata.node.status import ailing_stores
from kvstrata.testing.chunks import a_namespace
from kvstrata.testing.waiting import eventually
from kvstrata.tiers.base import Item, Outcome, Tier, TierContext
from kvstrata.tiers.fs import FsTier
from kvstrata.tiers.fs_system import FileSystem
from kvstrata.wire import TierStatus

PAGE = 8192
PAGES = 16
NAMESPACE = a_namespace(PAGE)


class HungSystem(FileSystem):
    """A mount whose calls do not return, as those of a dead server, until it is back."""

    free: threading.Event

    def __init__(self) -> None:
        self.free = threading.Event()
        self.free.set()

    def open(self, path: str, flags: int, mode: int = 0o644) -> int:
        self.free.wait()
        return super().open(path, flags, mode)

    def stat(self, path: str) -> Any:
        self.free.wait()
        return super().stat(path)

    def preadv(self, fd: int, parts: Sequence[memoryview], offset: int) -> int:
        self.free.wait()
        return super().preadv(fd, parts, offset)


class HungFs(FsTier):
    """An fs tier on such a mount; one in a test."""

    system: HungSystem

    @classmethod
    async def open(
        cls, options: dict[str, Any], context: TierContext, system: FileSystem | None = None
    ) -> FsTier:
        HungFs.system = HungSystem()
        return await super().open(options, context, HungFs.system)


class Naive(Tier):
    """Somebody's first tier: files by name, calls that block in threads, and no thought of what
    happens when they do."""

    name = "naive"
    free = threading.Event()

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store_id = f"naive-{root}"
        root.mkdir()

    @classmethod
    async def open(cls, options: dict[str, Any], context: TierContext) -> Tier:
        cls.free.set()
        return cls(Path(options["root"]))

    async def lookup(self, keys: Sequence[Key], deadline: float | None = None) -> list[bool]:
        return await asyncio.to_thread(lambda: [self._path(k).exists() for k in keys])

    async def store(self, batch: Sequence[Item], deadline: float | None = None) -> list[Outcome]:
        def work() -> list[Outcome]:
            for item in batch:
                self._path(item.key).write_bytes(item.view)
            return [Outcome.STORED] * len(batch)

        return await asyncio.to_thread(work)

    async def load(self, batch: Sequence[Item], deadline: float | None = None) -> list[Outcome]:
        def work() -> list[Outcome]:
            for item in batch:
                item.view[:] = self._path(item.key).read_bytes()
            return [Outcome.LOADED] * len(batch)

        return await asyncio.to_thread(work)

    async def evict(self, keys: Sequence[Key]) -> list[bool]:
        return [False] * len(keys)

    def keys(self) -> list[Key]:
        return []

    def usage(self) -> Any:
        raise NotImplementedError

    async def drain(self, deadline: float | None = None) -> None:
        return None

    async def close(self) -> None:
        return None

    def _path(self, key: Key) -> Path:
        self.free.wait()
        return self.root / key.hex()


# ---------------------------------------------------------------- causes


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    yield folder
    run("umount", "-l", str(folder))


def fill(disk: Path) -> None:
    with contextlib.suppress(OSError), (disk / "hog").open("wb", buffering=0) as hog:
        while True:
            hog.write(bytes(4096))


def replace(disk: Path) -> None:
    """Another store is where ours was."""

    async def make() -> None:
        await (await FsTier.open({"root": disk / "store"}, TierContext("other"))).close()

    (disk / "store").rename(disk / "away")
    asyncio.run(make())


def put_back(disk: Path) -> None:
    shutil.rmtree(disk / "store")
    (disk / "away").rename(disk / "store")


CAUSES: dict[str, tuple[Callable[[Path], object], Callable[[Path], object]]] = {
    "full": (fill, lambda disk: (disk / "hog").unlink()),
    "read_only": (
        lambda disk: run("mount", "-o", "remount,ro", str(disk)),
        lambda disk: run("mount", "-o", "remount,rw", str(disk)),
    ),
    "removed": (lambda disk: shutil.rmtree(disk / "store"), lambda disk: None),
    "gone": (replace, put_back),
    "hung": (lambda disk: HungFs.system.free.clear(), lambda disk: HungFs.system.free.set()),
}


# ---------------------------------------------------------------- the node


class Engine:
    """Writes and reads chunks of one engine, and looks at its node."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def write(self, *numbers: int) -> None:
        keys = [key(n) for n in numbers]
        for n, offset in zip(numbers, self.client.reserve(keys), strict=True):
            self.client.region.view[offset : offset + PAGE] = payload(n)
        assert self.client.commit(keys) == [True] * len(keys)

    def read(self, *numbers: int) -> list[int]:
        """The numbers of a prefix that came back; all of them right."""
        found = self.client.lookup([key(n) for n in numbers], wait=3.0)
        offsets = found.offsets[: found.prefix]
        for n, offset in zip(numbers, offsets, strict=False):
            assert bytes(self.client.region.view[offset : offset + PAGE]) == payload(n)
        self.client.release(found.lease)
        return list(numbers[: found.prefix])

    def tier(self, name: str) -> TierStatus:
        return next(t for t in self.client.status().tiers if t.name == name)


def key(n: int) -> Key:
    return NAMESPACE.key(0, n.to_bytes(4, "big"))


def payload(n: int) -> bytes:
    return n.to_bytes(4, "big") * (PAGE // 4)


async def with_engine(
    folder: Path, tiers: Sequence[dict[str, Any]], work: Callable[[Engine, Node], None]
) -> None:
    spare = {"type": "fs", "name": "spare", "root": str(folder / "spare")}
    settings = NodeSettings(
        id="a",
        socket=folder / "a.sock",
        host=HostSettings(capacity=ByteSize(PAGES * PAGE), shm_dir=folder),
        tiers=[
            TierSettings(**{"grace": 0.5, "lookup_deadline": 0.5, **t}) for t in (*tiers, spare)
        ],
        stop_deadline=3.0,
    )
    node = await Node.start(settings)
    try:

        def engine() -> None:
            with Client.connect(folder / "a.sock", "engine", namespace=NAMESPACE) as client:
                work(Engine(client), node)

        await asyncio.to_thread(engine)
    finally:
        await node.close()
    assert node.stuck == []


def serves(engine: Engine, *numbers: int) -> None:
    """New chunks are kept beside the tier in trouble, and come back from there."""
    before = engine.tier("spare").chunks
    for start in range(0, len(numbers), PAGES // 2):
        part = numbers[start : start + PAGES // 2]
        engine.write(*part)
        expected = before + start + len(part)
        eventually(lambda n=expected: engine.tier("spare").chunks >= n)
    engine.client.drop(["host"])
    assert engine.read(*numbers[: PAGES // 2]) == list(numbers[: PAGES // 2])
    engine.client.drop(["host"])


@pytest.mark.parametrize("cause", list(CAUSES))
async def test_a_mount_in_trouble(
    tmp_path: Path, disk: Path, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    begin, end = CAUSES[cause]
    tier = {"type": "fs", "name": "disk", "root": str(disk / "store"), "stuck_after": 0.5}
    if cause == "hung":
        tier["type"] = "test_tier_trouble:HungFs"

    def work(engine: Engine, node: Node) -> None:
        serves(engine, *range(4))
        eventually(lambda: engine.tier("disk").chunks == 4)
        begin(disk)
        try:
            serves(engine, *range(100, 124))
            if cause == "removed":  # it is made anew within a second
                eventually(lambda: f"fs tier at {disk / 'store'}: gone" in caplog.text)
            else:
                eventually(lambda: f"{cause} since 20" in engine.tier("disk").detail)
                assert node.health()[1].startswith("disk: ")
                assert ailing_stores(node.store.guards) == [node.store.guards[0].store_id]
            serves(engine, *range(200, 204))
        finally:
            end(disk)
        eventually(lambda: engine.tier("disk").healthy)
        assert (node.health(), ailing_stores(node.store.guards)) == ((True, ""), [])
        before = engine.tier("disk").chunks
        serves(engine, *range(300, 304))
        eventually(lambda: engine.tier("disk").chunks >= before + 4)
        engine.client.drop(["host", "spare"])
        assert engine.read(*range(300, 304)) == list(range(300, 304))
        if cause in ("read_only", "gone", "hung"):  # what was there before, is
            assert engine.read(*range(4)) == list(range(4))

    await with_engine(tmp_path, [tier], work)


async def test_somebody_elses_tier_that_hangs(tmp_path: Path) -> None:
    """The node does by itself what the fs tier does for it."""

    def work(engine: Engine, node: Node) -> None:
        serves(engine, *range(4))
        Naive.free.clear()
        try:
            assert engine.read(*range(4)) == list(range(4))  # from the other, after its share
            told = eventually(lambda: d if "has not returned" in (d := node.health()[1]) else "")
            assert told.startswith("naive: no lookup or load or store since 20")
            serves(engine, *range(100, 104))
            assert engine.tier("naive").counters["stuck_calls"] >= 1
        finally:
            Naive.free.set()
        eventually(lambda: "has not returned" not in node.health()[1])
        engine.client.drop(["host", "spare"])
        assert engine.read(*range(4)) == list(range(4))
        assert engine.tier("naive").counters["hits"] >= 4

    tier = {"type": "test_tier_trouble:Naive", "root": str(tmp_path / "naive")}
    await with_engine(tmp_path, [tier], work)


async def test_a_node_ends_while_its_mount_hangs(tmp_path: Path) -> None:
    settings = NodeSettings(
        id="a",
        socket=tmp_path / "a.sock",
        host=HostSettings(capacity=ByteSize(PAGES * PAGE), shm_dir=tmp_path),
        tiers=[TierSettings(type="test_tier_trouble:HungFs", root=str(tmp_path / "fs"))],  # type: ignore[call-arg]
        stop_deadline=1.0,
    )
    node = await Node.start(settings)

    def engine() -> None:
        with Client.connect(tmp_path / "a.sock", "engine", namespace=NAMESPACE) as client:
            HungFs.system.free.clear()
            Engine(client).write(*range(4))

    try:
        await asyncio.to_thread(engine)
        began = asyncio.get_running_loop().time()
        await node.close()
        assert asyncio.get_running_loop().time() - began < 4
        assert node.stuck == ["tier fs"]
        assert node.region.view[PAGE - 1] == payload(0)[-1]  # mapped still
        assert not node.region.path.exists()
    finally:
        HungFs.system.free.set()
    [tier] = node.store.guards
    assert await tier.close(10)
