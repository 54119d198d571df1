"""The node's shared host memory.

A POSIX shm file, mapped by the node and by every engine of the host. Its name carries node id
and incarnation. The node holds an advisory lock (`flock`) on it for life: the kernel drops that
lock when the process dies in any way, so a start can tell the orphans of dead nodes from the
regions of living ones without trusting process ids, and remove them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import re
from pathlib import Path

from kvstrata.errors import ConfigError, LinkBroken, Malformed
from kvstrata.numa import prefer_node

__all__ = ["PREFIX", "Region", "sweep"]

_log = logging.getLogger(__name__)

PREFIX = "kvstrata-"
_NAME = re.compile(r"kvstrata-[A-Za-z0-9._-]{1,160}")
_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in the mmap module before Python 3.13
_POPULATE_BYTES = 16 << 20
# Magic numbers of statfs(2): tmpfs, ramfs, hugetlbfs.
_IN_MEMORY = (0x01021994, 0x858458F6, 0x958458F6)


class Region:
    """`view` is a writable byte view of the whole region, shared between processes."""

    def __init__(self, path: Path, fd: int, size: int, owner: bool) -> None:
        self.path = path
        self.size = size
        self._fd = fd
        self._owner = owner
        self._map = mmap.mmap(fd, size, mmap.MAP_SHARED)
        self.view = memoryview(self._map)

    @property
    def name(self) -> str:
        return self.path.name

    @classmethod
    def create(
        cls,
        node: str,
        incarnation: str,
        size: int,
        shm_dir: Path,
        populate: bool = True,
        huge_pages: bool = True,
        numa_node: int | None = None,
    ) -> Region:
        """Create, lock and populate it. Raises `ConfigError` if it does not fit, or if this host
        has no such NUMA node.

        `huge_pages` is a hint: the kernel takes it if the tmpfs is mounted so that it may. So is
        `numa_node`, whose memory is preferred; a kernel that won't is told of in the log.
        """
        _check_fits(size, shm_dir)
        if not _in_memory(shm_dir):
            _log.warning(
                "host.shm_dir %s is on no tmpfs: what is written to the region goes to a disk, "
                "too; mount a tmpfs there, or name another directory",
                shm_dir,
            )
        path = shm_dir / f"{PREFIX}{node}-{incarnation}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # Between the two lines another node's sweep may take the file for an orphan; its
            # lock or the missing link shows that.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink == 0:
                raise BlockingIOError
            os.ftruncate(fd, size)
            region = cls(path, fd, size, owner=True)
        except BlockingIOError:
            os.close(fd)
            again = f"{incarnation}-2"
            return cls.create(node, again, size, shm_dir, populate, huge_pages, numa_node)
        except BaseException:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        try:
            # Before the first touch, which decides.
            if huge_pages:
                with contextlib.suppress(OSError):  # refused by kernels built without them
                    region._map.madvise(mmap.MADV_HUGEPAGE)
            if numa_node is not None:
                region._prefer(numa_node)
            if populate:
                region.populate()
        except BaseException:
            region.close()
            raise
        return region

    def _prefer(self, node: int) -> None:
        first = ctypes.c_char.from_buffer(self._map)
        try:
            trouble = prefer_node(ctypes.addressof(first), self.size, node)
        finally:
            del first  # it keeps the mapping
        if trouble is not None:
            _log.warning(
                "the region's memory is not bound to NUMA node %d (%s); or start the node under "
                "numactl --preferred=%d",
                node,
                trouble,
                node,
            )

    def populate(self) -> None:
        """Touch every page. Takes about a second a GiB, in which other threads run; a region
        that is closed meanwhile ends it. Raises `ConfigError` if the memory is not there."""
        try:
            for start in range(0, self.size, _POPULATE_BYTES):
                # In pieces: the call holds the interpreter's lock (1.9 s a GiB were measured).
                self._map.madvise(
                    _MADV_POPULATE_WRITE, start, min(_POPULATE_BYTES, self.size - start)
                )
        except ValueError:
            return  # closed
        except OSError as e:
            if e.errno == errno.EINVAL:
                return  # Older kernels populate lazily.
            # Later, a touch would kill whoever touches it.
            raise ConfigError(
                f"{_gib(self.size)} of {self.path.parent} can't be had ({e.strerror}), though "
                "they were free: lower `host.capacity` or mount a larger tmpfs"
            ) from e

    @classmethod
    def attach(cls, name: str, size: int, shm_dir: Path) -> Region:
        """Map a node's region. Raises `Malformed` on an odd name, `LinkBroken` if it is gone."""
        if not _NAME.fullmatch(name):
            raise Malformed(f"not a region name: {name[:200]!r}")
        path = shm_dir / name
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as e:
            raise LinkBroken(f"region {path} can't be mapped: {e.strerror}") from e
        try:
            if os.fstat(fd).st_size != size:
                raise LinkBroken(f"region {path} does not have the {size} bytes its node announced")
            return cls(path, fd, size, owner=False)
        except BaseException:
            os.close(fd)
            raise

    def abandon(self) -> None:
        """Remove the file, as `close` does, but stay mapped until the process ends: something may
        still write to it, by addresses that no view tells of."""
        if self._owner:
            self.path.unlink(missing_ok=True)
        _abandoned.append(self)

    def close(self) -> None:
        """Unmap; the owner also removes the file. Idempotent.

        Memory that a caller still views (numpy arrays, tensors) stays mapped until they let go.
        """
        if self._fd < 0:
            return
        if self._owner:
            self.path.unlink(missing_ok=True)
        # A live export keeps the mapping; the kernel drops it with the last reference.
        with contextlib.suppress(BufferError):
            self.view.release()
            self._map.close()
        os.close(self._fd)
        self._fd = -1


# Never collected, which would unmap them.
_abandoned: list[Region] = []


def sweep(shm_dir: Path) -> list[str]:
    """Remove the regions of dead nodes; their names. Regions of living nodes are locked."""
    removed = []
    for path in sorted(shm_dir.glob(f"{PREFIX}*")):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed.append(path.name)
        except BlockingIOError:
            pass
        finally:
            os.close(fd)
    return removed


def _check_fits(size: int, shm_dir: Path) -> None:
    if size < mmap.PAGESIZE:
        raise ConfigError(f"host.capacity of {size} bytes is less than one page")
    try:
        stat = os.statvfs(shm_dir)
    except OSError as e:
        raise ConfigError(f"host.shm_dir {shm_dir}: {e.strerror}: give a tmpfs") from e
    if not shm_dir.is_dir() or not os.access(shm_dir, os.W_OK | os.X_OK):
        raise ConfigError(
            f"host.shm_dir {shm_dir} is no directory this user may write to: give a tmpfs that is"
        )
    free = stat.f_bavail * stat.f_frsize
    if size > free:
        raise ConfigError(
            f"region needs {_gib(size)} but {shm_dir} has {_gib(free)} free: "
            "lower `host.capacity` or mount a larger tmpfs"
        )


def _in_memory(path: Path) -> bool:
    """Whether files there are memory and nothing else; also where the kernel doesn't tell."""
    told = (ctypes.c_ulong * 32)()  # a statfs, which has about half of that, and the type first
    failed = ctypes.CDLL(None).statfs(os.fsencode(path), told)
    return bool(failed) or told[0] & 0xFFFFFFFF in _IN_MEMORY


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.1f} GiB" if nbytes >= 1 << 27 else f"{nbytes / (1 << 20):.1f} MiB"
