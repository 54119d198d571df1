"""Parts of the tests of the fs tier: chunks, and a file system that fails on demand."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvstrata.keys import Key
from kvstrata.testing.chunks import a_namespace
from kvstrata.testing.tiers import aligned, payload
from kvstrata.tiers.base import Item, Outcome
from kvstrata.tiers.fs import FsTier
from kvstrata.tiers.fs_format import path_of
from kvstrata.tiers.fs_system import FileSystem

SIZE = 10_000


def key(i: int) -> Key:
    return a_namespace().key(0, i.to_bytes(4, "little"))


def item(i: int, size: int = SIZE, parent: int | None = None) -> Item:
    view = aligned(size)
    view[:] = payload(key(i), size)
    return Item(key(i), view, parent=None if parent is None else key(parent))


def blank(i: int, size: int = SIZE) -> Item:
    return Item(key(i), aligned(size))


def path(root: Path, i: int) -> Path:
    return root / path_of(key(i))


def temps(root: Path) -> list[Path]:
    return list(root.rglob(".*.tmp"))


def mount(*arguments: str) -> None:
    """Run `mount`, or skip the test where that is not allowed."""
    command = ["mount", *arguments]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not allowed here")


def unmount(folder: Path) -> None:
    subprocess.run(["umount", "-l", str(folder)], check=True)


async def loads(tier: FsTier, *ids: int) -> list[bool]:
    """Whether each chunk loads; that its bytes are right is checked."""
    items = [blank(i) for i in ids]
    outcomes = await tier.load(items)
    for i, outcome in zip(items, outcomes, strict=True):
        assert outcome is not Outcome.LOADED or i.view == payload(i.key, i.view.nbytes)
    return [outcome is Outcome.LOADED for outcome in outcomes]


class FaultySystem(FileSystem):
    """The real one, but for what a test asks of it. `wall` is its clock, if set.

    `errors` has an errno by the name of the call. `held` calls wait for `let_go`. `random_faults`
    makes that part of all calls fail in some way: an error, a short read or write, a flipped bit.
    """

    def __init__(self) -> None:
        self.wall: float | None = None
        self.errors: dict[str, int] = {}
        self.held: set[str] = set()
        self.only: Callable[[str], bool] = lambda path: True
        self.reached = threading.Event()
        self.faults: Counter[str] = Counter()
        self._free = threading.Event()
        self._rng: random.Random | None = None
        self._rate = 0.0
        self._paths: dict[int, str] = {}
        self._taken: set[str] = set()

    def hold(self, *calls: str) -> None:
        self._free.clear()
        self.reached.clear()
        self.held = set(calls)

    def let_go(self) -> None:
        self.held = set()
        self._free.set()

    def random_faults(self, rate: float, seed: int) -> None:
        self._rate, self._rng = rate, random.Random(seed)

    def took_away(self, path: Path) -> bool:
        """Whether the tier removed or moved the file since it was written."""
        return str(path) in self._taken

    def now(self) -> float:
        return super().now() if self.wall is None else self.wall

    def open(self, path: str, flags: int, mode: int = 0o644) -> int:
        self._before("open", path)
        fd = super().open(path, flags, mode)
        self._paths[fd] = path
        return fd

    def preadv(self, fd: int, parts: Sequence[memoryview], offset: int) -> int:
        path = self._paths.get(fd, "")
        fault = self._before("preadv", path)
        if fault == "short" and parts[0].nbytes > 4096:
            return super().preadv(fd, [parts[0][:4096]], offset)
        got = super().preadv(fd, parts, offset)
        # A lease or an identity that reads wrong is not what is tested here.
        if fault == "flip" and got and path.endswith(".kv"):
            assert self._rng is not None
            self._rng.choice([p for p in parts if p.nbytes])[0] ^= 1 << self._rng.randrange(8)
        return got

    def pwritev(self, fd: int, parts: Sequence[memoryview], offset: int) -> int:
        fault = self._before("pwritev", self._paths.get(fd, ""))
        if fault == "short" and parts[0].nbytes >= 4096:
            return super().pwritev(fd, [parts[0][:4096]], offset)
        return super().pwritev(fd, parts, offset)

    def close(self, fd: int) -> None:
        path = self._paths.pop(fd, "")
        super().close(fd)
        self._before("close", path)

    def stat(self, path: str) -> os.stat_result:
        self._before("stat", path)
        return super().stat(path)

    def fsync(self, fd: int) -> None:
        self._before("fsync", self._paths.get(fd, ""))
        self.faults["fsync"] += 1
        super().fsync(fd)

    def fdatasync(self, fd: int) -> None:
        self._before("fdatasync", self._paths.get(fd, ""))
        self.faults["fdatasync"] += 1
        super().fdatasync(fd)

    def rename(self, source: str, target: str) -> None:
        self._before("rename", target)
        self._taken.add(source)
        super().rename(source, target)
        self._taken.discard(target)

    def link(self, source: str, target: str) -> None:
        self._before("link", target)
        super().link(source, target)

    def unlink(self, path: str) -> None:
        self._before("unlink", path)
        self._taken.add(path)
        super().unlink(path)

    def mkdir(self, path: str) -> None:
        self._before("mkdir", path)
        super().mkdir(path)

    def utime(self, path: str, seconds: float) -> None:
        self._before("utime", path)
        super().utime(path, seconds)

    def entries(self, path: str) -> list[os.DirEntry[str]]:
        self._before("entries", path)
        return super().entries(path)

    def _before(self, call: str, path: str) -> str:
        """Fail, wait, or say which fault the call should show."""
        if call in self.held and self.only(path):
            self.reached.set()
            self._free.wait(30)
        if call in self.errors and self.only(path):
            raise OSError(self.errors[call], os.strerror(self.errors[call]), path)
        if self._rng is None or self._rng.random() >= self._rate or call == "close":
            return ""
        fault = self._rng.choice(["EIO", "ENOSPC", "ESTALE", "ETIMEDOUT", "short", "flip"])
        self.faults[fault] += 1
        if fault.startswith("E"):
            number = getattr(errno, fault)
            raise OSError(number, os.strerror(number), path)
        return fault
