"""The calls of the operating system that the fs tier makes: the place to inject faults.

Everything the tier does to a mount goes through one of these methods, so that a test puts a full
disk, a hung mount, a short read or a flipped bit where it wants it, without patching.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Sequence

__all__ = ["DIRECT", "FileSystem"]

DIRECT = getattr(os, "O_DIRECT", 0)
"""The flag that passes the page cache by; 0 where there is none."""


class FileSystem:
    """The real one. Every method blocks, raises `OSError`, and may be called from any thread."""

    def now(self) -> float:
        """Seconds since the epoch: what the times of files are measured against."""
        return time.time()

    def open(self, path: str, flags: int, mode: int = 0o644) -> int:
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def close(self, fd: int) -> None:
        """Network file systems tell here what they could not write."""
        os.close(fd)

    def preadv(self, fd: int, parts: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, parts, offset)

    def pwritev(self, fd: int, parts: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, parts, offset)

    def fstat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def stat(self, path: str) -> os.stat_result:
        """Of the name itself: links are not followed."""
        return os.stat(path, follow_symlinks=False)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def link(self, source: str, target: str) -> None:
        """Unlike `rename`, it never replaces."""
        os.link(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def mkdir(self, path: str) -> None:
        os.mkdir(path)

    def utime(self, path: str, seconds: float) -> None:
        """Set both times."""
        ns = int(seconds * 1e9)
        os.utime(path, ns=(ns, ns), follow_symlinks=False)

    def entries(self, path: str) -> list[os.DirEntry[str]]:
        """Of a directory, in no order."""
        with os.scandir(path) as entries:
            return list(entries)

    def lock(self, fd: int) -> bool:
        """Try for an exclusive lock on an open file; whether this is its owner now."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
