"""The directory of an fs store, which several nodes may share.

A file appears under its own name complete: it is written beside it and renamed over. What is
synced is an option; readers verify what they read.

    .kvstrata-store          which store this is, on whatever mount it is seen
    writers/<writer>.lock    see `fs_writers`
    .<writer>.<n>.tmp        in any directory: being written, or left over if its writer is dead
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import mmap
import os
import re
import secrets
import uuid
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvstrata.errors import ConfigError
from kvstrata.tiers.fs_options import Direct, Durability
from kvstrata.tiers.fs_system import DIRECT, FileSystem
from kvstrata.tiers.fs_writers import Writers

__all__ = ["IDENTITY", "Root", "RootGone", "disk_bytes", "write_all"]

_log = logging.getLogger(__name__)

IDENTITY = ".kvstrata-store"

_TEMP = re.compile(r"\.([0-9]+-[0-9a-f]{12})\.[0-9]+\.tmp")
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL
_PAGE = mmap.PAGESIZE


class RootGone(OSError):  # noqa: N818 (errors are named after the condition)
    """The store is not at its root any more: removed, or another file system is there."""

    def __init__(self, why: str) -> None:
        super().__init__(errno.ENOENT, why)


class _Identity(msgspec.Struct, frozen=True):
    id: uuid.UUID
    format: int = 1
    made: str = ""
    """Another one each time that the store is made, empty. Old stores have none."""


class Root:
    """One writer's hold on a store. Thread-safe; every method may block."""

    def __init__(
        self,
        path: Path,
        system: FileSystem | None = None,
        direct: Direct = "auto",
        durability: Durability = "none",
    ) -> None:
        """Create the store or join it. Raises `ConfigError` if the directory can't hold one."""
        self.path = os.path.abspath(path)
        self.system = FileSystem() if system is None else system
        self._durability = durability
        self._temps = itertools.count()
        self.writers = Writers(self.path, self.system)
        try:
            os.makedirs(self.path, exist_ok=True)
            self.writers.join()
            mine = uuid.uuid4()
            identity = self._identity(mine)
            self.id, self.made = identity.id, identity.made
            if self.id == mine:
                # Where one was expected, the path is wrong or a mount is missing.
                _log.info("fs tier: made a new store in %s", self.path)
            self.direct = self._probe(direct)
        except OSError as e:
            self.close()
            raise ConfigError(
                f"fs tier: root {self.path} can't hold a store ({e.strerror}): give a writable "
                "directory on a file system with hard links"
            ) from e
        except BaseException:
            self.close()
            raise

    @property
    def writer(self) -> str:
        """The name of this one."""
        return self.writers.name

    def at(self, relative: str) -> str:
        return f"{self.path}/{relative}"

    def replace(self, path: str, parts: Sequence[memoryview], direct: bool = False) -> int:
        """Put a file of these parts at `path`, in one step; the bytes it takes on disk.

        `direct`: past the page cache; then every part is aligned to pages, in memory and length.
        """
        system = self.system
        directory = os.path.dirname(path)
        temp = self.temp(directory)
        flags = _CREATE | (DIRECT if direct else 0)
        try:
            fd = system.open(temp, flags)
        except FileNotFoundError:
            self._make_below(directory)
            fd = system.open(temp, flags)
        try:
            try:
                write_all(system, fd, parts)
                if self._durability != "none":
                    system.fdatasync(fd)
                stat = system.fstat(fd)
            finally:
                system.close(fd)
            if stat.st_dev != self._device:
                raise RootGone(f"another file system is at {self.path} now")
            system.rename(temp, path)
        except BaseException:
            with contextlib.suppress(OSError):
                system.unlink(temp)
            raise
        if self._durability == "full":
            self._sync(directory)
        return disk_bytes(stat)

    def temp(self, directory: str) -> str:
        """A name in the directory that nobody else uses, of a file to rename or to remove."""
        return f"{directory}/.{self.writer}.{next(self._temps)}.tmp"

    def swept(self, directory: str) -> list[os.DirEntry[str]]:
        """Entries of a directory but temporary files, of which those of the dead are removed,
        and what an NFS client keeps of removed files that are open."""
        kept = []
        for entry in self.system.entries(directory):
            name = entry.name
            if not name.startswith("."):
                kept.append(entry)
                continue
            temp = _TEMP.fullmatch(name)
            if temp is None and not name.startswith(".nfs"):
                kept.append(entry)
            elif temp is not None and self.writers.orphaned(entry, temp[1]):
                with contextlib.suppress(FileNotFoundError):
                    self.system.unlink(entry.path)
        return kept

    def check(self) -> None:
        """Raises `RootGone` if this store isn't here any more, or was emptied and made again
        since `made`; `OSError` if that can't be told."""
        try:
            fd = self.system.open(self.at(IDENTITY), os.O_RDONLY)
        except FileNotFoundError:
            raise RootGone(f"{self.path} is gone or empty") from None
        page = memoryview(bytearray(_PAGE))
        try:
            page = page[: self.system.preadv(fd, [page], 0)]
        finally:
            self.system.close(fd)
        with contextlib.suppress(msgspec.DecodeError):
            identity = msgspec.json.decode(page, type=_Identity)
            if identity.id == self.id:
                if identity.made != self.made:
                    raise RootGone(f"{self.path} was removed, and made again empty")
                return
        raise RootGone(f"{self.path} holds another store: restart the node to use that one")

    def try_write(self, nbytes: int) -> None:
        """Write a file of about that size, read it and remove it. Raises `OSError`."""
        temp = self.temp(self.path)
        page = memoryview(os.urandom(_PAGE))
        again = memoryview(bytearray(_PAGE))
        try:
            fd = self.system.open(temp, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            try:
                for i in range(max(1, -(-nbytes // _PAGE))):
                    write_all(self.system, fd, [page], i * _PAGE)
                self.system.preadv(fd, [again], 0)
            finally:
                self.system.close(fd)
            if again != page:
                raise OSError(errno.EIO, "what was written is not what is read")
        finally:
            with contextlib.suppress(OSError):
                self.system.unlink(temp)

    def restore(self) -> str:
        """Make the store again, empty, where it has been removed, or join it where somebody else
        has. Raises `RootGone` where another file system has come in its place, since that one's
        disk isn't ours to fill.

        Returns what `made` is to be set to by whoever has forgotten what the store held. Until
        then `check` raises: a thread that nobody waits for any more may have come this far.
        """
        with contextlib.suppress(FileExistsError):
            self.system.mkdir(self.path)
        if self._device_here() != self._device:
            raise RootGone(f"another file system is at {self.path} now: mount the store again")
        identity = self._identity(self.id)
        if identity.id != self.id:
            raise RootGone(f"{self.path} holds another store: restart the node to use that one")
        self.writers.leave()
        self.writers.join()
        return identity.made

    def close(self) -> None:
        """Let go. Idempotent."""
        self.writers.leave()

    def _make(self, directory: str) -> None:
        with contextlib.suppress(FileExistsError):
            self.system.mkdir(directory)

    def _make_below(self, directory: str) -> None:
        """A directory and those above it, but never the root: where that is missing, a mount may
        be, and what is written there would fill another disk."""
        made = []
        missing = [directory]
        while missing:
            if os.path.dirname(missing[-1]) == self.path:
                self.check()
            try:
                self.system.mkdir(missing[-1])
                made.append(os.path.dirname(missing.pop()))
            except FileExistsError:
                missing.pop()
            except FileNotFoundError:
                above = os.path.dirname(missing[-1])
                if above == self.path or not above.startswith(self.path):
                    raise RootGone(f"{self.path} is gone") from None
                missing.append(above)
        if self._durability == "full":
            for above in made:
                self._sync(above)

    def _sync(self, directory: str) -> None:
        fd = self.system.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self.system.fsync(fd)
        finally:
            self.system.close(fd)

    def _identity(self, mine: uuid.UUID) -> _Identity:
        """The store's, written by whoever comes first."""
        path = self.at(IDENTITY)
        temp = self.temp(self.path)
        try:
            fd = self.system.open(temp, _CREATE)
            try:
                content = memoryview(
                    msgspec.json.encode(_Identity(mine, made=secrets.token_hex(8)))
                )
                write_all(self.system, fd, [content])
                self._device = self.system.fstat(fd).st_dev
            finally:
                self.system.close(fd)
            with contextlib.suppress(FileExistsError):
                self.system.link(temp, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                self.system.unlink(temp)
        try:
            identity = msgspec.json.decode(Path(path).read_bytes(), type=_Identity)
        except (msgspec.DecodeError, msgspec.ValidationError) as e:
            raise ConfigError(f"fs tier: {path} does not identify a store: {e}") from e
        if identity.format != 1:
            raise ConfigError(f"fs tier: {path} has format {identity.format}, this one reads 1")
        return identity

    def _device_here(self) -> int:
        """The device of files made at the root now: on some stacks not that of the directory."""
        temp = self.temp(self.path)
        fd = self.system.open(temp, _CREATE)
        try:
            return self.system.fstat(fd).st_dev
        finally:
            self.system.close(fd)
            self.system.unlink(temp)

    def _probe(self, direct: Direct) -> bool:
        """Whether the file system takes O_DIRECT, if that is wanted. Raises `ConfigError`."""
        if direct == "off":
            return False
        try:
            if not DIRECT:
                raise OSError(errno.EINVAL, "this system has none")
            temp = self.temp(self.path)
            page = memoryview(mmap.mmap(-1, _PAGE))
            try:
                fd = self.system.open(temp, os.O_RDWR | os.O_CREAT | os.O_EXCL | DIRECT)
                try:
                    write_all(self.system, fd, [page])
                    read = self.system.preadv(fd, [page], 0)
                finally:
                    self.system.close(fd)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    self.system.unlink(temp)
        except OSError as e:
            if direct == "on":
                raise ConfigError(
                    f"fs tier: {self.path} does not take O_DIRECT ({e.strerror}): set `direct` to "
                    "`auto` or `off`"
                ) from e
            return False
        return read == _PAGE


def disk_bytes(stat: os.stat_result) -> int:
    """Of disk really used. Some network and FUSE file systems don't say: then the size."""
    return stat.st_blocks * 512 or stat.st_size


def write_all(system: FileSystem, fd: int, parts: Sequence[memoryview], offset: int = 0) -> None:
    """Write every byte, however little is taken at a time. Raises `OSError`."""
    left = [part for part in parts if part.nbytes]
    while left:
        written = system.pwritev(fd, left, offset)
        if written <= 0:
            raise OSError(errno.EIO, "a write took nothing")
        offset += written
        while left and written >= left[0].nbytes:
            written -= left.pop(0).nbytes
        if left and written:
            left[0] = left[0][written:]
